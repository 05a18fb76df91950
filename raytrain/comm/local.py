"""Steps by each worker's own gradients, and averages of what they came to."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from raytrain.comm.compression import Uncompressed
from raytrain.comm.float import FloatReduction
from raytrain.comm.step import Outcome, Totals
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.model import Classifier, StepBatchNorm


class LocalReduction(FloatReduction):
    """Post-local SGD (Lin 2018, arXiv 1808.07217). All ranks must construct it.

    After `comm.warmup_steps` steps of one gradient for all, a rank steps by the mean gradient of its own images. Every
    `comm.period` steps, and where ranks must agree, weights, the optimizer's moments, batch norm's statistics and the
    moving average become their means over the ranks, each with the weight of the images behind it since the last time.
    So with a period of 1 it is the every-step SGD, of any number of ranks and shares.

    Checkpoint: one lies behind an average, and has nothing of this.
    """

    def __init__(
        self,
        config: Config,
        model: Classifier,
        batchnorm: StepBatchNorm,
        runtime: Runtime,
        nodes: list[list[int]],
        optimizer: torch.optim.Optimizer,
        ema: AveragedModel | None,
    ) -> None:
        super().__init__(config, model, batchnorm, runtime, nodes, Uncompressed())
        self._period, self._warmup_steps = config.comm.period, config.comm.warmup_steps
        self._optimizer, self._ema = optimizer, ema
        self._since = torch.zeros(4 + runtime.world_size, device=runtime.device)
        self._weight: torch.Tensor | None = None
        self._sent_bytes = 0.0

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return super().micro_batch(last=last and self._step < self._warmup_steps)

    def finish(self, stop: int = 0, *, save: bool = False, agree: bool = True) -> Outcome:
        if self._step < self._warmup_steps:
            return super().finish(stop, save=save, agree=agree)
        self._scale_gradients()
        self._since += self._sums[: len(self._since)]
        statistics = self._batchnorm.running
        if self._own_micro_batches:
            statistics = self._sums[len(self._since) :] / self._own_micro_batches
        if not agree and (self._step + 1) % self._period:
            return Outcome(self._step, statistics, None)
        own_images = self._since[1].clone()
        self._since[2], self._since[3] = stop, save
        self.clock.start()
        sums = self._runtime.sum(self._since)
        self.clock.stop()
        self._weight = own_images / sums[1].clamp(min=1)
        self._since = torch.zeros_like(sums)
        return Outcome(self._step, statistics, Totals.of(sums))

    def after_update(self) -> None:
        if self._weight is not None:
            self.clock.start()
            self._average(self._weight)
            self.clock.stop()
            self._weight = None

    @property
    def sent_bytes(self) -> float:
        return super().sent_bytes + (0.0 if self._topology is not None else self._sent_bytes)

    def _scale_gradients(self) -> None:
        """Makes of this rank's part of the step's gradient the mean gradient of its own images."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self._images / max(self._own_images, 1))

    def _average(self, weight: torch.Tensor) -> None:
        """Makes what differs between ranks the mean over them, of which this one has a weight, float []."""
        moments = [v for s in self._optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim]
        averages = (
            [] if self._ema is None else [v for v in self._ema.module.state_dict().values() if v.is_floating_point()]
        )
        self._mean([*self._parameters, *moments, self._batchnorm.running, *averages], weight)
        self._batchnorm.seen.copy_(self._batchnorm.running)

    @torch.no_grad()
    def _mean(self, tensors: list[torch.Tensor], weight: torch.Tensor) -> None:
        vector = torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(weight)
        if self._topology is not None:
            self._topology.sum(vector)
        else:
            self._runtime.sum(vector)
            self._sent_bytes += 2 * (self._runtime.world_size - 1) / self._runtime.world_size * vector.nbytes
        for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
