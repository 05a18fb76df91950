"""What follows from a failure, how many workers there is room for, and what may be asked for."""

import re
import socket
import time

import pytest

from raytrain.cluster import allot, usable_nodes
from raytrain.commandline import build, dump, parse_yaml
from raytrain.config import Scaling
from raytrain.errors import ConfigError, ResourceError
from raytrain.failures import MAX_DELAY_SECONDS, Failure, decide

NOW = 1_000_000.0


def failed(step, ago=0.0, reason="rank 3 on host-b was killed", *, is_transient=True):
    return Failure(reason, step=step, is_transient=is_transient, time=NOW - ago)


def decided(failure, *earlier, **scaling):
    return decide(failure, earlier, Scaling(**scaling))


# the budget


def test_so_many_failures_are_followed_by_a_restart_and_one_more_is_not():
    failures = [failed(10 * number, ago=100 - number) for number in range(1, 6)]
    restarts = [decided(failures[i], *failures[:i], max_failures=3).restart for i in range(5)]
    assert restarts == [True, True, True, False, False]


@pytest.mark.parametrize("step", [None, 5])
def test_without_a_budget_the_first_failure_ends_the_run(step):
    assert not decided(failed(step), max_failures=0).restart


def test_failures_outside_the_window_do_not_count():
    old = [failed(step, ago) for step, ago in ((1, 500), (2, 400), (3, 300), (4, 101))]
    assert decided(failed(9), *old, max_failures=1, failure_window_seconds=100).restart
    assert not decided(failed(9), *old, failed(5, ago=99), max_failures=1, failure_window_seconds=100).restart
    assert decided(failed(9), *old, failed(5, ago=99), max_failures=2, failure_window_seconds=100).restart


def test_failures_that_come_seldom_never_end_a_run():
    failures = [failed(step, ago=100 * (50 - step)) for step in range(50)]
    for count in range(50):
        decision = decided(failures[count], *failures[:count], max_failures=1, failure_window_seconds=90)
        assert (decision.restart, decision.delay_seconds) == (True, 0)


def test_the_window_ends_at_the_failure_and_not_at_the_clock():
    """The decision is a function of what goes in."""
    earlier = [Failure("x", step=step, time=100.0 + step) for step in range(3)]
    assert not decide(
        Failure("x", step=9, time=104.0), earlier, Scaling(max_failures=3, failure_window_seconds=50)
    ).restart


def test_the_reason_says_what_happened_and_count_and_limit():
    decision = decided(failed(20), failed(10, ago=5), max_failures=3, failure_window_seconds=3600)
    assert decision.restart
    assert "rank 3 on host-b was killed" in decision.reason
    assert re.search(r"\b2 of 3\b", decision.reason)
    assert "3600" in decision.reason
    over = decided(failed(20), *[failed(step, ago=50 - step) for step in (1, 2, 3)], max_failures=3)
    assert not over.restart
    assert "rank 3 on host-b was killed" in over.reason
    assert {"3", "4"} & set(re.findall(r"\d+", over.reason.replace("rank 3", "")))
    assert "max_failures" in over.reason


# the back-off


def delays(count, **scaling):
    """Of failures that come before the first step, one after the other."""
    failures = [failed(None, ago=(count - number) * 0.01) for number in range(count)]
    found = [decided(failures[i], *failures[:i], max_failures=count, **scaling) for i in range(count)]
    assert all(decision.restart for decision in found)
    return [decision.delay_seconds for decision in found]


def test_the_first_restart_is_immediate_and_the_next_ones_wait_longer_and_longer_up_to_a_limit():
    found = delays(40)
    assert found[0] == 0
    assert found[1] > 0
    assert found == sorted(found)
    below = [delay for delay in found if delay < MAX_DELAY_SECONDS]
    assert len(set(below)) == len(below) >= 3
    assert found[-1] == max(found) == MAX_DELAY_SECONDS


def test_a_thousand_failures_make_no_number_too_large():
    assert delays(1200)[-1] == MAX_DELAY_SECONDS


def test_the_restart_after_a_quiet_window_is_immediate_again():
    old = [failed(step, ago=300 - step) for step in range(3)]
    assert decided(failed(9), *old, failure_window_seconds=100).delay_seconds == 0


def test_the_delay_is_in_the_reason():
    decision = decided(failed(2), failed(1, 9), failed(2, 8), max_failures=5)
    assert decision.delay_seconds > 0
    assert f"in {decision.delay_seconds:g} s" in decision.reason


def test_a_run_that_got_on_since_the_last_failure_is_restarted_at_once():
    earlier = [failed(step, ago=9 - step) for step in (1, 2, 3)]
    assert decided(failed(4), *earlier, max_failures=9).delay_seconds == 0
    assert decided(failed(3), *earlier, max_failures=9).delay_seconds > 0


# what no restart cures


@pytest.mark.parametrize("earlier", [(), (failed(1, ago=9),)])
def test_a_failure_that_is_not_transient_is_never_retried(earlier):
    decision = decided(failed(5, reason="DataError: no image", is_transient=False), *earlier, max_failures=100)
    assert not decision.restart
    assert decision.delay_seconds == 0
    assert "DataError: no image" in decision.reason


@pytest.mark.parametrize(
    ("steps", "restart"),
    [
        ([5], True),
        ([5, 5], True),
        ([5, 5, 5], False),
        ([5, 5, 5, 5], False),
        ([1, 2, 5, 5, 5], False),
        ([5, 5, 6], True),
        ([5, 6, 5], True),
        ([5, 5, 6, 5], True),
        ([5, 5, 6, 5, 5], True),
        ([5, 5, 6, 5, 5, 5], False),
        ([0, 0, 0], False),
        ([None], True),
        ([None, None, None, None, None], True),
        ([5, 5, None], True),
        ([5, None, 5], True),
        ([5, 5, None, 5], True),
        ([None, 5, 5], True),
    ],
)
def test_a_fault_at_the_same_step_three_times_in_a_row_is_not_retried(steps, restart):
    failures = [failed(step, ago=len(steps) - i) for i, step in enumerate(steps)]
    decision = decided(failures[-1], *failures[:-1], max_failures=100)
    assert decision.restart == restart
    if not restart:
        assert "rank 3 on host-b was killed" in decision.reason
        assert re.search(rf"step {steps[-1]}\b", decision.reason)
        assert re.search(r"\b(3|4|three|four)\b", decision.reason.replace("rank 3", ""))


def test_before_the_first_step_only_the_budget_counts():
    failures = [failed(None, ago=9 - number) for number in range(5)]
    restarts = [decided(failures[i], *failures[:i], max_failures=4).restart for i in range(5)]
    assert restarts == [True, True, True, True, False]


# room for workers


def node(cpu=0.0, gpu=0.0, name="n"):
    resources = {"CPU": float(cpu), "memory": 2e9, f"node:{name}": 1.0}
    return {"NodeID": name, "Alive": True, "Resources": {**resources, **({"GPU": float(gpu)} if gpu else {})}}


def cpus(*counts):
    return [node(count, name=str(i)) for i, count in enumerate(counts)]


def gpus(*counts, cpu=16):
    return [node(cpu, count, name=str(i)) for i, count in enumerate(counts)]


def room(nodes, **scaling):
    """The number of workers, after a check that they do fit, each on one node."""
    found = allot(Scaling(**scaling), nodes)
    assert set(found.resources) <= {"CPU", "GPU"}
    needs = {key: need for key, need in found.resources.items() if need}
    fit = [min(int(each["Resources"].get(key, 0) / need) for key, need in needs.items()) for each in nodes]
    assert sum(fit) >= found.num_workers
    return found.num_workers


@pytest.mark.parametrize("nodes", [cpus(8), cpus(4, 4), cpus(7, 1), cpus(1, 1, 1, 5), cpus(8, 1), cpus(2, 2, 2, 2)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_a_fixed_number_of_workers_finds_room_wherever_each_has_a_cpu(nodes, num_workers):
    assert room(nodes, num_workers=num_workers) == num_workers


@pytest.mark.parametrize("nodes", [cpus(8), cpus(4, 4), cpus(7, 1), cpus(1, 1, 1, 5)])
@pytest.mark.parametrize(
    ("least", "most", "expected"), [(1, 8, 8), (1, 5, 5), (3, 3, 3), (8, 8, 8), (2, 100, 8), (1, 1, 1)]
)
def test_an_elastic_number_is_as_many_as_have_room(nodes, least, most, expected):
    assert room(nodes, num_workers={"min": least, "max": most}) == expected


@pytest.mark.parametrize(
    ("nodes", "num_workers", "share"),
    [(cpus(8), 1, 8), (cpus(8), 2, 4), (cpus(8), 8, 1), (cpus(4, 4), 2, 4), (cpus(4, 4), 4, 2), (cpus(6, 3), 3, 3)],
)
def test_workers_share_the_cpus_of_the_cluster_evenly(nodes, num_workers, share):
    assert allot(Scaling(num_workers=num_workers), nodes) == (num_workers, {"CPU": share})


@pytest.mark.parametrize(
    ("nodes", "each", "expected"),
    [(cpus(8), 2, 4), (cpus(8), 3, 2), (cpus(5, 3), 2, 3), (cpus(7, 1), 4, 1), (cpus(4, 4, 3), 4, 2)],
)
def test_as_many_workers_as_have_the_cpus_that_each_is_to_have(nodes, each, expected):
    assert room(nodes, num_workers={"min": 1, "max": 50}, cpus_per_worker=each) == expected
    found = allot(Scaling(num_workers=expected, cpus_per_worker=each), nodes)
    assert found == (expected, {"CPU": each})
    with pytest.raises(ResourceError):
        allot(Scaling(num_workers=expected + 1, cpus_per_worker=each), nodes)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (gpus(1), 1),
        (gpus(8), 8),
        (gpus(4, 4), 8),
        (gpus(4, 1), 5),
        (gpus(1, 3, 4), 8),
        ([*gpus(2), node(64, name="head")], 2),
        ([node(4, name="head"), *gpus(8, cpu=8), *gpus(2, cpu=2)], 10),
    ],
)
def test_where_there_are_gpus_each_worker_has_one(nodes, expected):
    found = allot(Scaling(num_workers={"min": 1, "max": 64}), nodes)
    assert found.num_workers == expected
    assert found.resources["GPU"] == 1
    assert found.resources["CPU"] > 0
    assert room(nodes, num_workers={"min": 1, "max": 64}) == expected
    assert room(nodes, num_workers=expected) == expected
    with pytest.raises(ResourceError, match="GPU"):
        allot(Scaling(num_workers=expected + 1), nodes)


def test_gpus_are_left_alone_where_they_are_not_wanted():
    found = allot(Scaling(num_workers=4, use_gpu=False), gpus(2, cpu=8))
    assert found.num_workers == 4
    assert not found.resources.get("GPU")


@pytest.mark.parametrize(
    ("scaling", "nodes", "need", "have"),
    [
        ({"num_workers": 9}, cpus(4, 4), "9", "8"),
        ({"num_workers": 3, "cpus_per_worker": 4}, cpus(4, 7), "12", "11"),
        ({"num_workers": {"min": 5, "max": 9}}, cpus(3, 1), "5", "4"),
        ({"num_workers": 6}, gpus(4, 1, cpu=32), "6", "5"),
        ({"num_workers": {"min": 6, "max": 8}}, gpus(4, 1, cpu=32), "6", "5"),
        ({"num_workers": 7, "use_gpu": True}, cpus(8), "7", "0"),
        ({"num_workers": 1}, [], "1", "0"),
        ({"num_workers": {"min": 1, "max": 4}}, [], "1", "0"),
    ],
)
def test_too_few_are_refused_with_what_is_needed_and_what_there_is(scaling, nodes, need, have):
    with pytest.raises(ResourceError) as refused:
        allot(Scaling(**scaling), nodes)
    numbers = re.findall(r"\d+", str(refused.value))
    assert need in numbers
    assert have in numbers
    assert "scaling." in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_worker_does_not_lie_across_two_nodes():
    with pytest.raises(ResourceError):
        allot(Scaling(num_workers=1, cpus_per_worker=4), cpus(3, 3))


# nodes that can be used


@pytest.fixture
def ports():
    """A port that answers, and one that does not."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield server.getsockname()[1], closed.getsockname()[1]


def at_port(name, port, *, alive=True):
    return {**node(4, name=name), "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


def ids(nodes):
    return [each["NodeID"] for each in nodes]


def test_nodes_that_are_dead_do_not_answer_or_are_about_to_leave_are_not_used(ports):
    answers, closed = ports
    nodes = [
        at_port("a", answers),
        at_port("silent", closed),
        at_port("dead", answers, alive=False),
        at_port("leaving", answers),
        at_port("b", answers),
    ]
    assert ids(usable_nodes(nodes)) == ["a", "leaving", "b"]
    assert ids(usable_nodes(nodes, leaving={"leaving"})) == ["a", "b"]
    assert ids(usable_nodes(nodes, leaving=["a", "leaving", "unknown"])) == ["b"]
    assert ids(usable_nodes(nodes[:1], leaving=["a"])) == []
    assert usable_nodes([]) == []
    assert room(usable_nodes(nodes, leaving={"leaving"}), num_workers={"min": 1, "max": 99}) == 8


def test_the_only_node_that_is_left_is_not_used_either_where_it_does_not_answer(ports):
    answers, closed = ports
    assert ids(usable_nodes([at_port("a", closed)])) == []
    assert ids(usable_nodes([at_port("a", closed), at_port("b", answers)], leaving={"b"})) == []


def test_nodes_that_do_not_answer_are_not_waited_for_one_after_another():
    """An address to which nothing is delivered; a cluster that loses a rack has many of them."""
    nodes = [{**at_port(str(i), 9), "NodeManagerAddress": "192.0.2.1"} for i in range(8)]
    begun = time.monotonic()
    assert usable_nodes(nodes) == []
    assert time.monotonic() - begun < 8


# what may be asked for


def fails(sections, **overrides):
    with pytest.raises(ConfigError) as refused:
        build(sections, {key.replace("__", "."): value for key, value in overrides.items()}, "recipe.yaml")
    return str(refused.value)


BATCH = {"data": {"source": "folder"}, "train": {"global_batch_size": 32, "micro_batch_size": 4}}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"min": 4, "max": 2}, ["4", "2", "min", "max"]),
        ({"min": 1, "max": 9}, ["9", "8", "train.micro_batch_size"]),
        ({"min": 9, "max": 9}, ["9", "8", "train.micro_batch_size"]),
        ({"min": 2}, ["max"]),  # what is missing is named
        ({"max": 2}, ["min"]),
        ({}, ["min", "max"]),
        ({"min": 0, "max": 2}, ["0"]),
        ({"min": -1, "max": 2}, ["-1"]),
        ({"min": 1, "max": "many"}, ["many"]),
        ({"min": 1.5, "max": 2}, ["1.5"]),
        ({"min": 1, "max": 2, "most": 3}, ["most"]),
        ([1, 2], []),
        (0, ["0"]),
        (9, ["9", "8"]),
        ("many", ["many"]),
        (None, []),
    ],
)
def test_a_number_of_workers_that_cannot_be_is_refused_by_its_key(value, words):
    message = fails({**BATCH, "scaling": {"num_workers": value}})
    assert [word for word in ["scaling.num_workers", *words] if word not in message] == []
    assert "Traceback" not in message
    assert "tagged" not in message
    assert "elastic." not in message


@pytest.mark.parametrize(
    ("value", "least", "most"), [(3, 3, 3), ({"min": 1, "max": 8}, 1, 8), ({"min": 2, "max": 2}, 2, 2)]
)
def test_a_number_of_workers_or_the_fewest_and_the_most_may_be_asked_for(value, least, most):
    for config in (
        build({**BATCH, "scaling": {"num_workers": value}}, {}, ""),
        build(BATCH, {"scaling.num_workers": value}, ""),
    ):
        assert (config.scaling.min_workers, config.scaling.max_workers) == (least, most)
        assert build(parse_yaml(dump(config), ""), {}, "") == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_failures", -1),
        ("failure_window_seconds", 0),
        ("node_wait_seconds", -1),
        ("cpus_per_worker", 0),
        ("max_failures", float("inf")),
    ],
)
def test_a_budget_that_cannot_be_is_refused_by_its_key(key, value):
    assert f"scaling.{key}" in fails({**BATCH, "scaling": {key: value}})
