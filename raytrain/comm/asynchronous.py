"""Steps through a parameter server, without waiting for other workers."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from raytrain.comm.local import LocalReduction
from raytrain.comm.server import ParameterServer, Server
from raytrain.comm.step import Clock
from raytrain.config import Config, Optim
from raytrain.distributed import Runtime
from raytrain.errors import ConfigError
from raytrain.optim import make_optimizer


class PushOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer that a server has: a step gives it the gradients, and takes the weights from it.

    Its state is what the server's was at the last `pull`, in the form of SGD's.

    Args:
        parameters: of the network.
        optim: the server's optimizer.
        server: where it is.
        rank: this one.
        clock: counts the time of pushes.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optim: Optim, server: Server, rank: int, clock: Clock
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        like = make_optimizer(self._parameters, optim)
        super().__init__(like.param_groups, like.defaults)
        self.state.update(like.state)
        self._server, self._rank, self.clock = server, rank, clock
        self._staleness: list[int] = []
        self.share = 1.0
        """This rank's images over those of the whole step; see `Server.push`."""
        self.sent_bytes = 0.0
        """What this rank has pushed."""

    def begin(self) -> None:
        """Gives the server the weights and momenta of this process, to go on from. One rank calls."""
        shapes = [tuple(p.shape) for p in self._parameters]
        weights = self._flat(self._parameters)
        momenta = torch.zeros_like(weights) if not self.state else self._flat(self._momenta())
        self._server.begin(shapes, weights, momenta)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Pushes the gradients, if there are any, and pulls the weights."""
        assert closure is None
        if all(p.grad is None for p in self._parameters):
            return
        gradient = self._flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters])
        self.clock.start()
        weights, staleness = self._server.push(self._rank, gradient, self.share, self.param_groups[0]["lr"])
        self._put(self._parameters, weights)
        self.clock.stop()
        self.sent_bytes += gradient.nbytes
        self._staleness.append(staleness)

    @torch.no_grad()
    def pull(self) -> None:
        """Takes weights and momenta from the server."""
        weights, momenta = self._server.pull(self._rank)
        self._put(self._parameters, weights)
        if self.state:
            self._put(self._momenta(), momenta)

    def mean_staleness(self) -> float:
        """Mean over the pushes since this was last called: gradients of others that were applied meanwhile."""
        pushes, self._staleness = self._staleness, []
        return sum(pushes) / max(len(pushes), 1)

    def _momenta(self) -> list[torch.Tensor]:
        return [self.state[p]["momentum_buffer"] for p in self._parameters]

    def _flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()

    def _put(self, tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
        for tensor, piece in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def make_push_optimizer(config: Config, model: nn.Module, runtime: Runtime) -> PushOptimizer:
    """An optimizer of the runtime's server; one process alone is its own.

    Raises:
        ConfigError: there are several processes, and no server.
    """
    server = runtime.server
    if server is None and runtime.world_size > 1:
        raise ConfigError("comm.sync=async needs a parameter server, which only Ray starts; run without torchrun")
    server = server or ParameterServer(config.optim, config.comm.delay_compensation)
    return PushOptimizer(model.parameters(), config.optim, server, runtime.rank, Clock(runtime))


class AsyncReduction(LocalReduction):
    """Hands back each rank's own part of a step's gradient, for a `PushOptimizer`. All ranks must construct it.

    A part is the sum over the rank's images over the images of the whole step: so the parts of a step add up to its
    gradient, whoever computes them, and the learning rate is that of synchronous SGD. Every `comm.period` steps, and
    where ranks must agree, they wait for each other, take the server's weights, and average batch norm's statistics.

    Checkpoint: one lies where they agree, and is what synchronous SGD would have.
    """

    _optimizer: PushOptimizer
    _has_begun = False

    def __init__(self, *args, **kwargs) -> None:  # noqa: ANN002, ANN003 - those of LocalReduction
        super().__init__(*args, **kwargs)
        self.clock = self._optimizer.clock

    def begin(self, step: int, micro_batches: int, images: int) -> None:
        super().begin(step, micro_batches, images)
        if not self._has_begun:
            self._has_begun = True
            if self._runtime.rank == 0:
                self._optimizer.begin()
            self._runtime.barrier()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        del last
        return super().micro_batch(last=False)

    @property
    def sent_bytes(self) -> float:
        return self._optimizer.sent_bytes if self._runtime.world_size > 1 else 0.0

    def metrics(self) -> dict[str, float]:
        return {"perf/comm_staleness": self._optimizer.mean_staleness()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict(state)
        self._has_begun = False

    def _scale_gradients(self) -> None:
        """Leaves them: a server takes parts."""
        self._optimizer.share = self._own_images / self._images

    def _average(self, weight: torch.Tensor) -> None:
        self._mean([self._batchnorm.running], weight)  # which also waits for the last push of each
        self._batchnorm.seen.copy_(self._batchnorm.running)
        self._optimizer.pull()
        self._runtime.barrier()
