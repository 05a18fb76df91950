"""Which images a step takes, in which micro-batches, and who computes them: the arithmetic of a recipe.

Pure functions of the recipe and the size of the training set. The number of workers enters in one place,
`deal`, and changes nothing but who computes a micro-batch.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from raytrain.config import Train
from raytrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class Plan:
    """The steps of a run. A step is counted from 0 over the whole run."""

    num_images: int
    global_batch_size: int
    micro_batch_size: int
    steps_per_epoch: int
    total_steps: int

    @property
    def epochs(self) -> int:
        """Epochs that the run takes part in, the last perhaps not whole."""
        return -(-self.total_steps // self.steps_per_epoch)

    def images_seen(self, step: int) -> int:
        """Images trained on before `step`."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.num_images + rest * self.global_batch_size

    def micro_batches(self, step: int) -> list[range]:
        """The micro-batches of a step, as ranges of positions in its epoch's order.

        An epoch's last step takes what is left. It is cut into micro-batches of nearly equal size, as few as
        hold it, none of a single image (batch norm has no variance of one): so it may take one image more
        than global_batch_size, and a micro-batch of it one more than micro_batch_size.
        """
        start = step % self.steps_per_epoch * self.global_batch_size
        is_last = (step + 1) % self.steps_per_epoch == 0
        size = self.num_images - start if is_last else self.global_batch_size
        count = max(1, min(-(-size // self.micro_batch_size), size // 2))
        bounds = [start + size * i // count for i in range(count + 1)]
        return [range(low, high) for low, high in pairwise(bounds)]


def make_plan(train: Train, num_images: int) -> Plan:
    """The plan of a recipe for a training set.

    Raises:
        DataError: fewer than two images.
        ConfigError: warm-up or batch do not fit the run's length.
    """
    if num_images < 2:
        raise DataError(f"the training set has {num_images} image(s); batch norm needs at least 2")
    # one image too many for the last whole step is taken along by it, see Plan.micro_batches
    steps_per_epoch = -(-(num_images - 1) // train.global_batch_size)
    total_steps = train.epochs * steps_per_epoch if train.max_steps is None else train.max_steps
    return Plan(num_images, train.global_batch_size, train.micro_batch_size, steps_per_epoch, total_steps)


def deal(count: int, world_size: int) -> list[range]:
    """Deals `count` things to ranks in turn of rank, as evenly as can be: 32 to 3 are 11, 11 and 10."""
    share, extra = divmod(count, world_size)
    bounds = [rank * share + min(rank, extra) for rank in range(world_size + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def idle_fraction(count: int, world_size: int) -> float:
    """Share of the workers' time in a step that passes in waiting for those with one micro-batch more."""
    return 1 - count / (-(-count // world_size) * world_size)


def warmup_steps(warmup_epochs: float, plan: Plan) -> int:
    """Whole steps of warm-up.

    Raises:
        ConfigError: they leave no step of the run after them.
    """
    steps = math.floor(warmup_epochs * plan.steps_per_epoch)
    if steps >= plan.total_steps:
        raise ConfigError(
            f"schedule.warmup_epochs {warmup_epochs:g} is {steps} steps, but the run has only {plan.total_steps}; "
            "shorten the warm-up or lengthen the run"
        )
    return steps
