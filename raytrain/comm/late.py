"""Reduction beside the next step: gradients are applied one step late."""

from dataclasses import dataclass
from functools import partial

import torch
from torch._C._distributed_c10d import GradBucket

from raytrain.comm.bucket import Bucket, FlatOrder
from raytrain.comm.float import FloatReduction
from raytrain.comm.group import Group
from raytrain.comm.lane import Future
from raytrain.comm.step import Outcome


@dataclass
class _Flight:
    """A step whose sums are under way, or have come."""

    step: int
    micro_batches: int
    images: int
    sums: torch.Tensor
    buckets: list[Bucket]
    """Of this step; none where there is one rank, or it was loaded."""
    gradients: list[torch.Tensor | None]
    """By parameter, where there are no buckets."""
    futures: list[Future]


class LateReduction(FloatReduction):
    """Hands back a step's gradient at the end of the next one, whose computation hid its way over the wire.

    So the gradient of step t is taken at weights to which that of step t - 1 has not been applied yet: SGD with a delay
    of one step (Langford 2009, arXiv 0911.0491), on any number of ranks. All else that a step sums comes as late. A
    backward pass finds its buckets free as soon as they are copied; two sets of copies take turns.

    Checkpoint: holds the gradient that is not applied yet.
    """

    def __init__(self, *args, **kwargs) -> None:  # noqa: ANN002, ANN003 - those of FloatReduction
        super().__init__(*args, **kwargs)
        self._order = FlatOrder(self._parameters)
        self._last: _Flight | None = None
        self._copies: dict[tuple[int, int], torch.Tensor] = {}
        if self._lane is not None:
            self._all = Group(range(self._runtime.world_size))

    def begin(self, step: int, micro_batches: int, images: int) -> None:
        super().begin(step, micro_batches, images)
        self._next = _Flight(step, micro_batches, images, self._sums, [], [], [])

    def finish(self, stop: int = 0, *, save: bool = False, agree: bool = True) -> Outcome:
        del agree
        self._complete(stop, save)
        if self._lane is not None:
            sums = self._sums
            self._next.futures.append(self._lane.submit(lambda: self._all.all_reduce(sums), sums))
        else:
            self._next.gradients = [parameter.grad for parameter in self._parameters]
        last, self._last = self._last, self._next
        return self._land(last) if last is not None else Outcome(None, self._batchnorm.running, None)

    def flush(self) -> Outcome | None:
        last, self._last = self._last, None
        return self._land(last) if last is not None else None

    @property
    def sent_bytes(self) -> float:
        return 0.0 if self._topology is None else self._topology.sent_bytes

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self._last is None:
            return super().state_dict()
        self._wait(self._last)
        self._last.sums[2:4] = 0  # a checkpoint is being taken, and a stop concerns this process alone
        gradient = torch.zeros(self._order.size, device=self._runtime.device)
        for bucket in self._last.buckets or self._whole(self._last.gradients):
            self._order.write(gradient, bucket, bucket.tensor)
        few = torch.tensor([self._last.step, self._last.micro_batches, self._last.images])
        late = {"gradient": gradient, "sums": self._last.sums, "few": few}
        return {**{f"late.{key}": value for key, value in late.items()}, **super().state_dict()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        late = {key.removeprefix("late."): value for key, value in state.items() if key.startswith("late.")}
        super().load_state_dict({key: value for key, value in state.items() if not key.startswith("late.")})
        self._last = None
        if late:
            sums = late["sums"]
            statistics = self._batchnorm.seen.numel()
            bad = sums[4 : len(sums) - statistics].sum().view(1)  # of ranks that are not these
            few = [sums[:4], bad, sums.new_zeros(self._runtime.world_size - 1), sums[len(sums) - statistics :]]
            gradient = Bucket(0, late["gradient"], self._parameters, is_last=True)
            step, micro_batches, images = late["few"].tolist()
            self._last = _Flight(step, micro_batches, images, torch.cat(few), [gradient], [], [])

    def close(self) -> None:
        super().close()
        if self._lane is not None:
            self._all.close()

    def _hook(self, bucket: GradBucket) -> Future:
        done: Future = torch.futures.Future(
            devices=[self._runtime.device] if self._runtime.device.type == "cuda" else None
        )
        if self._lane is not None and self._topology is not None:
            key = self._step % 2, bucket.index()
            if key not in self._copies:
                self._copies[key] = torch.empty_like(bucket.buffer())
            tensor = self._copies[key].copy_(bucket.buffer())
            own = Bucket(bucket.index(), tensor, bucket.parameters(), bucket.is_last())
            self._next.buckets.append(own)
            self._next.futures.append(
                self._lane.submit(partial(self._compression.sum, own, self._topology), own.tensor)
            )
        done.set_result(bucket.buffer())
        return done

    def _needs_lane(self, nodes: list[list[int]]) -> bool:
        del nodes
        return True

    def _land(self, flight: _Flight) -> Outcome:
        """Puts a step's gradient, whose sums have come, into the parameters."""
        self.clock.start()
        self._wait(flight)
        self.clock.stop()
        for bucket in flight.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views(), strict=True):
                parameter.grad = view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())
        for parameter, gradient in zip(self._parameters, flight.gradients, strict=False):
            parameter.grad = gradient
        return self._outcome(flight.step, flight.sums, flight.micro_batches, flight.images)

    def _wait(self, flight: _Flight) -> None:
        for future in flight.futures:
            future.wait()
        if self._lane is not None:
            self._lane.check()

    def _whole(self, gradients: list[torch.Tensor | None]) -> list[Bucket]:
        """Gradients of one rank as a bucket of all."""
        flat = [
            torch.zeros(p.numel(), device=p.device) if g is None else g.as_strided((p.numel(),), (1,))
            for p, g in zip(self._parameters, gradients, strict=True)
        ]
        return [Bucket(0, torch.cat(flat), self._parameters, is_last=True)]
