"""Which process this is, on which device, and the collectives that the rest uses."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d

from raytrain.errors import ConfigError, ResourceError

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """One process of a run. With `world_size` 1 there need be no process group."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    stop_requested: Callable[[], int] = lambda: 0
    """The number of the signal that asks the run to end after the present step, or 0. Each rank may say so."""
    node: str = ""
    """What tells the node on which this process runs."""
    server: Any = None
    """The parameter server of `comm.sync=async`, see `comm.server`, where there is one."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over all ranks, in place. All ranks must call."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Begins to sum a tensor over all ranks, in place; done when what it returns is called. All ranks must call."""
        work = dist.all_reduce(tensor, async_op=True) if self.world_size > 1 else None
        return work.wait if work is not None else lambda: None

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes the greatest over all ranks, in place. All ranks must call."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of rank; anything that can be pickled. All ranks must call."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Returns when all ranks have called."""
        self.sum(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.world_size > 1:
            dist.all_reduce(tensor, op)
        return tensor


def torchrun_runtime(*, use_gpu: bool | None) -> Runtime:
    """Joins the process group that torchrun's environment describes. All its processes must call.

    Raises:
        ResourceError: this machine has no GPU for this process.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    use_gpu = torch.cuda.is_available() if use_gpu is None else use_gpu
    if use_gpu and local_rank >= torch.cuda.device_count():
        raise ResourceError(
            f"a process for local rank {local_rank} needs {local_rank + 1} GPU(s) on this machine, and there are "
            f"{torch.cuda.device_count()}; start as many as there are, or set scaling.use_gpu=false"
        )
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    return Runtime(dist.get_rank(), local_rank, dist.get_world_size(), device, node=socket.gethostname())


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_precision(precision: str, device: torch.device) -> str:
    """What `auto` means on a device: bf16 where it computes in it, else fp16 on GPUs and fp32 on CPUs."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "fp32"  # noqa: SLF001


def check_precision(precision: str, device_type: str) -> None:
    """Raises ConfigError where a device cannot train in a precision."""
    if precision == "fp16" and device_type == "cpu":
        raise ConfigError("train.precision fp16 is 20 times slower than fp32 on CPUs; take auto, bf16 or fp32")


def flight_recorder() -> str:
    """The collectives that this process has been in of late, as JSON, where this torch records them; or nothing."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            text = dump().decode()
            return text if json.loads(text).get("entries") else ""
    return ""
