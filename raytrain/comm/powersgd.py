"""Matrices of low rank in place of gradients, by torch's hook."""

from dataclasses import dataclass

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from raytrain.comm.bucket import Bucket, FlatOrder
from raytrain.comm.compression import Compression
from raytrain.comm.group import Group
from raytrain.comm.topology import Topology
from raytrain.config import Comm


class PowerSGD(Compression):
    """PowerSGD (Vogels 2019, arXiv 1905.13727) with error feedback, as torch has it.

    torch's hook starts collectives from callbacks, whose order differs between ranks where several buckets are under
    way; here a bucket is done before the next one begins.

    Checkpoint: as for `Onebit`, the sum of the ranks' errors, of which each gets an equal share; and rank 0's matrices,
    which all have.
    """

    is_whole = True

    def __init__(self, order: FlatOrder, comm: Comm, seed: int) -> None:
        self._order, self._comm, self._seed = order, comm, seed
        self._state: dict[str, torch.Tensor] = {}
        self._hook_state: PowerSGDState | None = None
        self._buckets: dict[int, Bucket] = {}
        self._topology: Topology | None = None

    def sum(self, bucket: Bucket, topology: Topology) -> None:
        topology.sum(bucket.tensor, lambda _, group: self._sum(bucket, topology, group))
        self._topology = topology

    def state_dict(self) -> dict[str, torch.Tensor]:
        if self._topology is None or self._topology.nodes == 1:  # since it was loaded nothing has been compressed
            return self._state
        device = next(iter(self._order.parameters)).device
        error = torch.zeros(self._order.size, device=device)
        self._state = {"error": error}
        if (state := self._hook_state) is not None:
            self._state["step"] = torch.tensor(state.iter)
            for index, bucket in self._buckets.items():
                if index in state.error_dict:
                    self._order.write(error, bucket, state.error_dict[index])
                if index in state.p_memory_dict:
                    self._state[f"p.{index}"] = state.p_memory_dict[index]
                    self._state[f"q.{index}"] = state.q_memory_dict[index]
        self._topology.sum(error)
        self.load_state_dict(self._state)
        return self._state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._state, self._hook_state, self._buckets, self._topology = state, None, {}, None

    def _sum(self, bucket: Bucket, topology: Topology, group: Group) -> None:
        if self._hook_state is None:
            self._hook_state = PowerSGDState(
                group.group,
                matrix_approximation_rank=self._comm.powersgd_rank,
                start_powerSGD_iter=self._comm.powersgd_start_step,
                warm_start=self._comm.powersgd_warm_start,
            )
            self._hook_state.iter = int(self._state.get("step", 0))
        state = self._hook_state
        if bucket.index not in self._buckets:
            self._buckets[bucket.index] = bucket
            if self._state:
                state.error_dict[bucket.index] = self._order.read(self._state["error"], bucket) / topology.nodes
            if f"p.{bucket.index}" in self._state:
                state.p_memory_dict[bucket.index] = self._state[f"p.{bucket.index}"].clone()
                state.q_memory_dict[bucket.index] = self._state[f"q.{bucket.index}"].clone()
        state.rng.seed([self._seed, state.iter, bucket.index])
        before = state.total_numel_after_compression
        is_plain = state.iter < state.start_powerSGD_iter
        powerSGD_hook(state, _HookBucket(bucket)).wait()  # type: ignore[arg-type]
        elements = bucket.tensor.numel() if is_plain else state.total_numel_after_compression - before
        group.count_all_reduce(elements * bucket.tensor.element_size())
        bucket.tensor.mul_(group.size)  # the hook averages


@dataclass
class _HookBucket:
    """What the hook asks of DistributedDataParallel's buckets. Its matrices are rows in the order of memory."""

    _bucket: Bucket

    def buffer(self) -> torch.Tensor:
        return self._bucket.tensor

    def gradients(self) -> list[torch.Tensor]:
        parameters = self._bucket.parameters
        shapes = [(p.shape[0], -1) if p.ndim > 1 else p.shape for p in parameters]
        return [view.view(shape) for view, shape in zip(self._bucket.views(), shapes, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return list(self._bucket.parameters)

    def index(self) -> int:
        return self._bucket.index

    def is_last(self) -> bool:
        return self._bucket.is_last
