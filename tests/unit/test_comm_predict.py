"""What a step is predicted to take, and what is chosen."""

from unittest import mock

import pytest
import torch

from raytrain.comm import choose_strategy
from raytrain.comm.predict import Computation, Sums, fit_line, predict_step
from raytrain.comm.topology import nodes_of
from raytrain.distributed import Runtime
from tests.ranks import run_ranks
from tests.unit.test_loop import make_config

COMPUTATION = Computation(forward=1.0, backward=2.0, update=0.5, buckets=((0.5, 100), (1.5, 300)))


def test_fast_links_leave_the_computation_and_the_small_sum():
    sums = Sums(ranks=4, latency=0.1, seconds_per_byte=0.0001, delay_per_byte=0)
    assert predict_step(COMPUTATION, sums) == pytest.approx(1 + 2 + 0.1 + 0.5)


def test_slow_links_are_busy_from_the_first_bucket_on():
    sums = Sums(ranks=4, latency=0.1, seconds_per_byte=0.02, delay_per_byte=0)
    assert predict_step(COMPUTATION, sums) == pytest.approx(1 + 0.5 + (0.1 + 2) + (0.1 + 6) + 0.1 + 0.5)


def test_a_bucket_waits_until_it_is_ready():
    sums = Sums(ranks=4, latency=0.1, seconds_per_byte=0.002, delay_per_byte=0)
    assert predict_step(COMPUTATION, sums) == pytest.approx(1 + 1.5 + (0.1 + 0.6) + 0.1 + 0.5)


def test_what_both_need_comes_on_top():
    """All 400 bytes go out beside computation, which ends after the last of them."""
    sums = Sums(ranks=4, latency=0.0, seconds_per_byte=0.0001, delay_per_byte=0.001)
    assert predict_step(COMPUTATION, sums) == pytest.approx(1 + 2 + 0.4 + 0.5)


def test_computation_that_is_done_is_in_nobody_s_way():
    """Of 400 bytes those that go beside computation, from 0.5 to 2 of it at 0.01 a byte, are 150."""
    sums = Sums(ranks=4, latency=0.0, seconds_per_byte=0.01, delay_per_byte=0.002)
    assert predict_step(COMPUTATION, sums) == pytest.approx(1 + 0.5 + 150 * 0.012 + 250 * 0.01 + 0.5)


def test_a_larger_ring_has_more_messages_and_hardly_more_bytes():
    sums = Sums(ranks=4, latency=0.3, seconds_per_byte=1.5, delay_per_byte=0.75).over(16)
    assert sums.ranks == 16
    assert sums.latency == pytest.approx(0.3 * 15 / 3)
    assert sums.seconds_per_byte == pytest.approx(2 * 15 / 16)
    assert sums.delay_per_byte == pytest.approx(15 / 16)


def test_what_is_done_inside_nodes_is_the_same_on_more_of_them():
    sums = Sums(2, 0.3, 1.5, 0, inside_latency=0.1, inside_seconds_per_byte=0.5).over(4)
    assert sums.latency == pytest.approx(0.1 + 0.2 * 3)
    assert sums.seconds_per_byte == pytest.approx(0.5 + 1.0 * (3 / 4) / (1 / 2))


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(10, 1.2), (110, 3.2)], (1.0, 0.02)),
        ([(10, 2.0), (110, 1.0)], (2.0, 0.0)),
        ([(10, 0.1), (20, 0.4)], (0.0, 0.03)),
    ],
)
def test_a_line_has_no_negative_parts(points, line):
    assert fit_line(*points) == pytest.approx(line)


@pytest.mark.parametrize(
    ("places", "workers_per_node", "nodes"),
    [
        (["a", "a", "b"], None, [[0, 1], [2]]),
        (["a", "b", "a", "b"], None, [[0, 2], [1, 3]]),
        (["a", "a", "a"], 2, [[0, 1], [2]]),
    ],
)
def test_ranks_are_grouped_by_node(places, workers_per_node, nodes):
    assert nodes_of(places, workers_per_node) == nodes


def choose(runtime):
    keys = {"comm__strategy": "auto", "comm__auto_bf16": True, "comm__workers_per_node": 2}
    config = make_config(train__micro_batch_size=2, **keys)
    chosen, reason = choose_strategy(config, 3, runtime, None)
    plain, _ = choose_strategy(make_config(train__micro_batch_size=2, comm__strategy="auto"), 3, runtime, None)
    return chosen.comm.topology, chosen.comm.compression, reason, plain.comm.topology, plain.comm.compression


def choose_given(runtime, times):
    """What is chosen where a byte takes so long, by (ranks in the ring, name of the compression)."""

    def sums(topology, compression, runtime, ranks, delay):
        del topology, runtime, delay
        return Sums(ranks, 0.0, times[ranks, type(compression).__name__], 0.0)

    computation = Computation(0.1, 0.1, 0.1, ((0.1, 1000),))
    keys = {"comm__strategy": "auto", "comm__auto_bf16": True, "comm__workers_per_node": 2}
    with (
        mock.patch("raytrain.comm.choose.measure_computation", return_value=computation),
        mock.patch("raytrain.comm.choose.measure_sums", sums),
    ):
        chosen, _ = choose_strategy(make_config(train__micro_batch_size=2, **keys), 3, runtime, None)
    return chosen.comm.topology, chosen.comm.compression


def choose_each(runtime):
    """Plain steps of 1.3 s; what differs by 2 % is not worth it."""
    slow = {(4, "Uncompressed"): 1e-3, (4, "Half"): 1e-3, (2, "Uncompressed"): 1e-3, (2, "Half"): 1e-3}
    fast = [{}, {(2, "Uncompressed"): 5e-4}, {(4, "Half"): 5e-4}, {(2, "Half"): 5e-4}, {(2, "Half"): 0.975e-3}]
    return [choose_given(runtime, slow | times) for times in fast]


def test_the_shortest_step_is_chosen_where_it_is_worth_it():
    choices = [("flat", "none"), ("hierarchical", "none"), ("flat", "bf16"), ("hierarchical", "bf16"), ("flat", "none")]
    assert run_ranks(4, choose_each) == [choices] * 4


def test_all_ranks_choose_the_same_and_say_why():
    torch.manual_seed(0)
    seen = run_ranks(4, choose)
    assert len(set(seen)) == 1
    topology, compression, reason, *plain = seen[0]
    assert reason.startswith(f"comm.strategy auto: topology {topology}, compression {compression}; predicted steps: ")
    for name in ("flat none", "flat bf16", "hierarchical none", "hierarchical bf16"):
        assert f"{name} " in reason
    assert plain == ["flat", "none"]  # each process is a node by itself, and bf16 was not allowed


def test_one_worker_has_nothing_to_choose():
    config = make_config(comm__strategy="auto")
    assert choose_strategy(config, 3, Runtime(), None) == (config, "comm.strategy auto: one worker, nothing to send")
