"""How a step's gradients, losses and batch-norm statistics become one over all workers."""

from raytrain.comm.exact import ExactReduction
from raytrain.comm.float import FloatReduction
from raytrain.comm.step import Reduction, Totals
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.model import Classifier, StepBatchNorm

__all__ = ["ExactReduction", "FloatReduction", "Reduction", "Totals", "make_reduction"]


def make_reduction(config: Config, model: Classifier, batchnorm: StepBatchNorm, runtime: Runtime) -> Reduction:
    """The reduction that the config names. All ranks must call."""
    if config.comm.reduction == "exact":
        return ExactReduction(model, batchnorm, runtime)
    return FloatReduction(model, batchnorm, runtime, config.comm, config.data.image_size)
