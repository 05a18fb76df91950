import math

import pytest

from raytrain.commandline import build
from raytrain.errors import ConfigError
from raytrain.plan import make_plan
from raytrain.schedule import make_schedule

STEPS = 7  # an epoch


def rates(num_images=STEPS * 8, **keys):
    """The learning rate of every step."""
    overrides = {"train.epochs": 3, "optim.base_lr": 0.4, "schedule.lr_scaling": "none", "schedule.warmup_epochs": 0}
    overrides |= {key.replace("__", "."): value for key, value in keys.items()}
    config = build({"train": {"global_batch_size": 8, "micro_batch_size": 4}}, overrides, "")
    plan = make_plan(config.train, num_images)
    schedule = make_schedule(config, plan)
    return [schedule(step) for step in range(plan.total_steps)]


def cosine(done, peak=0.4, low=0.0):
    return low + (peak - low) * (1 + math.cos(math.pi * done)) / 2


def test_without_warm_up_the_first_step_has_the_peak_and_the_last_the_minimum():
    got = rates(schedule__min_lr=0.01)
    assert got == pytest.approx([cosine(step / 20, low=0.01) for step in range(21)], rel=1e-12)
    assert got[0] == 0.4
    assert got[-1] == pytest.approx(0.01, rel=1e-12)


def test_one_epoch_of_warm_up_then_cosine_to_the_minimum_on_the_last_step():
    got = rates(schedule__warmup_epochs=1, schedule__min_lr=0.01)
    assert got[:7] == pytest.approx([0.4 * (step + 1) / 8 for step in range(7)], rel=1e-12)
    assert got[7:] == pytest.approx([cosine(step / 13, low=0.01) for step in range(14)], rel=1e-12)
    assert got[7] == 0.4
    assert got[-1] == pytest.approx(0.01, rel=1e-12)


def test_a_part_of_an_epoch_of_warm_up():
    got = rates(schedule__warmup_epochs=0.5)  # 3.5 steps
    peak_at = got.index(0.4)
    assert peak_at in (3, 4)
    assert got[:peak_at] == pytest.approx([0.4 * (step + 1) / (peak_at + 1) for step in range(peak_at)])


@pytest.mark.parametrize("warmup", [3, 5])
def test_a_warm_up_as_long_as_the_run_is_refused_when_the_config_is_read(warmup):
    with pytest.raises(ConfigError, match="warmup_epochs"):
        build({}, {"train.epochs": 3, "schedule.warmup_epochs": warmup}, "")


@pytest.mark.parametrize("max_steps", [1, 13, 14])
def test_max_steps_that_the_warm_up_fills_are_refused(max_steps):
    with pytest.raises(ConfigError, match=f"14 steps.*{max_steps}"):
        rates(train__max_steps=max_steps, schedule__warmup_epochs=2)


def test_a_warm_up_of_part_of_an_epoch_takes_whole_steps():
    got = rates(schedule__warmup_epochs=2.99)
    assert got.index(max(got)) == int(2.99 * STEPS) == 3 * STEPS - 1


def test_max_steps_fits_the_schedule_to_itself():
    got = rates(train__max_steps=30, schedule__warmup_epochs=2)
    assert len(got) == 30
    assert got[14] == 0.4
    assert got[14:] == pytest.approx([cosine(step / 15) for step in range(16)])
    assert got[-1] == pytest.approx(0, abs=1e-12)


def test_the_rate_is_never_negative_nor_above_the_peak_and_has_one_summit():
    for warmup in (0, 0.3, 1, 2.5):
        for decay in ("cosine", "multistep", "constant"):
            for max_steps in (None, 19, 20, 100):
                got = rates(schedule__warmup_epochs=warmup, schedule__decay=decay, train__max_steps=max_steps)
                summit = int(warmup * STEPS)
                assert max(got) == 0.4 == got[summit]
                assert min(got) >= 0
                assert got[: summit + 1] == sorted(set(got[: summit + 1]))
                assert got[summit:] == sorted(got[summit:], reverse=True)


def test_runs_of_a_single_step_start_at_the_peak():
    assert rates(train__max_steps=1) == [0.4]


def test_multistep_multiplies_from_each_milestone_on():
    got = rates(schedule__decay="multistep", schedule__milestones=[1, 2], schedule__gamma=0.5)
    assert got == pytest.approx([0.4] * 7 + [0.2] * 7 + [0.1] * 7)
    got = rates(schedule__decay="multistep", schedule__milestones=[2, 9], schedule__warmup_epochs=1)
    assert got[7:] == pytest.approx([0.4] * 7 + [0.04] * 7)


def test_constant_stays_at_the_peak():
    assert rates(schedule__decay="constant") == [0.4] * 21
    assert rates(schedule__decay="constant", schedule__warmup_epochs=1)[7:] == [0.4] * 14


def test_a_minimum_above_the_peak_is_refused():
    with pytest.raises(ConfigError, match=r"min_lr 0\.5 .*0\.4"):
        rates(schedule__min_lr=0.5)
    assert rates(schedule__min_lr=0.4) == pytest.approx([0.4] * 21)


def test_the_peak_scales_linearly_from_the_base_batch():
    got = rates(schedule__lr_scaling="linear", schedule__base_batch_size=32)
    assert got[0] == pytest.approx(0.1)
