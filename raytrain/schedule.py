"""The learning rate, as a pure function of the step."""

import math
from dataclasses import dataclass

from raytrain.config import Config
from raytrain.errors import ConfigError
from raytrain.plan import Plan, warmup_steps


@dataclass(frozen=True)
class LearningRate:
    """Call it with a step, counted from 0, for the learning rate of that step.

    Linear warm-up comes to the peak at the first step after it: peak * (step + 1) / (warmup_steps + 1). Cosine
    decay starts there and is at `min_lr` on the last step (Loshchilov 2017, arXiv 1608.03983). Multistep
    decay multiplies by gamma from each milestone on.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    decay: str
    min_lr: float
    milestone_steps: tuple[int, ...]
    gamma: float

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.decay == "cosine":
            last = self.total_steps - 1
            done = (
                min(1.0, (step - self.warmup_steps) / (last - self.warmup_steps)) if last > self.warmup_steps else 0.0
            )
            return self.min_lr + (self.peak - self.min_lr) * (1 + math.cos(math.pi * done)) / 2
        if self.decay == "multistep":
            return self.peak * self.gamma ** sum(step >= milestone for milestone in self.milestone_steps)
        return self.peak


def peak_lr(config: Config) -> float:
    """The peak learning rate for the global batch, whatever the number of workers."""
    ratio = config.train.global_batch_size / config.schedule.base_batch_size
    factor = {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[config.schedule.lr_scaling]
    return config.optim.base_lr * factor


def make_schedule(config: Config, plan: Plan) -> LearningRate:
    """The schedule of a run.

    Raises:
        ConfigError: the warm-up is as long as the run, min_lr above the peak, or the run too short for 1-bit Adam.
    """
    if config.optim.name == "onebit_adam" and config.optim.freeze_step >= plan.total_steps:
        raise ConfigError(
            f"optim.freeze_step {config.optim.freeze_step:,} is not less than the run's {plan.total_steps:,} steps: "
            "nothing would be compressed; lower it, or take optim.name=adamw"
        )
    peak = peak_lr(config)
    if config.schedule.decay == "cosine" and config.schedule.min_lr > peak:
        raise ConfigError(f"schedule.min_lr {config.schedule.min_lr:g} is above the peak learning rate {peak:g}")
    return LearningRate(
        peak=peak,
        warmup_steps=warmup_steps(config.schedule.warmup_epochs, plan),
        total_steps=plan.total_steps,
        decay=config.schedule.decay,
        min_lr=config.schedule.min_lr,
        milestone_steps=tuple(round(epoch * plan.steps_per_epoch) for epoch in config.schedule.milestones),
        gamma=config.schedule.gamma,
    )
