"""Each strategy's sums against the ranks' own gradients, as plain PyTorch computes them; the tests' own arithmetic."""

import numpy as np
import pytest

from tests.unit.comm_ranks import CASES, COUNTS, MICRO_BATCH, outcomes, sizes, whole_step


def cases(*names):
    """(ranks, case) for those of the names that as many ranks have computed."""
    return [(world_size, name) for name in names for world_size in CASES[name][0]]


def own(world_size, name):
    """What each rank has of each step of a case: float64 [steps, ranks, parameters]."""
    steps = len(outcomes()[world_size][0][name]["gradients"])
    return np.array([rank["own"][:steps] for rank in outcomes()[world_size]], np.float64).transpose(1, 0, 2)


def reduced(world_size, name):
    """The gradients that a case came to, the same on every rank: float32 [steps, parameters]."""
    first, *others = (np.array(rank[name]["gradients"]) for rank in outcomes()[world_size])
    assert first.shape == (20 if "onebit" in name else 10, sum(sizes()))
    for other in others:
        assert same_bits(first, other)
    return first


def same_bits(one, two):
    return one.tobytes() == two.tobytes()


def assert_close(got, want, tolerance):
    """Of each step, relative to its norm."""
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs), step


# sums in float32


@pytest.mark.parametrize(
    ("world_size", "name"),
    cases("flat", "flat_buckets", "pairs", "pairs_buckets", "three_and_one", "one_node"),
)
def test_flat_and_hierarchical_sums_are_plain_sums(world_size, name):
    assert_close(reduced(world_size, name), own(world_size, name).sum(1), 1e-6)


@pytest.mark.parametrize(("world_size", "name"), cases("flat", "pairs", "late", "fp16", "onebit", "powersgd"))
def test_losses_and_batch_norms_statistics_are_those_of_one_process(world_size, name):
    want = whole_step()[: len(reduced(world_size, name))]
    for rank in outcomes()[world_size]:
        for got, (_, statistics) in zip(rank[name]["statistics"], want, strict=True):
            np.testing.assert_allclose(got, statistics, rtol=1e-5, atol=1e-5)
        totals = [totals for totals in rank[name]["losses"] if totals is not None]
        assert sum(images for _, images in totals) == MICRO_BATCH * sum(COUNTS[: len(want)])
        assert sum(loss for loss, _ in totals) == pytest.approx(sum(loss for loss, _ in want), rel=1e-5)


def test_a_late_gradient_is_that_of_the_step_before_and_the_last_one_is_flushed():
    for world_size in (1, 2, 3, 4):
        for rank in outcomes()[world_size]:
            assert rank["late"]["steps"] == [None, *range(10)]


@pytest.mark.parametrize(
    ("world_size", "name"),
    cases("late", "late_pairs", "late_fp16", "late_onebit", "late_onebit_pairs"),
)
def test_a_late_gradient_is_the_one_that_would_have_been_in_time(world_size, name):
    in_time = {"late": "flat", "late_pairs": "pairs"}.get(name, name.removeprefix("late_"))
    assert_close(reduced(world_size, name), reduced(world_size, in_time), 1e-6)


@pytest.mark.parametrize(("world_size", "name"), cases("exact_pairs", "exact_one_node"))
def test_exact_sums_have_the_same_bits_in_any_topology(world_size, name):
    assert_close(reduced(world_size, "exact"), own(world_size, name).sum(1), 1e-5)
    assert same_bits(reduced(world_size, name), reduced(world_size, "exact"))
    for rank in outcomes()[world_size]:
        assert rank[name]["losses"] == rank["exact"]["losses"]
        assert same_bits(np.array(rank[name]["statistics"]), np.array(rank["exact"]["statistics"]))


# half precision

HALF = {"fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}
"""Greatest error of one rounding: relative, and absolute among the subnormals."""


@pytest.mark.parametrize(("world_size", "name"), cases("fp16", "bf16", "fp16_pairs", "bf16_pairs"))
def test_half_precision_is_as_near_to_plain_as_its_roundings_and_no_nearer(world_size, name):
    """W numbers are rounded, and so are the W - 1 sums of them, none greater than the sum of magnitudes:

    W roundings of that sum at most. Sums may be taken of W-ths, whose roundings then count W times.
    """
    relative, absolute = HALF[name.removesuffix("_pairs")]
    parts, got = own(world_size, name), reduced(world_size, name)
    bound = world_size * (1 + relative) ** world_size * relative * np.abs(parts).sum(1)
    bound += 2 * world_size**2 * absolute + 1e-7 * np.abs(parts).sum(1)
    assert (np.abs(got - parts.sum(1)) <= bound).all()
    differs = got != reduced(world_size, "flat")
    assert differs.mean() > 0.5
    assert np.linalg.norm(got - parts.sum(1)) > relative / 10 * np.linalg.norm(parts.sum(1))


# PowerSGD


@pytest.mark.parametrize(("world_size", "name"), cases("powersgd_whole"))
def test_powersgd_of_full_rank_is_plain(world_size, name):
    assert_close(reduced(world_size, name), own(world_size, name).sum(1), 1e-4)


@pytest.mark.parametrize(("world_size", "name"), cases("powersgd", "powersgd_buckets", "powersgd_pairs"))
def test_powersgd_is_plain_until_its_first_step_and_then_not(world_size, name):
    want, got = own(world_size, name).sum(1), reduced(world_size, name)
    assert_close(got[:3], want[:3], 1e-6)
    if world_size > 1:
        for ours, theirs in zip(got[3:], want[3:], strict=True):
            assert np.linalg.norm(ours - theirs) > 1e-2 * np.linalg.norm(theirs)


@pytest.mark.parametrize(("world_size", "name"), cases("powersgd", "powersgd_buckets", "powersgd_pairs"))
def test_what_powersgd_leaves_out_it_keeps_as_errors(world_size, name):
    want = own(world_size, name).sum((0, 1))
    applied = reduced(world_size, name).astype(np.float64).sum(0)
    for rank in outcomes()[world_size]:
        if world_size == 1:
            assert rank[name]["state"] == {}
            continue
        error = rank[name]["state"]["error"].numpy()
        assert error.shape == want.shape
        assert np.linalg.norm(applied + error - want) <= 1e-5 * np.linalg.norm(want)
        assert np.linalg.norm(error) > 1e-3 * np.linalg.norm(want)


def test_powersgd_sends_matrices_of_the_given_rank():
    """The step's gradient of the only large matrix has rank 1, as asked; the plain one has more."""
    start = sum(sizes()[:7])
    got = reduced(2, "powersgd")[-1][start : start + 2048].reshape(32, 64)
    want = own(2, "powersgd").sum(1)[-1][start : start + 2048].reshape(32, 64)
    assert np.linalg.matrix_rank(got, tol=1e-4 * np.linalg.norm(got)) == 1
    assert np.linalg.matrix_rank(want, tol=1e-4 * np.linalg.norm(want)) > 1


def test_powersgd_of_several_buckets_on_four_ranks_does_not_abort():
    assert [rank["resnet18"] for rank in outcomes()[4]] == [True] * 4


# state on other numbers of ranks


def assert_same_state(before, after, *, exact):
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if exact:
            assert tensor.equal(after[key]), key
        else:
            np.testing.assert_allclose(after[key].numpy(), tensor.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["onebit", "powersgd", "late", "late_onebit"])
def test_state_is_kept_when_the_number_of_ranks_changes(name):
    """With powers of two the shares add up to the very same bits."""
    moves = [(origin, 4) for origin in (1, 2, 3)] + [(1, 2), (1, 3), (2, 3), (4, "1 after 4")]
    for origin, world_size in moves:
        ranks = [rank["moved"] for rank in outcomes()[world_size]]
        for moved in ranks:
            if (name, origin) in moved:
                assert_same_state(*moved[name, origin], exact=3 not in (origin, world_size))


def test_powersgds_state_is_kept_where_there_is_nothing_to_compress():
    """Two nodes have become one, whose ranks sum without compression."""
    for rank in outcomes()[4]:
        before, after = rank["powersgd_on_one_node"]
        assert {"error", "step"} < before.keys()
        assert_same_state(before, after, exact=True)


def test_onebits_errors_are_not_nothing():
    for world_size in (2, 3, 4):
        errors = [np.abs(tensor.numpy()).max() for tensor in outcomes()[world_size][0]["onebit"]["state"].values()]
        assert min(errors) > 0
