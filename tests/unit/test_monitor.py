"""What a rank is doing, since when and where; and who is late."""

import threading
import time

from raytrain.monitor import PHASES, Monitor, Status, describe_hang

LONG = 60


def test_it_says_whose_it_is():
    status = Monitor(3, "host-b", "ab12").status()
    assert (status.rank, status.node, status.node_id) == (3, "host-b", "ab12")
    assert (status.step, status.phase, status.stack) == (0, "start", "")


def test_it_says_step_and_phase():
    monitor = Monitor()
    monitor.begin(7, "data")
    assert (monitor.status().step, monitor.status().phase) == (7, "data")
    for phase in PHASES[2:]:
        monitor.enter(phase)
        assert (monitor.status().step, monitor.status().phase) == (7, phase)
    monitor.begin(8, "data")
    assert (monitor.status().step, monitor.status().phase) == (8, "data")


def test_the_seconds_are_those_of_the_step():
    """train.step_timeout_seconds is of a step: its phases do not each have as much."""
    monitor = Monitor()
    monitor.begin(1, "data")
    time.sleep(0.3)
    assert 0.3 <= monitor.status().seconds < LONG
    monitor.enter("forward")
    assert monitor.status().seconds >= 0.3
    monitor.begin(2, "data")
    assert monitor.status().seconds < 0.25


def test_with_each_thing_the_rank_has_got_on():
    monitor = Monitor()
    monitor.begin(1, "evaluation")
    seen = []
    for thing in monitor.each(iter("abc")):
        seen.append(thing)
        assert monitor.status().seconds < 0.25
        time.sleep(0.3)
        assert monitor.status().seconds >= 0.3
        assert (monitor.status().step, monitor.status().phase) == (1, "evaluation")
    assert seen == ["a", "b", "c"]


def test_a_rank_that_is_further_in_step_or_phase_has_the_greater_place():
    monitor = Monitor()
    places = [monitor.status().place]
    for step in (1, 2):
        monitor.begin(step, PHASES[1])
        places.append(monitor.status().place)
        for phase in PHASES[2:]:
            monitor.enter(phase)
            places.append(monitor.status().place)
    assert places == sorted(set(places))


def a_function_that_is_stuck(monitor, reached, may_go_on):
    monitor.begin(4, "forward")
    reached.set()
    assert may_go_on.wait(LONG)


def test_the_stack_names_the_function_the_thread_is_in():
    reached, may_go_on, monitors = threading.Event(), threading.Event(), []

    def follow():
        monitors.append(Monitor())
        a_function_that_is_stuck(monitors[0], reached, may_go_on)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    assert reached.wait(LONG)
    status = monitors[0].status(stack=True)
    without = monitors[0].status()
    may_go_on.set()
    thread.join()
    assert "a_function_that_is_stuck" in status.stack
    assert "may_go_on.wait(LONG)" in status.stack
    assert "test_monitor.py" in status.stack
    assert (status.step, status.phase) == (4, "forward")
    assert without.stack == ""


def test_a_thread_that_has_ended_has_no_stack_and_hurts_nobody():
    monitors = []
    thread = threading.Thread(target=lambda: monitors.append(Monitor()))
    thread.start()
    thread.join()
    assert isinstance(monitors[0].status(stack=True).stack, str)


# who is late


def rank(number, step, phase, node=None, stack=""):
    return Status(number, node or f"host-{number}", f"id{number}", step, phase, 61.5, stack or f"  stack of {number}\n")


def test_the_rank_that_came_least_far_is_late():
    line, stacks = describe_hang(
        [
            rank(0, 12, "all-reduce"),
            rank(1, 12, "data", "host-b", '  File "images.py", line 3, in read_slowly\n'),
            rank(2, 12, "all-reduce"),
            rank(3, 12, "backward"),
        ],
        60.0,
    )
    assert len(line.splitlines()) == 1
    late, waiting = line.split(";")
    assert "rank 1 on host-b" in late
    for word in ("data", "step 12", "60", "step_timeout_seconds"):
        assert word in late
    assert [number for number in ("0", "2", "3") if number not in waiting] == []
    assert "waited" in waiting
    assert "host-0" not in late
    assert "rank 1" in stacks
    assert "read_slowly" in stacks
    assert "stack of" not in stacks


def test_a_rank_that_is_a_step_behind_is_late_whatever_its_phase():
    line, stacks = describe_hang([rank(0, 5, "data"), rank(1, 4, "update")], 600.0)
    for word in ("rank 1 on host-1", "update", "step 4"):
        assert word in line.split(";")[0]
    assert "rank 0" in line.split(";")[1]
    assert "stack of 1" in stacks
    assert "stack of 0" not in stacks


def test_all_that_came_equally_little_far_are_late():
    line, stacks = describe_hang([rank(0, 3, "all-reduce"), rank(1, 3, "data"), rank(2, 3, "data")], 600.0)
    late, waiting = line.split(";")
    for word in ("1", "2", "host-1", "host-2", "data"):
        assert word in late
    assert "rank 0" in waiting
    assert "stack of 1" in stacks
    assert "stack of 2" in stacks
    assert "stack of 0" not in stacks


def test_where_all_are_at_the_same_place_nobody_waits():
    line, stacks = describe_hang([rank(number, 3, "all-reduce") for number in range(2)], 600.0)
    for word in ("host-0", "host-1", "all-reduce"):
        assert word in line
    assert "waited" not in line
    assert "stack of 0" in stacks
    assert "stack of 1" in stacks


def test_a_single_rank_that_hangs_is_described():
    line, stacks = describe_hang([rank(0, 3, "data")], 1.5)
    for word in ("rank 0", "host-0", "data", "step 3", "1.5"):
        assert word in line
    assert "stack of 0" in stacks
