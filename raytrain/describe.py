"""What a config works out to, for a person and for MLflow's parameters."""

from collections import Counter
from typing import Any

from raytrain.config import Config, Scaling
from raytrain.plan import Plan, deal, idle_fraction, make_plan
from raytrain.schedule import make_schedule


def derived(config: Config, num_images: int) -> dict[str, Any]:
    """Derived values by name; numbers only.

    Raises:
        ConfigError: recipe and data do not fit each other.
    """
    plan = make_plan(config.train, num_images)
    schedule = make_schedule(config, plan)
    micro_batches = len(plan.micro_batches(0))
    most = len(deal(micro_batches, config.scaling.max_workers)[0])
    return {
        "num_train_images": num_images,
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "warmup_steps": schedule.warmup_steps,
        "micro_batches_per_step": micro_batches,
        "max_images_per_worker_step": most * config.train.micro_batch_size,
        "peak_lr": schedule.peak,
    }


def dry_run_text(config: Config, num_images: int) -> str:
    """What `--dry-run` prints beside the config.

    Raises:
        ConfigError: recipe and data do not fit each other.
    """
    plan = make_plan(config.train, num_images)
    schedule = make_schedule(config, plan)
    workers, micro_batches = (
        config.scaling.max_workers,
        config.train.global_batch_size // config.train.micro_batch_size,
    )
    hands = [len(hand) for hand in deal(micro_batches, workers)]
    idle = idle_fraction(micro_batches, workers)
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    last_lr = schedule(plan.total_steps - 1)
    lines = {
        "images": f"{num_images:,} for training, {plan.steps_per_epoch:,} steps per epoch, {_last_step(plan)}",
        "length": f"{plan.total_steps:,} steps, {plan.total_steps / plan.steps_per_epoch:.6g} epochs",
        "step": f"{batch:,} images in {micro_batches} micro-batches of {micro}",
        "workers": f"{_range(config.scaling)}{workers}, with {_hands(hands)} a step; "
        f"{idle:.0%} of their time lost to uneven shares",
        "learning rate": f"peak {schedule.peak:g}, {schedule.warmup_steps:,} warm-up steps, "
        f"then {schedule.decay} to {last_lr:g}",
        "gradients": _gradients(config),
    }
    return "\n".join(f"{name:<14} {text}" for name, text in lines.items())


def _gradients(config: Config) -> str:
    """How they become one over the workers."""
    comm = config.comm
    if comm.sync == "local_sgd":
        begin = f" after {comm.warmup_steps:,} steps" if comm.warmup_steps else ""
        return f"applied by each worker for itself{begin}, weights averaged every {comm.period} steps"
    if comm.sync == "async":
        return f"pushed to a parameter server, workers wait for each other every {comm.period} steps"
    how = {"none": "integers" if comm.reduction == "exact" else "float32", "onebit": "signs"}
    sent = how.get(comm.compression, comm.compression)
    if config.optim.name == "onebit_adam":
        sent = f"float32, after {config.optim.freeze_step:,} steps signs of the momentum"
    if comm.strategy == "auto":
        sent += ", or bf16" if comm.auto_bf16 else ""
    where = {"flat": "between all workers", "hierarchical": "between nodes, whole inside them"}[comm.topology]
    if comm.strategy == "auto":
        where = "between all workers or between nodes, chosen at the start"
    when = {"backward": "beside the backward pass", "next_step": "beside the next step, applied one step late"}
    return f"{sent}, {where}, {when[comm.overlap]}"


def _range(scaling: Scaling) -> str:
    return f"{scaling.min_workers} to " if scaling.min_workers < scaling.max_workers else ""


def _hands(hands: list[int]) -> str:
    counts = sorted(Counter(hands).items(), reverse=True)
    if len(counts) == 1:
        return f"{hands[0]} micro-batch{'es' if hands[0] > 1 else ''} a worker"
    if len(hands) <= 8:
        return f"{'/'.join(str(hand) for hand in hands)} micro-batches a worker"
    return " and ".join(f"{micro_batches} micro-batches on {workers} workers" for micro_batches, workers in counts)


def _last_step(plan: Plan) -> str:
    sizes = [len(part) for part in plan.micro_batches(plan.steps_per_epoch - 1)]
    return f"the last of {sum(sizes):,} images in micro-batches of {'/'.join(str(size) for size in sorted(set(sizes)))}"
