"""Metrics: each of a step once in a run's life, through kills and full disks."""

import json
import math
import os
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from raytrain.errors import RunError
from raytrain.recorder import BAD_IMAGES, METRICS, Lines, Recorder, read_metrics, read_rows
from tests.places import at


@pytest.fixture
def new_recorder():
    """Makes a recorder; `recorder.events` has what its listener was told."""
    made = []

    def new(folder, **options):
        events = []
        recorder = Recorder(folder and at(folder), events.append, **options)
        recorder.events = events
        made.append(recorder)
        return recorder

    yield new
    for recorder in made:
        with suppress(RunError, ValueError):  # the test has closed it, or has seen to it that it cannot
            recorder.close()


@pytest.fixture
def small_disk(new_disk):
    """A file system of 256 KiB."""
    return new_disk(256)


def rows(folder):
    """Each metric of each step, with no thought of when; every line must be a whole one."""
    lines = (folder / METRICS).read_text().split("\n")
    assert lines.pop() == ""
    found = [json.loads(line) for line in lines]
    assert found == read_metrics(at(folder))
    return [(row["step"], key, value) for row in found for key, value in row.items() if key not in ("step", "time")]


def told(recorder):
    return [(event["step"], event["metrics"]) for event in recorder.events if event["kind"] == "metrics"]


def warnings(recorder):
    return [event["text"] for event in recorder.events if event["kind"] == "warning"]


# recorded and told


def test_metrics_are_a_line_each_and_there_at_once(tmp_path, new_recorder):
    recorder = new_recorder(tmp_path)
    recorder.metrics(1, {"train/loss": 2.5, "lr": 0.1})
    assert rows(tmp_path) == [(1, "train/loss", 2.5), (1, "lr", 0.1)]
    recorder.metrics(2, {"train/loss": 2.25})
    assert rows(tmp_path) == [(1, "train/loss", 2.5), (1, "lr", 0.1), (2, "train/loss", 2.25)]
    assert len((tmp_path / METRICS).read_text().splitlines()) == 2
    assert told(recorder) == [(1, {"train/loss": 2.5, "lr": 0.1}), (2, {"train/loss": 2.25})]
    times = [row["time"] for row in read_metrics(at(tmp_path))]
    assert times == sorted(times)


def test_a_metric_of_a_step_is_recorded_once_and_told_each_time(tmp_path, new_recorder):
    recorder = new_recorder(tmp_path)
    recorder.metrics(3, {"a": 1.0})
    recorder.metrics(3, {"a": 2.0, "b": 5.0})
    recorder.metrics(3, {"a": 3.0, "b": 6.0})
    recorder.metrics(4, {"a": 4.0})
    assert rows(tmp_path) == [(3, "a", 1.0), (3, "b", 5.0), (4, "a", 4.0)]
    assert told(recorder) == [(3, {"a": 1.0}), (3, {"a": 2.0, "b": 5.0}), (3, {"a": 3.0, "b": 6.0}), (4, {"a": 4.0})]


def test_what_is_computed_again_after_a_restart_is_told_and_not_recorded_again(tmp_path, new_recorder):
    first = new_recorder(tmp_path)
    for step in (1, 2, 3, 4):
        first.metrics(step, {"a": float(step)})
    first.close()
    second = new_recorder(tmp_path)
    for step in (3, 4, 5):
        second.metrics(step, {"a": step + 0.5})
    second.metrics(4, {"val/top1": 0.5})
    assert told(second) == [(3, {"a": 3.5}), (4, {"a": 4.5}), (5, {"a": 5.5}), (4, {"val/top1": 0.5})]
    second.close()
    expected = [(1, "a", 1.0), (2, "a", 2.0), (3, "a", 3.0), (4, "a", 4.0), (5, "a", 5.5), (4, "val/top1", 0.5)]
    assert rows(tmp_path) == expected
    third = new_recorder(tmp_path)
    for step in range(1, 7):
        third.metrics(step, {"a": 9.0})
    third.metrics(4, {"val/top1": 0.9})
    assert rows(tmp_path) == [*expected, (6, "a", 9.0)]


def test_the_row_that_a_listener_may_hand_on_has_only_what_is_new(tmp_path, new_recorder):
    """MLflow takes nothing back, so it must be given the same as the file."""
    recorder = new_recorder(tmp_path)
    recorder.metrics(1, {"a": 1.0})
    recorder.metrics(1, {"a": 2.0, "b": 3.0})
    recorder.metrics(1, {"a": 2.0})
    handed_on = [event["row"] for event in recorder.events]
    assert [row for row in handed_on if row.keys() - {"step", "time"}] == read_metrics(at(tmp_path))


def test_without_a_folder_it_tells_its_listeners_and_writes_nothing(tmp_path, new_recorder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = new_recorder(None)
    recorder.metrics(1, {"a": 1.0})
    recorder.warn("look out")
    recorder.note("resuming")
    recorder.bad_images("train", [(4, "dog/4.jpg", "broken")])
    recorder.flush()
    recorder.close()
    assert told(recorder) == [(1, {"a": 1.0})]
    assert warnings(recorder)[0] == "look out"
    assert "resuming" in [event.get("text") for event in recorder.events if event["kind"] != "warning"]
    assert list(tmp_path.iterdir()) == []


def test_all_listeners_are_told(tmp_path):
    events = [], []
    recorder = Recorder(at(tmp_path), events[0].append, events[1].append)
    recorder.metrics(1, {"a": 1.0})
    recorder.warn("look out")
    recorder.close()
    assert len(events[0]) == 2
    assert events[0] == events[1]


def test_values_that_are_no_numbers_stay_readable(tmp_path, new_recorder):
    recorder = new_recorder(tmp_path)
    recorder.metrics(1, {"a": math.nan, "b": math.inf, "c": 1e-300})
    recorder.metrics(2, {"a": 0.1 + 0.2})
    recorder.close()
    found = read_metrics(at(tmp_path))
    assert [row["step"] for row in found] == [1, 2]
    assert found[1]["a"] == 0.1 + 0.2
    again = new_recorder(tmp_path)
    again.metrics(2, {"a": 7.0})
    again.close()
    assert len(read_metrics(at(tmp_path))) == 2


def test_a_run_without_metrics_has_none(tmp_path):
    assert read_metrics(at(tmp_path)) == []
    assert read_rows(at(tmp_path), BAD_IMAGES) == []


def test_an_image_that_was_left_out_is_listed_once_in_a_runs_life(tmp_path, new_recorder):
    first = new_recorder(tmp_path)
    first.bad_images("train", [(4, "dog/ü.jpg", "broken"), (9, "cat/9.jpg", "empty")])
    first.bad_images("train", [(4, "dog/ü.jpg", "broken")])
    first.close()
    second = new_recorder(tmp_path)
    second.bad_images("train", [(9, "cat/9.jpg", "empty"), (11, "cat/11.jpg", "empty")])
    second.bad_images("val", [(4, "val/4.jpg", "broken")])
    second.close()
    listed = [(row["split"], row["sample"], row["image"]) for row in read_rows(at(tmp_path), BAD_IMAGES)]
    assert listed == [
        ("train", 4, "dog/ü.jpg"),
        ("train", 9, "cat/9.jpg"),
        ("train", 11, "cat/11.jpg"),
        ("val", 4, "val/4.jpg"),
    ]


# kills


def test_a_line_that_a_kill_cut_short_anywhere_is_removed_and_recorded_again(tmp_path, new_recorder):
    (tmp_path / "whole").mkdir()
    recorder = new_recorder(tmp_path / "whole")
    for step in (1, 2, 3):
        recorder.metrics(step, {"a": step / 8, "b": 1.0})
    recorder.close()
    content = (tmp_path / "whole" / METRICS).read_bytes()
    start = len(b"".join(content.splitlines(keepends=True)[:2]))
    for end in range(start + 1, len(content)):
        folder = tmp_path / str(end)
        folder.mkdir()
        (folder / METRICS).write_bytes(content[:end])
        assert [row["step"] for row in read_metrics(at(folder))] in ([1, 2], [1, 2, 3])
        again = new_recorder(folder)
        for step in (2, 3, 4):
            again.metrics(step, {"a": step / 8, "b": 1.0})
        again.close()
        assert rows(folder) == [(step, key, v) for step in (1, 2, 3, 4) for key, v in (("a", step / 8), ("b", 1.0))]


def test_a_file_that_is_nothing_but_a_line_cut_short_begins_anew(tmp_path, new_recorder):
    (tmp_path / METRICS).write_text('{"step": 1, "ti')
    recorder = new_recorder(tmp_path)
    recorder.metrics(1, {"a": 1.0})
    recorder.close()
    assert rows(tmp_path) == [(1, "a", 1.0)]


def test_a_list_of_images_that_a_kill_cut_short_within_a_letter_stays_readable(tmp_path, new_recorder):
    row = '{"split": "train", "sample": 4, "image": "dog/4.jpg", "reason": "x"}\n'
    (tmp_path / BAD_IMAGES).write_bytes(row.encode() + '{"split": "train", "sample": 9, "image": "ü'.encode()[:-1])
    assert [row["sample"] for row in read_rows(at(tmp_path), BAD_IMAGES)] == [4]
    recorder = new_recorder(tmp_path)
    recorder.bad_images("train", [(4, "dog/4.jpg", "x"), (9, "ü.jpg", "x")])
    recorder.close()
    assert [row["sample"] for row in read_rows(at(tmp_path), BAD_IMAGES)] == [4, 9]


# disks that fill


def fill(disk):
    """Takes all the room that is left."""
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def test_a_full_disk_costs_one_warning_and_the_rows_are_written_when_there_is_room(small_disk, new_recorder):
    recorder = new_recorder(small_disk)
    recorder.metrics(0, {"a": 0.0})
    fill(small_disk)
    for step in range(1, 400):  # 4 KiB of which still have room
        recorder.metrics(step, {"a": float(step)})
        assert [row["step"] for row in read_metrics(at(small_disk))] == list(range(len(read_metrics(at(small_disk)))))
    assert len(read_metrics(at(small_disk))) < 390
    assert len(told(recorder)) == 400
    [warning] = warnings(recorder)
    assert METRICS in warning
    assert "No space left" in warning
    with pytest.raises(RunError, match="No space left"):
        recorder.flush()
    (small_disk / "filler").unlink()
    recorder.metrics(400, {"a": 400.0})
    assert rows(small_disk) == [(step, "a", float(step)) for step in range(401)]
    recorder.flush()
    recorder.close()
    assert len(warnings(recorder)) == 1
    assert rows(small_disk) == [(step, "a", float(step)) for step in range(401)]


def test_flush_writes_what_a_full_disk_had_kept_back(small_disk, new_recorder):
    recorder = new_recorder(small_disk)
    fill(small_disk)
    for step in range(200):
        recorder.metrics(step, {"a": float(step)})
    with pytest.raises(RunError, match=METRICS):
        recorder.flush()
    (small_disk / "filler").unlink()
    recorder.flush()
    assert rows(small_disk) == [(step, "a", float(step)) for step in range(200)]


def test_a_full_disk_at_the_end_of_a_run_is_told_of(small_disk, new_recorder):
    recorder = new_recorder(small_disk)
    fill(small_disk)
    for step in range(200):
        recorder.metrics(step, {"a": float(step)})
    with pytest.raises(RunError, match="No space left"):
        recorder.close()


def test_a_process_that_died_with_a_full_disk_leaves_a_file_that_the_next_goes_on_with(small_disk, new_recorder):
    recorder = new_recorder(small_disk)
    recorder.metrics(0, {"a": 0.0})
    fill(small_disk)
    for step in range(1, 200):
        recorder.metrics(step, {"a": float(step)})
    copy = small_disk.parent / "copy"
    copy.mkdir()
    shutil.copy(small_disk / METRICS, copy)
    again = new_recorder(copy)
    for step in range(200):
        again.metrics(step, {"a": float(step)})
    again.close()
    assert rows(copy) == [(step, "a", float(step)) for step in range(200)]


def test_a_folder_that_cannot_be_written_is_a_warning_and_an_error_at_flush(small_disk, new_recorder):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    recorder = new_recorder(small_disk)
    recorder.metrics(1, {"a": 1.0})
    recorder.metrics(2, {"a": 1.0})
    assert len(warnings(recorder)) == 1
    assert len(told(recorder)) == 2
    with pytest.raises(RunError, match=METRICS):
        recorder.flush()


# flush


@pytest.fixture
def flushed(monkeypatch):
    """The paths that were brought to the disk."""
    paths = set()

    def spy(call):
        def sync(file):
            number = file if isinstance(file, int) else file.fileno()
            paths.add(str(Path(f"/proc/self/fd/{number}").readlink()))
            return call(file)

        return sync

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, spy(getattr(os, name)))
    return paths


def test_flush_brings_all_rows_to_the_disk(tmp_path, new_recorder, flushed):
    recorder = new_recorder(tmp_path)
    recorder.metrics(1, {"a": 1.0})
    recorder.bad_images("train", [(4, "dog/4.jpg", "broken")])
    recorder.flush()
    assert {str(tmp_path / METRICS), str(tmp_path / BAD_IMAGES)} <= flushed


def test_flush_brings_the_name_of_a_new_file_to_the_disk(tmp_path, new_recorder, flushed):
    recorder = new_recorder(tmp_path)
    recorder.metrics(1, {"a": 1.0})
    recorder.flush()
    assert str(tmp_path) in flushed


def test_the_guard_is_asked_before_each_flush(tmp_path, new_recorder):
    asked = []
    recorder = new_recorder(tmp_path, guard=lambda: asked.append(1))
    recorder.metrics(1, {"a": 1.0})
    asked.clear()
    recorder.flush()
    assert len(asked) == 1
    recorder.flush()
    assert len(asked) == 2


def test_where_the_guard_fails_flush_fails(tmp_path, new_recorder):
    def guard():
        raise RunError("other workers have been started")

    recorder = new_recorder(tmp_path, guard=guard)
    recorder.metrics(1, {"a": 1.0})
    with pytest.raises(RunError, match="other workers have been started"):
        recorder.flush()


def test_threads_that_record_and_flush_at_once_lose_no_row(tmp_path, new_recorder):
    recorder, done, failures = new_recorder(tmp_path), threading.Event(), []

    def flush():
        while not done.is_set():
            try:
                recorder.flush()
            except Exception as error:  # noqa: BLE001
                failures.append(error)
                return

    thread = threading.Thread(target=flush)
    thread.start()
    for step in range(300):
        recorder.metrics(step, {"a": float(step)})
    done.set()
    thread.join()
    recorder.close()
    assert failures == []
    assert rows(tmp_path) == [(step, "a", float(step)) for step in range(300)]


def test_lines_say_what_kept_them_from_being_written(small_disk):
    lines = Lines(at(small_disk), "events.jsonl")
    assert lines.add({"kind": "start"}, {"kind": "stop"}) is None
    assert read_rows(at(small_disk), "events.jsonl") == [{"kind": "start"}, {"kind": "stop"}]
    fill(small_disk)
    said = [lines.add({"kind": "failure", "reason": "x" * 500}) for _ in range(20)]
    assert said[0] is None  # in the page that there was
    assert "No space left" in said[-1]
    (small_disk / "filler").unlink()
    assert lines.add({"kind": "end"}) is None
    lines.close()
    found = read_rows(at(small_disk), "events.jsonl")
    assert [row["kind"] for row in found] == ["start", "stop", *["failure"] * 20, "end"]
