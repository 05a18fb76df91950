"""Measures what `predict` needs, on the ranks of a run, in a few steps and sums."""

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from raytrain.comm.bucket import Bucket
from raytrain.comm.compression import Compression
from raytrain.comm.lane import Future
from raytrain.comm.predict import Computation, Sums, fit_line
from raytrain.comm.topology import Topology
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.model import build_model
from raytrain.optim import make_optimizer
from raytrain.plan import deal

STEPS = 4
"""Of which the first ones, in which memory is found and buckets are laid out, do not count."""
SMALL, LARGE = 2**16, 2**23
"""Bytes of the sums that are timed."""
REPEATS = 5
SPIN_SECONDS = 0.5
"""In which a process shows how many processors it gets."""


def measure_computation(config: Config, num_classes: int, runtime: Runtime, dtype: torch.dtype | None) -> Computation:
    """Times steps on random images, whose gradients go nowhere. All ranks must call.

    Args:
        config: the run.
        num_classes: of the training set.
        runtime: this process.
        dtype: of autocast, or None.
    """
    device, size = runtime.device, config.train.micro_batch_size
    model = build_model(config.model, config.data, num_classes, config.run.seed).to(device)
    optimizer = make_optimizer(model.parameters(), config.optim)
    parallel = DistributedDataParallel(
        model,
        gradient_as_bucket_view=config.comm.gradient_as_bucket_view,
        bucket_cap_mb=config.comm.bucket_cap_mb,
    )
    parallel.broadcast_buffers = False
    ready: list[tuple[float, int]] = []

    def keep(_: object, bucket: GradBucket) -> Future:
        ready.append((now(device), bucket.buffer().nbytes))
        done: Future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, keep)
    images = torch.randint(256, (size, config.data.image_size, config.data.image_size, 3), dtype=torch.uint8)
    images, labels = images.to(device), torch.zeros(size, dtype=torch.int64, device=device)
    own = len(deal(config.train.global_batch_size // size, runtime.world_size)[0])
    spans: list[list[float]] = []
    for _ in range(STEPS):
        ready.clear()
        start = now(device)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(parallel(images), labels)
        middle = now(device)
        loss.backward()
        end = now(device)
        optimizer.step()
        optimizer.zero_grad()
        spans.append([middle - start, end - middle, now(device) - end, *(when - middle for when, _ in ready)])
    slowest = [max(figures) for figures in zip(*runtime.gather(_medians(spans[STEPS // 2 :])), strict=True)]
    forward, backward, update = slowest[:3]
    buckets = tuple(zip(slowest[3:], [size for _, size in ready], strict=True))
    return Computation(own * forward + (own - 1) * backward, backward, update, buckets)


def measure_sums(topology: Topology, compression: Compression, runtime: Runtime, ranks: int, delay: float) -> Sums:
    """Times sums of two sizes, on the clock and on the processors. All ranks must call.

    Args:
        topology: how they go.
        compression: what goes over the wire. It must keep no state.
        runtime: this process.
        ranks: in the ring whose links are the slowest.
        delay: what `measure_delay` says.
    """
    small, large = (
        Bucket(0, torch.zeros(size // 4, device=runtime.device), [], is_last=True) for size in (SMALL, LARGE)
    )

    def line(sum_up: Callable[[Bucket], None]) -> tuple[float, float, float]:
        """Latency, seconds a byte, processor seconds a byte."""
        brief, long = _time(partial(sum_up, small), runtime), _time(partial(sum_up, large), runtime)
        return *fit_line((SMALL, brief[0]), (LARGE, long[0])), long[1] / LARGE

    latency, slope, work = line(lambda bucket: compression.sum(bucket, topology))
    inside = (0.0, 0.0, 0.0)
    if ranks < runtime.world_size:  # the same on all of them
        inside = line(lambda bucket: topology.sum(bucket.tensor, lambda *_: None))
    return Sums(ranks, latency, slope, work * delay, min(inside[0], latency), min(inside[1], slope))


def _time(call: Callable[[], None], runtime: Runtime) -> tuple[float, float]:
    """Seconds that a call takes, and those of this process's processors: medians of a few, of the slowest rank."""
    call()
    spans = []
    for _ in range(REPEATS):
        runtime.barrier()
        start, start_work = now(runtime.device), time.process_time()
        call()
        spans.append([now(runtime.device) - start, time.process_time() - start_work])
    seconds, work = (max(figures) for figures in zip(*runtime.gather(_medians(spans)), strict=True))
    return seconds, work


def measure_delay(runtime: Runtime) -> float:
    """Seconds by which a processor second of another thread delays a rank's computation; of the slowest rank.

    All ranks must call. 0 on a GPU and where there is a processor for it, else 1 over the number of processors that
    this process gets, which others may share.
    """
    if runtime.device.type != "cpu":
        return 0.0
    threads, done = torch.get_num_threads(), threading.Event()

    def multiply() -> None:
        torch.set_num_threads(1)  # for this thread, and those that are started later
        matrix = torch.zeros(256, 256)
        while not done.is_set():
            torch.mm(matrix, matrix)

    busy = [threading.Thread(target=multiply, name="multiply", daemon=True) for _ in range(threads + 1)]
    runtime.barrier()
    start, start_work = time.perf_counter(), time.process_time()
    for thread in busy:
        thread.start()
    time.sleep(SPIN_SECONDS)
    done.set()
    for thread in busy:
        thread.join()
    torch.set_num_threads(threads)
    processors = (time.process_time() - start_work) / (time.perf_counter() - start)
    return max(runtime.gather(min(max(threads + 1 - processors, 0.0), 1.0) / processors))


def _medians(rows: list[list[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def now(device: torch.device) -> float:
    """Seconds on the clock, when a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
