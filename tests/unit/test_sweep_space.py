"""What a sweep tries: its file, its space, its trials, and what is refused before the first of them."""

import math
from collections import Counter

import pytest
import yaml

from raytrain.describe import derived
from raytrain.errors import ConfigError
from raytrain.schedule import peak_lr
from raytrain.sweep.space import Domain, corners, draw, grid
from raytrain.sweep.spec import check_points, make_trials, read_spec

IMAGES = 1438
SPACE = {
    "optim.base_lr": {"loguniform": [0.01, 1.0]},
    "schedule.lr_scaling": {"choice": ["linear", "sqrt", "none"]},
    "train.global_batch_size": {"choice": [32, 64]},
}
RANDOM = {"search": "random", "trials": 12}


def write(folder, **sections):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"sweep": RANDOM, "space": SPACE, **sections}))
    return str(path)


def read(folder, overrides=None, **sections):
    return read_spec(write(folder, **sections), overrides or {})


def check(spec):
    check_points(spec, lambda config: derived(config, IMAGES))


def domain(**kind):
    return Domain.model_validate(kind)


def test_a_grid_has_each_combination_once_in_order(tmp_path):
    spec = read(tmp_path, sweep={}, space={"optim.base_lr": [0.1, 1e6, 0.01], "schedule.lr_scaling": ["sqrt", "none"]})
    assert [tuple(params.values()) for params in make_trials(spec)] == [
        (0.1, "sqrt"),
        (0.1, "none"),
        (1e6, "sqrt"),
        (1e6, "none"),
        (0.01, "sqrt"),
        (0.01, "none"),
    ]


def test_random_trials_are_the_same_each_time_and_others_with_another_seed(tmp_path):
    spec = read(tmp_path)
    assert make_trials(spec) == make_trials(read(tmp_path))
    assert make_trials(spec) != make_trials(read(tmp_path, {"sweep.seed": 1}))
    assert len(make_trials(spec)) == 12


def test_each_choice_comes_equally_often_and_each_stretch_of_a_range_once(tmp_path):
    trials = make_trials(read(tmp_path))
    assert Counter(params["schedule.lr_scaling"] for params in trials) == {"linear": 4, "sqrt": 4, "none": 4}
    assert Counter(params["train.global_batch_size"] for params in trials) == {32: 6, 64: 6}
    stretches = sorted(math.floor((math.log10(params["optim.base_lr"]) + 2) / 2 * 12) for params in trials)
    assert stretches == list(range(12))


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ({"uniform": [0.5, 2]}, [0.5, 2]),
        ({"loguniform": [0.01, 100]}, [0.01, 100]),
        ({"randint": [1, 5]}, [1, 4]),
        ({"quniform": [0.1, 1, 0.25]}, [0.25, 1.0]),
        ({"choice": ["a", "b", "c"]}, ["a", "b", "c"]),
    ],
)
def test_what_is_drawn_lies_within_the_corners(kind, ends):
    one = domain(**kind)
    assert one.corners() == ends
    values = [params["key"] for params in draw({"key": one}, 200, seed=3)]
    assert (
        all(value in ends for value in values) if "choice" in kind else ends[0] <= min(values) <= max(values) <= ends[1]
    )
    if "quniform" in kind:
        assert set(values) == {0.25, 0.5, 0.75, 1.0}
    if "randint" in kind:
        assert Counter(values) == {1: 50, 2: 50, 3: 50, 4: 50}


def test_of_a_large_space_the_corners_of_each_two_keys_are_looked_at():
    space = {f"key{number}": domain(choice=list(range(5))) for number in range(6)}
    seen = list(corners(space))
    assert len(seen) == 15 * 25 < len(grid(space))
    pairs = {(params["key2"], params["key5"]) for params in seen}
    assert len(pairs) == 25


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"uniform": [2, 1]}, "lower end below"),
        ({"loguniform": [0, 1]}, "above 0"),
        ({"quniform": [0, 1, 2]}, "positive step"),
        ({"choice": []}, "at least 1 item"),
        ({"choice": [1], "grid": [1]}, "takes one of"),
        ({}, "takes one of"),
        ({"chioce": [1]}, "did you mean choice"),
        (3, "is no list"),
    ],
)
def test_a_domain_at_fault_is_refused_by_its_key_and_file(tmp_path, kind, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, space={"optim.base_lr": kind})
    assert "space.optim.base_lr" in str(caught.value)
    assert "mine.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"space.optim.bas_lr": [1]}, "unknown key optim.bas_lr .*did you mean optim.base_lr"),
        ({"space.scaling.num_workers": [1, 2]}, "all trials have sweep.workers"),
        ({"sweep.trails": 3}, "unknown key sweep.trails, did you mean trials"),
        ({"sweep.search": "grid"}, "sweep.trials goes with sweep.search=random"),
        ({"sweep.trials": None}, "sweep.trials goes with sweep.search=random"),
        ({"sweep.search": "grid", "sweep.trials": None}, "optim.base_lr is a range"),
        ({"sweep.metric": "val/loss"}, "sweep.mode max would look for the worst val/loss"),
        ({"sweep.base": "quickstrat"}, "did you mean quickstart"),
        ({"optim.base_lr": 0.1}, "optim.base_lr is set for all trials and in the space too"),
        ({"scaling.num_workers": 2}, "scaling.num_workers cannot be set for trials .*sweep.workers"),
        ({"checkpoint.best_by": "val/loss"}, "checkpoint.best_by cannot be set for trials .*sweep.metric"),
        ({f"space.{key}": None for key in SPACE}, "is empty"),
    ],
)
def test_a_sweep_at_fault_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, overrides)


def test_a_runs_config_is_no_sweep():
    with pytest.raises(ConfigError, match="is no sweep"):
        read_spec("quickstart", {})


def test_a_batch_that_the_micro_batch_does_not_divide_is_found_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"train.global_batch_size=40.*\n.*nearest that are: 32 or 48"):
        check(read(tmp_path, {"space.train.global_batch_size": {"choice": [32, 40]}}))


def test_a_warm_up_longer_than_the_run_is_found_though_no_trial_has_drawn_it(tmp_path):
    spec = read(tmp_path, {"space.schedule.warmup_epochs": {"uniform": [0, 6.01]}})
    assert max(params["schedule.warmup_epochs"] for params in make_trials(spec)) < 6
    with pytest.raises(ConfigError, match=r"warmup_epochs 6.01 must be less than train.epochs 6"):
        check(spec)


def test_a_value_that_the_schema_refuses_is_found(tmp_path):
    with pytest.raises(ConfigError, match=r"optim.base_lr: .*greater than 0"):
        check(read(tmp_path, sweep={}, space={"optim.base_lr": [0.1, -1]}))


def test_more_workers_than_a_batch_has_micro_batches_for_are_found(tmp_path):
    with pytest.raises(ConfigError, match="more than the 2 micro-batches"):
        check(read(tmp_path, {"sweep.workers": 3}))


def test_what_is_set_for_all_trials_is_laid_over_the_base_and_under_the_trial(tmp_path):
    spec = read(tmp_path, {"train.epochs": 3}, model={"name": "resnet18"})
    check(spec)
    config = spec.config(make_trials(spec)[0])
    assert (config.model.name, config.train.epochs, config.data.source) == ("resnet18", 3, "digits")
    assert (config.scaling.num_workers, config.checkpoint.best_by) == (1, "val/top1")


def test_the_learning_rate_is_scaled_once(tmp_path):
    space = {"schedule.lr_scaling": ["linear", "sqrt", "none"], "train.global_batch_size": [64]}
    spec = read(tmp_path, sweep={}, space=space, optim={"base_lr": 0.1})
    assert [peak_lr(spec.config(params)) for params in make_trials(spec)] == pytest.approx([0.025, 0.05, 0.1])
