"""The training loop, from a config to the last checkpoint. It knows torch; not Ray, not MLflow."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
from torch import distributed as dist
from torch.nn import functional

from raytrain import checkpoint
from raytrain.comm import Outcome, Reduction, Totals, choose_strategy
from raytrain.commandline import build, dump
from raytrain.config import Config
from raytrain.data.bad import BadImages
from raytrain.data.identity import agree_on_data, check_same_data
from raytrain.data.loader import StepBatches, eval_batches, train_batches
from raytrain.data.source import Sources
from raytrain.distributed import Runtime, resolve_precision
from raytrain.errors import ConfigError, NonFiniteError, StoppedError
from raytrain.evaluation import evaluate
from raytrain.monitor import Monitor
from raytrain.plan import make_plan
from raytrain.recorder import Recorder
from raytrain.saver import Saver
from raytrain.schedule import LearningRate, make_schedule
from raytrain.state import Progress, TrainState
from raytrain.storage import Storage

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(  # noqa: C901, PLR0915 - a loop is best read from top to bottom
    config: Config,
    runtime: Runtime,
    sources: Sources,
    folder: Storage,
    recorder: Recorder,
    monitor: Monitor | None = None,
) -> Progress:
    """Trains to the end, from the newest valid checkpoint in the folder where there is one. All ranks must call.

    Args:
        config: the run.
        runtime: this process.
        sources: the training and the validation set.
        folder: of the run's checkpoints, one that all ranks see.
        recorder: takes the metrics, on rank 0.
        monitor: is told where this rank is.

    Raises:
        ConfigError: recipe and data do not fit each other, or the ranks' devices each other or what is asked of them.
        DataError: an image cannot be read, or too many where they are skipped, or the data is not what the checkpoint
            was trained on.
        CheckpointError: the checkpoint is of another recipe.
        RunError: the last checkpoint cannot be written; on rank 0.
        NonFiniteError: a loss is not finite, on all ranks; or a weight that was to be saved, on rank 0.
        StoppedError: a rank was asked to stop; on all ranks, after a checkpoint.
    """
    monitor = monitor or Monitor()
    identity = agree_on_data(sources, runtime)
    plan = make_plan(config.train, len(sources.train.labels))
    learning_rate = make_schedule(config, plan)
    precision = _agree_on_precision(config, runtime)
    if precision == "fp16":  # which auto may have come to, and not every config takes
        build(config.model_dump(), {"train.precision": precision}, "the config")
    num_classes, num_threads = len(sources.train.class_names), config.data.num_threads or torch.get_num_threads()

    asked_for = dump(config)
    if config.comm.strategy == "auto":
        config, reason = choose_strategy(config, num_classes, runtime, AUTOCAST_DTYPES.get(precision))
        recorder.note(reason)
    state = TrainState(config, num_classes, runtime, precision)
    if (path := _agree_on_checkpoint(folder, runtime, recorder)) is not None:
        check_same_data(path, checkpoint.load_state(path), identity)
        state.load(path)
        recorder.note(f"resuming after step {state.progress.step} from {path}")
    identity |= {"precision": precision, "config": asked_for}

    bad_images = BadImages.of_sets(config.data, sources)
    progress, every = state.progress, config.checkpoint
    saver = Saver(folder, every.keep_last, every.keep_best, recorder.warn, recorder.flush, best_by=every.best_by)
    steps = range(progress.step, plan.total_steps)
    batches = train_batches(
        sources.train,
        config.data,
        plan,
        config.run.seed,
        runtime.rank,
        runtime.world_size,
        steps.start,
        num_threads,
        runtime.device,
        bad_images.get("train"),
    )
    window = Window(progress.step, state.reduction)
    with closing(saver), closing(batches):
        for step in steps:
            monitor.begin(step, "data")
            own = window.wait_for(batches)
            is_last = step + 1 == plan.total_steps
            epoch = (step + 1) / plan.steps_per_epoch
            eval_due = is_last or epoch % config.train.eval_every_epochs == 0
            save_due = is_last or saver.is_due(step + 1, epoch, every)
            agree = eval_due or save_due

            micro_batches = plan.micro_batches(step)
            images = micro_batches[-1].stop - micro_batches[0].start
            save = runtime.rank == 0 and saver.is_late(every)

            count = len(micro_batches)
            outcome = compute_gradients(
                config, state, own, count, images, step, precision, runtime, monitor, save=save, agree=agree
            )
            while outcome is not None:
                monitor.enter("update")
                window.add(step, apply(config, state, outcome, step, learning_rate), outcome)
                outcome = state.reduction.flush() if is_last else None
            progress.step, progress.metrics = step + 1, {}

            log_due = agree or window.is_full(config.train.log_every)
            asked = window.check() if log_due or runtime.device.type == "cpu" else Asked()
            if not (log_due or asked.stop):
                continue
            saving, stopping = save_due or asked.stop or asked.save, asked.stop

            progress.train_seconds += window.seconds()
            skipped = {"train/skipped_steps": progress.skipped_steps} if precision == "fp16" else {}
            bad = {} if eval_due else _report_bad(bad_images, runtime, recorder)
            recorder.metrics(progress.step, {"epoch": epoch, **window.metrics(), **skipped, **bad})
            if eval_due:
                own_batches = eval_batches(
                    sources.val,
                    config.data,
                    config.train.micro_batch_size,
                    runtime.rank,
                    runtime.world_size,
                    num_threads,
                    runtime.device,
                    bad_images.get("val"),
                )
                monitor.enter("evaluation")
                progress.take_score(evaluate(state.evaluated, monitor.each(own_batches), num_classes, runtime))
                recorder.metrics(progress.step, {**progress.metrics, **_report_bad(bad_images, runtime, recorder)})
            if saving:
                monitor.enter("checkpoint")
                described = {"epoch": epoch, "images_seen": plan.images_seen(progress.step), **identity}
                parts = state.parts(described)
                if runtime.rank == 0:
                    saver.save(*parts, urgent=is_last or stopping)
                    if is_last or stopping:
                        saver.finish()
            if stopping and not is_last:
                runtime.barrier()  # the first rank to raise may take the others with it, rank 0 in its checkpoint too
                raise StoppedError(
                    f"stopped after step {progress.step} of {plan.total_steps}; its checkpoint is in {folder}",
                    runtime.stop_requested() or signal.SIGTERM,
                )
            window = Window(progress.step, state.reduction)
    return progress


def compute_gradients(
    config: Config,
    state: TrainState,
    own: StepBatches,
    micro_batches: int,
    images: int,
    step: int,
    precision: str,
    runtime: Runtime,
    monitor: Monitor,
    *,
    save: bool = False,
    agree: bool = True,
) -> Outcome:
    """Leaves the gradient of the mean loss over the step's images in the parameters. All ranks must call.

    With `comm.overlap=next_step` it is that of the step before, with `comm.sync=local_sgd` that of own images.

    Args:
        config: the run.
        state: its network and reduction.
        own: this rank's micro-batches.
        micro_batches: how many the step has over all ranks.
        images: how many the step has over all ranks.
        step: its number.
        precision: "fp32", "bf16" or "fp16".
        runtime: this process.
        monitor: is told where this rank is.
        save: whether this rank wants a checkpoint.
        agree: whether the ranks must come to the same weights after this step.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    while True:
        state.reduction.begin(step, micro_batches, images)
        for number, batch in enumerate(own.batches, own.first):
            # what a network draws at random, as in dropout, follows from the micro-batch, not from who computes it
            torch.manual_seed(int(np.random.SeedSequence((config.run.seed, step, number)).generate_state(1)[0]))
            with state.reduction.micro_batch(last=number + 1 == own.first + len(own.batches)):
                monitor.enter("forward")
                with torch.autocast(runtime.device.type, dtype, enabled=dtype is not None):
                    logits = state.reduction.module(batch.images)
                loss = functional.cross_entropy(
                    logits, batch.labels, reduction="sum", label_smoothing=config.train.label_smoothing
                )
                monitor.enter("backward")
                state.scaler.scale(loss / images).backward()
            state.reduction.add(loss.detach(), batch.count)
        monitor.enter("all-reduce")
        outcome = state.reduction.finish(runtime.stop_requested(), save=save, agree=agree)
        if outcome is not None:
            return outcome


def apply(config: Config, state: TrainState, outcome: Outcome, step: int, learning_rate: LearningRate) -> float:
    """Applies what a step has come to, if there is anything yet. All ranks must call.

    Returns:
        The learning rate of the step whose gradient it was; in its absence of this one.
    """
    if outcome.step is None:
        return learning_rate(step - state.progress.skipped_steps)
    lr = learning_rate(outcome.step - state.progress.skipped_steps)
    state.batchnorm.update(outcome.statistics, outcome.step + 1)
    state.progress.skipped_steps += not update(state, lr, config.train.clip_grad_norm)
    return lr


def update(state: TrainState, lr: float, clip_grad_norm: float | None) -> bool:
    """Applies the gradients, and moves the moving average after them. All ranks must call.

    Returns:
        False where the gradients overflowed float16 and nothing was applied. With float16 this waits for the device;
        a scaler that is not enabled never does.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    if clip_grad_norm is not None:
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip_grad_norm)
    scale = state.scaler.get_scale()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    applied = state.scaler.get_scale() >= scale
    if state.ema is not None and applied:
        state.ema.update_parameters(state.model)
    state.reduction.after_update()
    return applied


class Asked(NamedTuple):
    """What ranks have asked for; the same on all of them."""

    stop: bool = False
    save: bool = False


class Window:
    """The steps since metrics were last logged. Their tensors stay on the device until `check` reads them."""

    def __init__(self, first: int, reduction: Reduction) -> None:
        self._first, self._steps = first, 0
        self._reduction, self._sent_bytes = reduction, reduction.sent_bytes
        self._started, self._waited = time.perf_counter(), 0.0
        self._images, self._loss, self._lr = 0.0, 0.0, 0.0
        self._unread: list[tuple[int, float, Totals]] = []
        self._has_all, self._asked = False, Asked()

    def wait_for(self, batches: Iterator[StepBatches]) -> StepBatches:
        """The next of the batches; the time it takes is time in which data held training back."""
        start = time.perf_counter()
        own = next(batches)
        self._waited += time.perf_counter() - start
        return own

    def add(self, step: int, lr: float, outcome: Outcome) -> None:
        """Takes in a step, and what it has brought to be known of it and those before."""
        self._lr, self._has_all, self._steps = lr, outcome.totals is not None, step + 1 - self._first
        if outcome.totals is not None:
            self._unread.append((step if outcome.step is None else outcome.step, lr, outcome.totals))

    def is_full(self, size: int) -> bool:
        """Whether it has passed a multiple of so many steps, and the ranks know of its steps."""
        return self._has_all and (self._first + self._steps) // size > self._first // size

    def check(self) -> Asked:
        """Reads the steps taken in, which waits for the device.

        Returns:
            What ranks have asked for in them and those read before; the same on all ranks.

        Raises:
            NonFiniteError: a loss was not finite. On all ranks.
        """
        for step, lr, totals in self._unread:
            if totals.bad.any():
                ranks = ", ".join(str(rank) for rank in totals.bad.nonzero().flatten().tolist())
                raise NonFiniteError(
                    f"the loss is not finite at step {step} on rank {ranks}, learning rate {lr:.6g}; "
                    "lower optim.base_lr, lengthen schedule.warmup_epochs or set train.clip_grad_norm"
                )
            self._loss += float(totals.loss)
            self._images += float(totals.images)
            self._asked = Asked(self._asked.stop or bool(totals.stop), self._asked.save or bool(totals.save))
        self._unread.clear()
        return self._asked

    def seconds(self) -> float:
        """Since the window was opened."""
        return time.perf_counter() - self._started

    def metrics(self) -> dict[str, float]:
        """Means over the window, which must have been checked.

        perf/comm_fraction is the time in which this rank's steps waited for communication and did nothing else, over
        all of it; perf/comm_bytes_per_step what this rank has sent for it, see `Reduction.sent_bytes`.
        """
        seconds = self.seconds()
        loss = {"train/loss": self._loss / self._images} if self._images else {}
        return {
            **loss,
            "train/lr": self._lr,
            "perf/images_per_second": self._images / seconds,
            "perf/data_wait_fraction": self._waited / seconds,
            "perf/comm_fraction": self._reduction.clock.seconds() / seconds,
            "perf/comm_bytes_per_step": (self._reduction.sent_bytes - self._sent_bytes) / self._steps,
            **self._reduction.metrics(),
        }


def _agree_on_checkpoint(folder: Storage, runtime: Runtime, recorder: Recorder) -> Storage | None:
    """The newest valid checkpoint, which rank 0 looks for. All ranks must call."""
    found = [checkpoint.newest_valid(folder, recorder.warn) if runtime.rank == 0 else None]
    if runtime.world_size > 1:
        dist.broadcast_object_list(found, device=runtime.device)
    return found[0]


def _agree_on_precision(config: Config, runtime: Runtime) -> str:
    """The precision, which `auto` must not make another one on another rank. All ranks must call."""
    precisions = runtime.gather(resolve_precision(config.train.precision, runtime.device))
    if len(set(precisions)) > 1:
        raise ConfigError(f"train.precision auto comes to {', '.join(precisions)} on ranks 0, 1, ...; set one of them")
    return precisions[0]


def _report_bad(bad_images: Mapping[str, BadImages], runtime: Runtime, recorder: Recorder) -> dict[str, float]:
    """Tells of the images that were left out since the last time, and how many it were in all. All ranks must call."""
    for split, bad in bad_images.items():
        recorder.bad_images(split, bad.share(runtime))
        bad.check()
    return {"data/bad_images": float(sum(len(bad) for bad in bad_images.values()))} if bad_images else {}
