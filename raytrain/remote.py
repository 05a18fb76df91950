"""A parameter server that is one of Ray's actors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain.comm.server import ParameterServer, Server
from raytrain.config import Config


def start_server(config: Config) -> Any:
    """The actor, on this machine, for one start of a run's workers."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here}
    return ray.remote(**options)(_ServerActor).remote(config)


class RemoteServer(Server):
    """The actor as workers call it. What it cannot do, because it is gone, raises one of Ray's errors."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, shapes: Sequence[tuple[int, ...]], weights: torch.Tensor, momenta: torch.Tensor) -> None:
        ray.get(self._actor.begin.remote(shapes, weights.numpy(), momenta.numpy()))

    def push(self, rank: int, gradient: torch.Tensor, share: float, lr: float) -> tuple[torch.Tensor, int]:
        weights, staleness = ray.get(self._actor.push.remote(rank, gradient.numpy(), share, lr))
        return _tensor(weights), staleness

    def pull(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights, momenta = ray.get(self._actor.pull.remote(rank))
        return _tensor(weights), _tensor(momenta)


class _ServerActor:
    """Arrays in and out, which Ray hands over without copies within a machine."""

    def __init__(self, config: Config) -> None:
        self._server = ParameterServer(config.optim, config.comm.delay_compensation)

    def begin(self, shapes: Sequence[tuple[int, ...]], weights: np.ndarray, momenta: np.ndarray) -> None:
        self._server.begin(shapes, _tensor(weights), _tensor(momenta))

    def push(self, rank: int, gradient: np.ndarray, share: float, lr: float) -> tuple[np.ndarray, int]:
        weights, staleness = self._server.push(rank, _tensor(gradient), share, lr)
        return weights.numpy(), staleness

    def pull(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        weights, momenta = self._server.pull(rank)
        return weights.numpy(), momenta.numpy()


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of an array of Ray's, which lies in memory that may not be written to."""
    return torch.from_numpy(array.copy())
