"""Which keys of `comm` go together, and what a config that has others says."""

import pytest

from raytrain.commandline import build
from raytrain.describe import dry_run_text
from raytrain.errors import ConfigError

NEXT_STEP, LOCAL = {"comm.overlap": "next_step"}, {"comm.sync": "local_sgd"}
ONEBIT, POWERSGD = {"comm.compression": "onebit"}, {"comm.compression": "powersgd"}
EXACT, ASYNC, FP16 = {"comm.reduction": "exact"}, {"comm.sync": "async"}, {"train.precision": "fp16"}
HIERARCHICAL = {"comm.topology": "hierarchical"}
ONEBIT_ADAM, AUTO = {"optim.name": "onebit_adam"}, {"comm.strategy": "auto"}
LATE = "a gradient that is late, or kept as an error"


@pytest.mark.parametrize(
    ("keys", "named", "reason"),
    [
        (EXACT | {"comm.compression": "fp16"}, "comm.compression fp16", "comm.reduction=exact"),
        (EXACT | ONEBIT, "comm.compression onebit", "integers of one step"),
        (EXACT | POWERSGD, "comm.compression powersgd", "set compression=none"),
        (EXACT | NEXT_STEP, "comm.overlap next_step", "set overlap=backward"),
        (EXACT | LOCAL, "comm.sync local_sgd", "set sync=every_step"),
        (EXACT | ASYNC, "comm.sync async", "set sync=every_step"),
        (LOCAL | {"comm.compression": "bf16"}, "comm.compression bf16", "comm.sync=local_sgd sends weights"),
        (LOCAL | ONEBIT, "comm.compression onebit", "no gradients"),
        (LOCAL | NEXT_STEP, "comm.overlap next_step", "comm.sync=local_sgd"),
        (ASYNC | {"comm.compression": "fp16"}, "comm.compression fp16", "comm.sync=async"),
        (ASYNC | HIERARCHICAL, "comm.topology hierarchical", "to one server"),
        (ASYNC | NEXT_STEP, "comm.overlap next_step", "comm.sync=async"),
        (ASYNC | {"optim.name": "adamw"}, "comm.sync async", "optim.name sgd, not adamw"),
        (ASYNC | {"train.clip_grad_norm": 1.0}, "train.clip_grad_norm", "whole gradient"),
        (ASYNC | {"train.ema_decay": 0.9}, "train.ema_decay", "async"),
        ({"comm.workers_per_node": 2}, "comm.workers_per_node 2", "set comm.topology=hierarchical"),
        (FP16 | ONEBIT, "train.precision fp16", LATE),
        (FP16 | POWERSGD, "train.precision fp16", LATE),
        (FP16 | NEXT_STEP, "train.precision fp16", LATE),
        (FP16 | LOCAL, "train.precision fp16", "take bf16 or fp32"),
        (FP16 | ASYNC, "train.precision fp16", LATE),
        (FP16 | ONEBIT_ADAM, "train.precision fp16", LATE),
        (ONEBIT_ADAM | EXACT, "comm.reduction exact", "optim.name onebit_adam"),
        (ONEBIT_ADAM | ONEBIT, "comm.compression onebit", "compresses for itself"),
        (ONEBIT_ADAM | NEXT_STEP, "comm.overlap next_step", "set comm.overlap=backward"),
        (ONEBIT_ADAM | LOCAL, "comm.sync local_sgd", "set comm.sync=every_step"),
        (ONEBIT_ADAM | {"train.clip_grad_norm": 1.0}, "train.clip_grad_norm", "onebit_adam"),
        (POWERSGD | NEXT_STEP, "comm.overlap next_step", "torch's generator"),
        (AUTO | HIERARCHICAL, "comm.topology hierarchical", "comm.strategy=auto chooses"),
        (AUTO | EXACT, "comm.reduction exact", "comm.strategy=auto chooses"),
        (AUTO | NEXT_STEP, "comm.overlap next_step", "comm.strategy=auto chooses"),
        (AUTO | LOCAL, "comm.sync local_sgd", "comm.strategy=auto chooses"),
        (AUTO | ONEBIT_ADAM, "comm.strategy auto", "optim.name onebit_adam"),
        ({"comm.auto_bf16": True}, "comm.auto_bf16", "set comm.compression=bf16 instead"),
        ({"comm.warmup_steps": 5}, "comm.warmup_steps 5", "of comm.sync=local_sgd"),
        ({"comm.period": 4}, "comm.period 4", "of comm.sync=local_sgd or async, and comm.sync is every_step"),
        (LOCAL | {"comm.delay_compensation": 0.1}, "comm.delay_compensation 0.1", "of comm.sync=async"),
        (ONEBIT | {"comm.powersgd_rank": 2}, "comm.powersgd_rank 2", "of comm.compression=powersgd"),
        (EXACT | {"comm.static_graph": True}, "comm.static_graph True", "of comm.reduction=float"),
        (ASYNC | {"data.on_bad_image": "skip"}, "data.on_bad_image=skip", "whole gradient"),
        (ONEBIT_ADAM | {"data.on_bad_image": "skip"}, "data.on_bad_image=skip", "whole gradient"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_with_key_and_reason(keys, named, reason):
    with pytest.raises(ConfigError) as caught:
        build({}, keys, "recipe.yaml")
    assert named in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("comm.period", 0),
        ("comm.warmup_steps", -1),
        ("comm.workers_per_node", 0),
        ("comm.powersgd_rank", 0),
        ("comm.powersgd_start_step", 1),
        ("comm.bucket_cap_mb", 0),
        ("comm.compression", "int8"),
        ("comm.topology", "tree"),
        ("comm.overlap", "forward"),
        ("comm.sync", "never"),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_its_key(key, value):
    keys = {key: value} | (HIERARCHICAL if key == "comm.workers_per_node" else {})
    with pytest.raises(ConfigError, match=key):
        build({}, keys, "recipe.yaml")


@pytest.mark.parametrize("topology", ["flat", "hierarchical"])
@pytest.mark.parametrize("overlap", ["backward", "next_step"])
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "onebit"])
def test_compression_topology_and_overlap_go_together(compression, topology, overlap):
    keys = {"comm.compression": compression, "comm.topology": topology, "comm.overlap": overlap}
    comm = build({}, keys, "recipe.yaml").comm
    assert (comm.compression, comm.topology, comm.overlap) == (compression, topology, overlap)


@pytest.mark.parametrize(
    "keys",
    [EXACT | HIERARCHICAL, LOCAL | HIERARCHICAL, EXACT | FP16, POWERSGD | HIERARCHICAL, HIERARCHICAL | FP16, ASYNC],
)
def test_these_go_together_too(keys):
    build({}, keys, "recipe.yaml")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "float32, between all workers, beside the backward pass"),
        (EXACT | HIERARCHICAL, "integers, between nodes, whole inside them, beside the backward pass"),
        (ONEBIT | NEXT_STEP, "signs, between all workers, beside the next step, applied one step late"),
        (
            AUTO | {"comm.auto_bf16": True},
            "float32, or bf16, between all workers or between nodes, chosen at the start, ",
        ),
        (
            LOCAL | {"comm.warmup_steps": 100},
            "applied by each worker for itself after 100 steps, weights averaged every 8",
        ),
        (ASYNC, "pushed to a parameter server, workers wait for each other every 8 steps"),
        (ONEBIT_ADAM, "float32, after 100 steps signs of the momentum, between all workers, "),
    ],
)
def test_a_dry_run_says_how_gradients_are_reduced(keys, text):
    lines = dry_run_text(build({}, keys, "recipe.yaml"), 100_000).splitlines()
    assert f"gradients      {text}" in lines[-1]


def test_a_run_that_ends_before_onebit_adam_freezes_is_refused():
    keys = ONEBIT_ADAM | {"train.max_steps": 100, "schedule.warmup_epochs": 0}
    with pytest.raises(ConfigError, match=r"optim.freeze_step 100 is not less than the run's 100 steps.*adamw"):
        dry_run_text(build({}, keys, "recipe.yaml"), 100_000)
