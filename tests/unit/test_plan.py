import pytest

from raytrain.config import Train
from raytrain.errors import DataError
from raytrain.plan import deal, idle_fraction, make_plan, warmup_steps


def plan_of(num_images, batch, micro, **length):
    return make_plan(Train(global_batch_size=batch, micro_batch_size=micro, **length), num_images)


def sizes(plan, step):
    return [len(part) for part in plan.micro_batches(step)]


def check_one_epoch(plan, num_images, batch, micro):
    """What holds of any epoch of any plan."""
    positions, seen = [], 0
    for step in range(plan.steps_per_epoch):
        assert plan.images_seen(step) == seen
        parts = plan.micro_batches(step)
        positions += [position for part in parts for position in part]
        counts = [len(part) for part in parts]
        seen += sum(counts)
        assert min(counts) >= 2
        assert max(counts) - min(counts) <= 1
        if step < plan.steps_per_epoch - 1:
            assert counts == [micro] * (batch // micro)
        else:
            assert 2 <= sum(counts) <= batch + 1
            # as few as hold it; one larger than micro only where else one would be of a single image
            least = -(-sum(counts) // micro)
            assert len(counts) == least or (len(counts) == least - 1 and max(counts) == micro + 1)
            if max(counts) > micro:
                assert sum(counts) // least < 2
    assert positions == list(range(num_images))
    assert plan.images_seen(plan.steps_per_epoch) == seen == num_images


def test_every_image_once_an_epoch_for_all_small_recipes():
    for micro in range(2, 7):
        for count in range(1, 5):
            for num_images in range(2, 3 * micro * count + 3):
                plan = plan_of(num_images, micro * count, micro)
                check_one_epoch(plan, num_images, micro * count, micro)


@pytest.mark.parametrize(
    ("num_images", "batch", "micro"),
    [(1_281, 256, 64), (50_000, 4096, 128), (50_000, 96, 3), (4097, 4096, 128), (4098, 4096, 128), (99_991, 770, 7)],
)
def test_every_image_once_an_epoch_for_large_recipes(num_images, batch, micro):
    check_one_epoch(plan_of(num_images, batch, micro), num_images, batch, micro)


def test_steps_repeat_with_the_epoch():
    plan = plan_of(100, 32, 8, epochs=3)
    assert plan.steps_per_epoch == 4
    assert plan.total_steps == 12
    for step in range(4):
        assert plan.micro_batches(step) == plan.micro_batches(step + 4) == plan.micro_batches(step + 8)


def test_a_ragged_last_step_by_hand():
    plan = plan_of(100, 32, 8)  # 3 steps of 32, then 4 images
    assert sizes(plan, 0) == [8, 8, 8, 8]
    assert sizes(plan, 3) == [4]
    assert plan.micro_batches(3) == [range(96, 100)]
    assert sizes(plan_of(96 + 17, 32, 8), 3) == [5, 6, 6]
    assert sizes(plan_of(96 + 9, 32, 8), 3) == [4, 5]


def test_a_single_image_left_over_goes_with_the_step_before():
    plan = plan_of(97, 32, 8)
    assert plan.steps_per_epoch == 3
    assert sum(sizes(plan, 2)) == 33
    assert plan.micro_batches(2)[-1].stop == 97
    assert sizes(plan_of(5, 4, 2), 0) == [2, 3]
    assert sizes(plan_of(3, 2, 2), 0) == [3]


def test_a_set_smaller_than_a_batch_is_one_step():
    plan = plan_of(5, 256, 64, epochs=3)
    assert (plan.steps_per_epoch, plan.total_steps) == (1, 3)
    assert sizes(plan, 0) == [5]


@pytest.mark.parametrize("num_images", [0, 1])
def test_less_than_two_images_are_refused(num_images):
    with pytest.raises(DataError, match=str(num_images)):
        plan_of(num_images, 4, 2)


def test_seven_micro_batches_in_steps_of_four_are_two_steps():
    """A10: nothing dropped, nothing carried into the next epoch; `max_steps` counts optimizer steps."""
    plan = plan_of(7 * 8, 32, 8, epochs=2)
    assert plan.steps_per_epoch == 2
    assert plan.total_steps == 4
    assert [sizes(plan, step) for step in range(4)] == [[8] * 4, [8] * 3] * 2
    assert plan_of(3 * 8, 64, 8, epochs=1).total_steps == 1
    assert sizes(plan_of(3 * 8, 64, 8), 0) == [8] * 3
    assert plan_of(7 * 8, 32, 8, max_steps=1).total_steps == 1
    assert plan_of(7 * 8, 32, 8, max_steps=1).epochs == 1
    assert plan_of(7 * 8, 32, 8, max_steps=5).epochs == 3


def test_images_seen_over_epochs_by_hand():
    plan = plan_of(100, 32, 8, epochs=3)
    assert [plan.images_seen(step) for step in (0, 1, 3, 4, 5, 8, 11, 12)] == [0, 32, 96, 100, 132, 200, 296, 300]


def test_imagenet_in_batches_of_4096():
    plan = plan_of(1_281_167, 4096, 128, epochs=100)
    assert plan.steps_per_epoch == 313
    assert plan.total_steps == 31_300
    assert len(plan.micro_batches(0)) == 32
    assert sum(sizes(plan, 312)) == 1_281_167 - 312 * 4096 == 3215
    assert warmup_steps(5, plan) == 1565


@pytest.mark.parametrize(
    ("count", "world_size", "expected"),
    [
        (32, 3, [11, 11, 10]),
        (32, 32, [1] * 32),
        (32, 8, [4] * 8),
        (2, 4, [1, 1, 0, 0]),
        (0, 3, [0, 0, 0]),
        (7, 2, [4, 3]),
    ],
)
def test_deals_by_hand(count, world_size, expected):
    assert [len(hand) for hand in deal(count, world_size)] == expected


def test_a_deal_gives_each_thing_to_one_rank_in_order_and_evenly():
    for count in range(40):
        for world_size in range(1, 12):
            hands = deal(count, world_size)
            assert len(hands) == world_size
            assert [thing for hand in hands for thing in hand] == list(range(count))
            assert max(map(len, hands)) - min(map(len, hands)) <= 1


def test_idle_fraction_is_the_time_spent_waiting_for_the_slowest():
    assert idle_fraction(32, 32) == idle_fraction(32, 8) == idle_fraction(32, 1) == 0
    assert idle_fraction(32, 3) == pytest.approx(1 / 33)
    assert idle_fraction(4, 3) == pytest.approx(1 / 3)
    assert idle_fraction(9, 8) == pytest.approx(7 / 16)
