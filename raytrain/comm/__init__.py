"""How a step's gradients, losses and batch-norm statistics become one over all workers."""

import torch
from torch.optim.swa_utils import AveragedModel

from raytrain.comm.asynchronous import AsyncReduction, make_push_optimizer
from raytrain.comm.bucket import FlatOrder
from raytrain.comm.choose import choose_strategy
from raytrain.comm.compression import Compression, Half, Uncompressed
from raytrain.comm.exact import ExactReduction
from raytrain.comm.float import FloatReduction
from raytrain.comm.late import LateReduction
from raytrain.comm.local import LocalReduction
from raytrain.comm.momentum import OnebitMomentum
from raytrain.comm.onebit import Onebit
from raytrain.comm.powersgd import PowerSGD
from raytrain.comm.step import Outcome, Reduction, Totals
from raytrain.comm.topology import nodes_of
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.errors import ConfigError
from raytrain.model import Classifier, StepBatchNorm
from raytrain.optim import OnebitAdam

__all__ = ["Outcome", "Reduction", "Totals", "choose_strategy", "make_push_optimizer", "make_reduction"]


def make_reduction(
    config: Config,
    model: Classifier,
    batchnorm: StepBatchNorm,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    ema: AveragedModel | None,
) -> Reduction:
    """The reduction that the config names. All ranks must call.

    Raises:
        ConfigError: it does not work on this machine.
    """
    nodes = [[rank] for rank in range(runtime.world_size)]
    if config.comm.topology == "hierarchical":
        nodes = nodes_of(runtime.gather(runtime.node), config.comm.workers_per_node)
    if config.comm.reduction == "exact":
        return ExactReduction(config, model, batchnorm, runtime, nodes)
    if config.comm.sync != "every_step":
        kind = LocalReduction if config.comm.sync == "local_sgd" else AsyncReduction
        return kind(config, model, batchnorm, runtime, nodes, optimizer, ema)
    if config.comm.compression == "powersgd" and runtime.device.type == "cpu" and torch.cuda.is_available():
        raise ConfigError(
            "comm.compression=powersgd on CPUs: torch's PowerSGD waits for a GPU where it sees one; hide it with "
            "CUDA_VISIBLE_DEVICES= in the workers' environment"
        )
    order = FlatOrder([parameter for parameter in model.parameters() if parameter.requires_grad])
    if isinstance(optimizer, OnebitAdam):
        compression = OnebitMomentum(order, optimizer, runtime.world_size)
    else:
        compression = _make_compression(config, order)
    kind = LateReduction if config.comm.overlap == "next_step" else FloatReduction
    return kind(config, model, batchnorm, runtime, nodes, compression)


def _make_compression(config: Config, order: FlatOrder) -> Compression:
    if config.comm.compression == "onebit":
        return Onebit(order)
    if config.comm.compression == "powersgd":
        return PowerSGD(order, config.comm, config.run.seed)
    if config.comm.compression == "none":
        return Uncompressed()
    return Half(torch.float16 if config.comm.compression == "fp16" else torch.bfloat16)
