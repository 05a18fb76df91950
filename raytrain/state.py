"""Everything that a step changes, and its way into a checkpoint and back."""

from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from raytrain import checkpoint
from raytrain.comm import make_push_optimizer, make_reduction
from raytrain.config import Config
from raytrain.distributed import Runtime
from raytrain.errors import CheckpointError, RunError
from raytrain.model import Classifier, StepBatchNorm, build_model
from raytrain.optim import make_ema, make_optimizer
from raytrain.storage import Storage


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    """Steps taken: batches of images used up."""
    skipped_steps: int = 0
    """Those of them whose gradients overflowed float16 and were not applied. The learning rate counts only steps
    that were applied."""
    best_top1: float | None = None
    """Greatest val/top1 of all evaluations."""
    best_step: int | None = None
    """Steps taken at that evaluation."""
    train_seconds: float = 0.0
    """Time in steps, without evaluation and checkpoints."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the evaluation after this very step, if there was one."""

    def take_score(self, metrics: dict[str, float]) -> None:
        """Takes in an evaluation after this step; of equal scores the later one counts as the best."""
        self.metrics = metrics
        if self.best_top1 is None or metrics["val/top1"] >= self.best_top1:
            self.best_top1, self.best_step = metrics["val/top1"], self.step


class TrainState:
    """Network, optimizer, reduction, moving average, progress. All ranks must construct it.

    Args:
        config: the run.
        num_classes: of the training set.
        runtime: this process.
        precision: "fp32", "bf16" or "fp16".
    """

    def __init__(self, config: Config, num_classes: int, runtime: Runtime, precision: str) -> None:
        self.model = build_model(config.model, config.data, num_classes, config.run.seed).to(runtime.device)
        self.batchnorm = StepBatchNorm(self.model.body)
        self.ema = make_ema(self.model, config.train.ema_decay)
        self.optimizer = (
            make_push_optimizer(config, self.model, runtime)
            if config.comm.sync == "async"
            else make_optimizer(self.model.parameters(), config.optim)
        )
        self.scaler = torch.amp.GradScaler(runtime.device.type, enabled=precision == "fp16")
        self.reduction = make_reduction(config, self.model, self.batchnorm, runtime, self.optimizer, self.ema)
        self.progress = Progress()

    @property
    def evaluated(self) -> Classifier:
        """The network that is evaluated and exported: the moving average where there is one."""
        return self.model if self.ema is None else cast("Classifier", self.ema.module)

    def parts(
        self, description: dict[str, Any]
    ) -> tuple[int, dict[str, dict[str, torch.Tensor]], dict[str, Any], dict[str, Any]]:
        """Step, weights, training state and description, as `checkpoint.save` takes them. All ranks must call.

        They are views, no copies, and the same on every rank.

        Args:
            description: what state.json is to say beside the progress; plain JSON values.
        """
        weights = {"model": self.model.body.state_dict()}
        if self.ema is not None:
            weights["ema"] = self.evaluated.body.state_dict()
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "reduction": self.reduction.state_dict(),
            "ema_updates": 0 if self.ema is None else int(self.ema.n_averaged),
        }
        state = {"metrics": self.progress.metrics, "progress": asdict(self.progress), **description}
        return self.progress.step, weights, training, state

    def load(self, path: Storage) -> None:
        """Takes over a checkpoint, of any number of workers; all ranks call.

        Raises:
            CheckpointError: it is of another network or recipe.
        """
        training, state = checkpoint.load_training(path), checkpoint.load_state(path)
        try:
            self.model.body.load_state_dict(checkpoint.load_weights(path))
            if self.ema is not None:
                self.evaluated.body.load_state_dict(checkpoint.load_weights(path, "ema"))
                self.ema.n_averaged.fill_(training["ema_updates"])
            self.optimizer.load_state_dict(training["optimizer"])
            self.scaler.load_state_dict(training["scaler"])
            self.progress = Progress(**state["progress"])
            reduction = {key: value.to(self.batchnorm.running.device) for key, value in training["reduction"].items()}
            self.reduction.load_state_dict(reduction)
        except (RuntimeError, ValueError, KeyError, TypeError, RunError) as error:
            raise CheckpointError(f"checkpoint {path} does not fit this config: {error}") from error
        self.batchnorm.reload()
