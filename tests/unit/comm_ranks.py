"""What each rank does for the tests of `comm`, in one start of its process. The tests themselves are in test_comm_*.py.

A small network of fixed weights, so that the gradients of a rank's own images are the same under every strategy: each
strategy's sums are held against them.
"""

import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from raytrain.data.loader import Batch, StepBatches
from raytrain.distributed import Runtime
from raytrain.loop import compute_gradients
from raytrain.model import Classifier
from raytrain.monitor import Monitor
from raytrain.plan import deal
from raytrain.state import TrainState
from tests.ranks import run_ranks
from tests.unit.test_loop import make_config

CLASSES, SIZE, MICRO_BATCH = 3, 8, 4
COUNTS = [4, 3, 1, 6, 5] * 4
"""Micro-batches of each of 20 steps, of which all but `onebit` do 10: uneven shares, and ranks without any."""
PAIRS = {"comm__topology": "hierarchical", "comm__workers_per_node": 2}
SMALL_BUCKETS = {"comm__bucket_cap_mb": 0.004}
LATE = {"comm__overlap": "next_step"}
ONEBIT = {"comm__compression": "onebit"}
POWERSGD = {"comm__compression": "powersgd", "comm__powersgd_rank": 1, "comm__powersgd_start_step": 3}
ONEBIT_ADAM = {"optim__name": "onebit_adam", "optim__freeze_step": 3}

CASES = {
    "flat": ((1, 2, 3, 4), {}),
    "flat_buckets": ((2, 3, 4), SMALL_BUCKETS),
    "pairs": ((2, 3, 4), PAIRS),
    "pairs_buckets": ((3, 4), PAIRS | SMALL_BUCKETS),
    "three_and_one": ((4,), PAIRS | {"comm__workers_per_node": 3}),
    "one_node": ((4,), PAIRS | {"comm__workers_per_node": 4}),
    "fp16": ((2, 4), {"comm__compression": "fp16"}),
    "bf16": ((2, 4), {"comm__compression": "bf16"}),
    "fp16_pairs": ((4,), PAIRS | {"comm__compression": "fp16"}),
    "bf16_pairs": ((4,), PAIRS | {"comm__compression": "bf16"}),
    "exact": ((2, 3, 4), {"comm__reduction": "exact"}),
    "exact_pairs": ((2, 3, 4), PAIRS | {"comm__reduction": "exact"}),
    "exact_one_node": ((4,), PAIRS | {"comm__reduction": "exact", "comm__workers_per_node": 4}),
    "onebit": ((1, 2, 3, 4), ONEBIT),
    "onebit_buckets": ((2, 4), ONEBIT | SMALL_BUCKETS),
    "onebit_pairs": ((3, 4), PAIRS | ONEBIT),
    "onebit_pairs_buckets": ((4,), PAIRS | ONEBIT | SMALL_BUCKETS),
    "powersgd_whole": ((2, 4), POWERSGD | {"comm__powersgd_rank": 64}),
    "powersgd": ((1, 2, 3, 4), POWERSGD),
    "powersgd_buckets": ((2, 4), POWERSGD | SMALL_BUCKETS | {"comm__powersgd_warm_start": False}),
    "powersgd_pairs": ((4,), PAIRS | POWERSGD),
    "late": ((1, 2, 3, 4), LATE),
    "late_pairs": ((3, 4), LATE | PAIRS),
    "late_fp16": ((2,), LATE | {"comm__compression": "fp16"}),
    "late_onebit": ((2, 4), LATE | ONEBIT),
    "onebit_adam": ((1, 2, 4), ONEBIT_ADAM),
    "onebit_adam_pairs": ((4,), ONEBIT_ADAM | PAIRS),
    "late_onebit_pairs": ((4,), LATE | ONEBIT | PAIRS),
}
"""By name: with how many ranks, and the keys."""
KEPT = ("onebit", "powersgd", "late", "late_onebit")
"""Those whose state is handed to other numbers of ranks."""


@cache
def outcomes():
    """By number of ranks, what each saw: {case: its record, "own": own gradients by step, "moved": see load_others}.

    Under "1 after 4", what one process moved over that goes on where four have been.
    """
    with tempfile.TemporaryDirectory() as name:
        seen = run_ranks(4, as_many_as, (1, 2, 3, 4), run_cases, Path(name))
        after = load_others(Runtime(), Path(name))
    return {n: [rank[n] for rank in seen if n in rank] for n in (1, 2, 3, 4)} | {"1 after 4": [{"moved": after}]}


def as_many_as(runtime, world_sizes, function, folder):
    """{ranks: function(runtime, folder) among the first so many of these}, of one number of ranks after the other.

    A process is started once, for all of them. The last of the numbers must be that of all.
    """
    torch.set_num_threads(1)
    seen = {}
    for world_size in world_sizes:
        runtime.barrier()
        dist.destroy_process_group()
        if runtime.rank < world_size:
            few = Runtime(runtime.rank, runtime.rank, world_size)
            if world_size > 1:
                start_group(few, folder / f"meet{world_size}")
            seen[world_size] = function(few, folder)
            if world_size > 1 and world_size != world_sizes[-1]:
                dist.destroy_process_group()
        if world_size != world_sizes[-1]:
            start_group(runtime, folder / f"meet-after{world_size}")
    return seen


def start_group(runtime, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=runtime.rank, world_size=runtime.world_size)


def run_cases(runtime, folder):
    seen = {"own": own_gradients(runtime), "moved": load_others(runtime, folder)}
    for name, (world_sizes, keys) in CASES.items():
        if runtime.world_size in world_sizes:
            seen[name] = follow(runtime, make_config(data__image_size=SIZE, **keys))
            if name in KEPT and runtime.rank == 0:
                torch.save(seen[name]["state"], folder / f"{name}-{runtime.world_size}.pt")
    if runtime.world_size == 4:
        seen["resnet18"] = abort_or_not(runtime)
        one_node = make_config(data__image_size=SIZE, **PAIRS | POWERSGD | {"comm__workers_per_node": 4})
        before = torch.load(folder / "powersgd-2.pt")
        seen["powersgd_on_one_node"] = before, follow(runtime, one_node, before)["state"]
    return seen


def follow(runtime, config, before=None):
    """Each step's reduced gradient under a config, perhaps from a state on; the weights stay what they are."""
    with tiny_models(), recorded_buckets() as buckets:
        state = TrainState(config, CLASSES, runtime, "fp32")
    if before is not None:
        state.reduction.load_state_dict(before)
    gradients, steps, losses, statistics, layouts, momenta, scales = [], [], [], [], [], [], []

    def take(outcome):
        steps.append(outcome.step)
        losses.append(None if outcome.totals is None else (float(outcome.totals.loss), float(outcome.totals.images)))
        if outcome.step is not None:
            gradients.append(flat([parameter.grad for parameter in state.model.parameters()]))
            statistics.append(outcome.statistics.numpy().copy())
        if config.optim.name == "onebit_adam":
            for group in state.optimizer.param_groups:
                group["lr"] = 0.0  # its moments move, the weights do not
            state.optimizer.step()
            parameters = list(state.model.parameters())
            momenta.append(flat([state.optimizer.state[parameter]["exp_avg"] for parameter in parameters]))
            scales.append(flat([state.optimizer.scale_of(parameter, outcome.step + 1) for parameter in parameters]))
        state.reduction.after_update()

    for step, count in enumerate(COUNTS if config.comm.compression == "onebit" else COUNTS[:10]):
        buckets.clear()
        own = own_batches(runtime, step)
        take(compute_gradients(config, state, own, count, count * MICRO_BATCH, step, "fp32", runtime, Monitor()))
        layouts.append(list(buckets))
    while (outcome := state.reduction.flush()) is not None:
        take(outcome)
    return {
        "gradients": gradients,
        "steps": steps,
        "losses": losses,
        "statistics": statistics,
        "layouts": layouts,
        "momenta": momenta,
        "scales": scales,
        "state": {key: tensor.clone() for key, tensor in state.reduction.state_dict().items()},
    }


def load_others(runtime, folder):
    """For each state that another number of ranks left: it, and what a new reduction that took it over says of it."""
    moved = {}
    for path in sorted(folder.glob("*.pt")):
        name, _, world_size = path.stem.partition("-")
        if int(world_size) != runtime.world_size:
            before = torch.load(path)
            with tiny_models():
                state = TrainState(make_config(data__image_size=SIZE, **CASES[name][1]), CLASSES, runtime, "fp32")
            state.reduction.load_state_dict({key: tensor.clone() for key, tensor in before.items()})
            after = {key: tensor.clone() for key, tensor in state.reduction.state_dict().items()}
            moved[name, int(world_size)] = before, after
    return moved


def abort_or_not(runtime):
    """Whether gradients are finite after steps of PowerSGD on a network of several buckets."""
    config = make_config(
        model__name="resnet18", comm__compression="powersgd", comm__powersgd_start_step=2, comm__bucket_cap_mb=4
    )
    state = TrainState(config, CLASSES, runtime, "fp32")
    for step in range(4):
        batch = Batch(*random_images(step, runtime.rank, 2, 32), 2)
        own = StepBatches([batch], runtime.rank)
        compute_gradients(
            config, state, own, runtime.world_size, 2 * runtime.world_size, step, "fp32", runtime, Monitor()
        )
        state.reduction.after_update()
    return all(bool(parameter.grad.isfinite().all()) for parameter in state.model.parameters())


# the network, its images, its gradients by plain PyTorch


def build_tiny(model, data, num_classes, seed):
    """As raytrain.model.build_model: a network of 3,611 parameters with batch norm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, num_classes),
        )
    return Classifier(body.to(memory_format=torch.channels_last), data.mean, data.std)


def tiny_models():
    """While it holds, every network is the small one."""
    return mock.patch("raytrain.state.build_model", build_tiny)


def random_images(step, number, count=MICRO_BATCH, size=SIZE):
    """Images uint8 [N, H, W, 3] and labels of a micro-batch, each class of a colour of its own."""
    rng = np.random.default_rng((step, number))
    labels = rng.integers(0, CLASSES, count)
    pixels = rng.integers(0, 140, (count, size, size, 3), dtype=np.uint8)
    pixels[np.arange(count), ..., labels] += 100
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def own_batches(runtime, step):
    share = deal(COUNTS[step], runtime.world_size)[runtime.rank]
    return StepBatches([Batch(*random_images(step, number), MICRO_BATCH) for number in share], share.start)


def own_gradients(runtime):
    """By step, this rank's part of the gradient of the step's mean loss, float32 [parameters], by plain PyTorch."""
    config = make_config(data__image_size=SIZE)
    model = build_tiny(config.model, config.data, CLASSES, config.run.seed)
    gradients = []
    for step, count in enumerate(COUNTS):
        model.zero_grad(set_to_none=False)
        for batch in own_batches(runtime, step).batches:
            loss = functional.cross_entropy(model(batch.images), batch.labels, reduction="sum")
            (loss / (count * MICRO_BATCH)).backward()
        gradients.append(flat([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]))
    return gradients


def flat(tensors):
    """Tensors as one vector, each in the order of the network's memory, which is channels_last."""
    return torch.cat([(t.permute(0, 2, 3, 1) if t.ndim == 4 else t).flatten() for t in tensors]).numpy().copy()


def whole_step():
    """By step, loss and batch-norm statistics, by plain PyTorch in one process: (sum of losses, mean statistics)."""
    config = make_config(data__image_size=SIZE)
    model = build_tiny(config.model, config.data, CLASSES, config.run.seed)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    seen = []
    for step, count in enumerate(COUNTS):
        losses, statistics = [], []
        for number in range(count):
            images, labels = random_images(step, number)
            losses.append(functional.cross_entropy(model(images), labels, reduction="sum").item())
            statistics.append(flat([buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]))
        seen.append((sum(losses), np.mean(statistics, axis=0)))
    return seen


def sizes():
    """Numbers of elements of the small network's parameters, in their order."""
    config = make_config()
    return [parameter.numel() for parameter in build_tiny(config.model, config.data, CLASSES, 0).parameters()]


@contextmanager
def recorded_buckets():
    """A list that takes in the parameters of each bucket that DistributedDataParallel hands to its hook, as numbers."""
    seen, register = [], DistributedDataParallel.register_comm_hook

    def register_recorded(self, hook_state, hook):
        numbers = {parameter.data_ptr(): number for number, parameter in enumerate(self.module.parameters())}

        def recorded(state, bucket):
            seen.append([numbers[parameter.data_ptr()] for parameter in bucket.parameters()])
            return hook(state, bucket)

        return register(self, hook_state, recorded)

    with mock.patch.object(DistributedDataParallel, "register_comm_hook", register_recorded):
        yield seen
