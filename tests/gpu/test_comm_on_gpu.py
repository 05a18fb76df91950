"""Strategies of communication on a GPU and its streams. Two ranks share one, so that gloo carries their sums."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from raytrain.bench.comm_rank import STRATEGIES, Worker
from raytrain.commandline import parse
from raytrain.data.loader import Batch, StepBatches
from raytrain.distributed import Runtime
from raytrain.errors import ConfigError
from raytrain.loop import apply, compute_gradients
from raytrain.monitor import Monitor
from raytrain.state import TrainState
from tests.ranks import run_ranks

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

RECIPE = ("model.name=resnet18", "train.micro_batch_size=8", "train.global_batch_size=16", "train.precision=fp32")
NAMES = ("plain", "fp16", "bf16", "onebit", "powersgd", "next_step", "next_step+onebit", "onebit_adam", "local_sgd")
STEPS = 4


@cache
def outcomes():
    return run_ranks(2, changes)


def changes(runtime):
    """{(strategy, device): what some steps change the weights by, flat}."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return {
        (name, device): change(name, replace(runtime, device=torch.device(device)))
        for device in ("cpu", "cuda")
        for name in NAMES
        if (name, device) != ("powersgd", "cpu")  # which is refused here
    }


def change(name, runtime):
    strategy = STRATEGIES[name]
    config = parse((*RECIPE, *strategy.overrides, *strategy.at_once), "quickstart", frozenset()).config
    state = TrainState(config, 10, runtime, "fp32")
    before = flat(state.model)
    generator = torch.Generator().manual_seed(runtime.rank)
    images = torch.randint(256, (8, 32, 32, 3), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (8,), generator=generator)
    own = StepBatches([Batch(images.to(runtime.device), labels.to(runtime.device), 8)], runtime.rank)
    for step in range(STEPS):
        outcome = compute_gradients(config, state, own, 2, 16, step, "fp32", runtime, Monitor())
        apply(config, state, outcome, step, lambda _: 1e-4)
    if (outcome := state.reduction.flush()) is not None:
        apply(config, state, outcome, outcome.step, lambda _: 1e-4)
    state.reduction.close()
    return flat(state.model) - before


def flat(model):
    return torch.cat([parameter.detach().flatten().cpu() for parameter in model.parameters()])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "powersgd"])
def test_steps_are_those_of_a_cpu(name):
    """But for roundings, which turn a few of the signs that `onebit` sends."""
    for rank in outcomes():
        want, got = rank[name, "cpu"], rank[name, "cuda"]
        assert (got - want).norm() < (0.1 if "onebit" in name else 0.01) * want.norm()


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_end_with_the_same_weights(name):
    first, second = outcomes()
    assert torch.equal(first[name, "cuda"], second[name, "cuda"])


def test_powersgd_on_cpus_is_refused_where_torch_sees_a_gpu():
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES="):
        change("powersgd", Runtime())


@pytest.mark.parametrize("name", ["data_parallel", "computation", "onebit"])
def test_a_worker_of_the_benchmark_takes_turns(name):
    worker = Worker(Runtime(device=torch.device("cuda", 0)), ("model.name=resnet18", "train.micro_batch_size=8"))
    worker.prepare(name)
    turn = worker.take(1, 3)
    assert turn["images"] == 24 * (torch.cuda.device_count() if name == "data_parallel" else 1)
    assert turn["seconds"] > 0
