"""How long a step takes with a way of communicating, from what the computation and the links take.

The model. A step computes its micro-batches; during the last one's backward pass buckets of gradients become ready one
after another, and are summed over the ranks one after another. A sum of `size` bytes takes a + b size seconds: a is its
messages' latency, b what the slowest link takes for a byte. So a bucket begins when it is ready and the one before is
done, and the step ends with the last one, a small sum of its own and the update. Where processors do both and have
none to spare, a byte takes b + c beside computation, which goes on for b of them: c is the processors' work on a byte,
over the number of processors that a worker gets, for which one of the two has to wait.

Over W ranks a ring takes 2 (W - 1) messages and passes on 2 (W - 1) / W of the bytes, which says what a, b and c become
for another number of ranks; but for what of a and b is spent inside the nodes.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Computation:
    """What a step of one rank takes without communication, seconds; of the slowest rank."""

    forward: float
    """All up to the last backward pass."""
    backward: float
    """The last backward pass."""
    update: float
    buckets: tuple[tuple[float, int], ...]
    """For each bucket, when it is ready, after the last backward pass began, and its bytes in float32."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Sums:
    """What sums over the ranks take, in one way of doing them."""

    ranks: int
    """In the ring whose links are the slowest: all of them, or one a node."""
    latency: float
    """a, seconds."""
    seconds_per_byte: float
    """b, of float32 that is summed, however few bits go over the wire for it."""
    delay_per_byte: float
    """c, seconds; 0 on a GPU."""

    inside_latency: float = 0.0
    """Of a, what is spent inside nodes."""
    inside_seconds_per_byte: float = 0.0
    """Of b, the same."""

    def over(self, ranks: int) -> "Sums":
        """The same with so many ranks in the ring."""
        messages = (ranks - 1) / (self.ranks - 1)
        passes = messages * self.ranks / ranks
        return replace(
            self,
            ranks=ranks,
            latency=self.inside_latency + (self.latency - self.inside_latency) * messages,
            seconds_per_byte=self.inside_seconds_per_byte
            + (self.seconds_per_byte - self.inside_seconds_per_byte) * passes,
            delay_per_byte=self.delay_per_byte * passes,
        )


def predict_step(computation: Computation, sums: Sums) -> float:
    """Seconds of a step, by the model above."""
    end = done = 0.0  # since the last backward pass began: on the clock, and of its computation
    for ready, size in computation.buckets:
        start = max(done, ready)
        end, done = end + start - done + sums.latency, min(start + sums.latency, computation.backward)
        alone = max(sums.seconds_per_byte * size - (computation.backward - done), 0.0)  # when all is computed
        beside = sums.seconds_per_byte * size - alone
        share = beside / (sums.seconds_per_byte * size) if sums.seconds_per_byte else 1.0
        end, done = end + alone + beside + sums.delay_per_byte * size * share, done + beside
    return computation.forward + end + computation.backward - done + sums.latency + computation.update


def fit_line(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """The line through two points (size, seconds): latency and seconds a byte, neither below 0."""
    slope = max(large[1] - small[1], 0.0) / (large[0] - small[0])
    return max(small[1] - slope * small[0], 0.0), slope
