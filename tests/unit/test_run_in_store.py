"""A run in an object store, a real S3 server on this machine: checkpoints, metrics, and a run that was stopped."""

import logging
import re
import time
from functools import partial

import pytest

from raytrain import checkpoint
from raytrain.data.source import Sources
from raytrain.distributed import Runtime
from raytrain.errors import RunError, StoppedError
from raytrain.loop import train
from raytrain.recorder import METRICS, Recorder, read_metrics
from raytrain.run import Run, next_attempt
from raytrain.saver import Saver
from tests.places import at
from tests.unit.killed_saves import kill_at, training_of, weights_of
from tests.unit.test_loop import Noise, assert_same_bits, make_config, stop_after

BUCKET = "models"
FILES = {"model.safetensors", "training.pt", "state.json", "manifest.json"}


class Puts(logging.Handler):
    """The names of what the server was given, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        if found := re.search(r'"(?:\x1b\[[0-9;]*m)*(?:PUT|POST) (\S+) HTTP', record.getMessage()):
            self.names.append(found[1].split("?")[0])


@pytest.fixture(scope="module")
def server(s3):
    """(boto3's client, what the server was given) of a server with one bucket."""
    s3.create_bucket(Bucket=BUCKET)
    puts, log = Puts(), logging.getLogger("werkzeug")
    log.addHandler(puts)
    log.setLevel(logging.INFO)
    yield s3, puts
    log.removeHandler(puts)


@pytest.fixture
def client(server):
    return server[0]


@pytest.fixture
def folder(server, request):
    """A folder of the test's own."""
    return at(f"s3://{BUCKET}/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}")


@pytest.fixture
def new_saver():
    made = []

    def new(folder, keep_last=2, keep_best=0, **options):
        warnings = []
        saver = Saver(folder, keep_last, keep_best, warnings.append, **options)
        saver.warnings = warnings
        made.append(saver)
        return saver

    yield new
    for saver in made:
        saver.close()


def save(saver, step, top1=None):
    metrics = {} if top1 is None else {"val/top1": top1}
    saver.save(step, {"model": weights_of(step)}, training_of(step), {"metrics": metrics})


def steps(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoint.saved(folder)]


def newest(folder):
    """The step of the newest valid checkpoint, and the warnings."""
    warnings = []
    path = checkpoint.newest_valid(folder, warnings.append)
    return path and int(path.name.removeprefix("step_")), warnings


def keys(client, folder):
    """{key within the folder}; markers of folders left out."""
    prefix = str(folder).removeprefix(f"s3://{BUCKET}/") + "/"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    found = {item["Key"].removeprefix(prefix) for page in pages for item in page.get("Contents", ())}
    return {key for key in found if key and not key.endswith("/")}


def in_folders(steps):
    return {f"step_{step:08d}/{name}" for step in steps for name in FILES}


def key_of(folder, step, name):
    return str(folder).removeprefix(f"s3://{BUCKET}/") + f"/step_{step:08d}/{name}"


def flip(client, key):
    content = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))


def assert_holds(folder, step):
    path = folder / f"step_{step:08d}"
    assert checkpoint.verify(path) is None
    weights, expected = checkpoint.load_weights(path), weights_of(step)
    assert weights.keys() == expected.keys()
    assert [key for key in expected if not weights[key].equal(expected[key])] == []
    training = checkpoint.load_training(path)
    assert training["momentum"][0].equal(training_of(step)["momentum"][0])
    assert training["updates"] == checkpoint.load_state(path)["step"] == step


# checkpoints


def test_what_was_saved_reads_back(client, folder, new_saver):
    saver = new_saver(folder)
    save(saver, 7, 0.5)
    saver.finish()
    assert_holds(folder, 7)
    assert newest(folder) == (7, [])
    assert keys(client, folder) == in_folders([7])
    assert checkpoint.load_state(folder / "step_00000007")["metrics"] == {"val/top1": 0.5}
    assert saver.warnings == []


def test_the_manifest_comes_last_and_makes_it_a_checkpoint(server, folder, new_saver):
    client, puts = server
    seen = []
    saver = new_saver(folder, before=lambda: seen.append((steps(folder), keys(client, folder))))
    puts.names.clear()
    save(saver, 1)
    saver.finish()
    save(saver, 2)
    saver.finish()
    for (visible, there), expected in zip(seen, ([], [1]), strict=True):
        assert visible == expected
        assert len([key for key in there if key.endswith("manifest.json")]) == len(expected)
    for step in (1, 2):
        written = [name.rsplit("/", 1)[1] for name in puts.names if f"step_{step:08d}/" in name]  # some in parts
        assert set(written) - {""} == FILES
        assert set(written[written.index("manifest.json") :]) == {"manifest.json"}


def test_an_upload_that_broke_off_is_no_checkpoint(client, folder, new_saver):
    saver = new_saver(folder, keep_last=3)
    for step in (1, 2, 3):
        save(saver, step)
    saver.finish()
    client.delete_object(Bucket=BUCKET, Key=key_of(folder, 3, "manifest.json"))
    assert newest(folder)[0] == 2
    assert steps(folder) == [1, 2]
    save(saver, 4)
    saver.finish()
    assert newest(folder) == (4, [])
    assert steps(folder) == [1, 2, 4]


def test_what_an_upload_that_broke_off_has_left_is_removed(client, folder, new_saver):
    """A run that saves by the clock does not come past the same step again."""
    saver = new_saver(folder)
    for step in (1, 2):
        save(saver, step)
    saver.finish()
    client.delete_object(Bucket=BUCKET, Key=key_of(folder, 2, "manifest.json"))
    assert newest(folder)[0] == 1
    save(saver, 3)
    saver.finish()
    assert keys(client, folder) == in_folders([1, 3])


@pytest.mark.parametrize(
    "missing", [{"manifest.json"}, {"manifest.json", "training.pt"}, FILES - {"model.safetensors"}]
)
def test_a_step_whose_upload_broke_off_can_be_saved_again(client, folder, new_saver, missing):
    saver = new_saver(folder)
    for step in (1, 2):
        save(saver, step)
    saver.finish()
    for name in missing:
        client.delete_object(Bucket=BUCKET, Key=key_of(folder, 2, name))
    assert newest(folder)[0] == 1
    save(saver, 2)
    saver.finish()
    assert_holds(folder, 2)
    assert newest(folder) == (2, [])
    assert keys(client, folder) == in_folders([1, 2])


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt", "state.json", "manifest.json"])
def test_a_flipped_byte_is_found_and_the_one_before_is_taken(client, folder, new_saver, file):
    saver = new_saver(folder, keep_last=3)
    for step in (10, 20, 30):
        save(saver, step)
    saver.finish()
    flip(client, key_of(folder, 30, file))
    assert checkpoint.verify(folder / "step_00000030")
    step, [warning] = newest(folder)
    assert step == 20
    assert "step_00000030" in warning
    assert BUCKET in warning
    assert newest(folder) == (20, [])
    assert_holds(folder, 20)
    assert steps(folder) == [10, 20]
    save(saver, 25)
    saver.finish()
    assert keys(client, folder) == in_folders([10, 20, 25])


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_an_object_that_is_cut_short_or_gone_is_found(client, folder, new_saver, damage):
    saver = new_saver(folder)
    for step in (1, 2):
        save(saver, step)
    saver.finish()
    key = key_of(folder, 2, "model.safetensors")
    content = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    if damage == "gone":
        client.delete_object(Bucket=BUCKET, Key=key)
    else:
        client.put_object(Bucket=BUCKET, Key=key, Body=content[:-3])
    step, [warning] = newest(folder)
    assert step == 1
    assert "step_00000002" in warning


def test_old_ones_are_removed_from_the_bucket_and_the_best_is_kept(client, folder, new_saver):
    saver = new_saver(folder, keep_last=2, keep_best=1)
    for step, top1 in enumerate((0.1, 0.9, 0.2, 0.3, 0.4), 1):
        save(saver, step, top1)
        saver.finish()
        assert len(keys(client, folder)) <= 3 * len(FILES)
    assert steps(folder) == [2, 4, 5]
    assert keys(client, folder) == in_folders([2, 4, 5])
    assert checkpoint.best(folder).name == "step_00000002"
    assert saver.warnings == []


def test_a_bucket_that_is_gone_costs_a_warning_and_an_error_at_the_end(server, new_saver):
    saver = new_saver(at("s3://no-such-bucket/run/checkpoints"))
    save(saver, 1)
    with pytest.raises(RunError, match="no-such-bucket"):
        saver.finish()
    assert len(saver.warnings) <= 1
    save(saver, 2)
    saver.close()
    assert any("step_00000001" in warning for warning in saver.warnings)


def test_where_before_fails_nothing_is_left_in_the_bucket(client, folder, new_saver):
    allowed = [True]

    def before():
        if not allowed[0]:
            raise RunError("other workers have been started")

    saver = new_saver(folder, before=before)
    save(saver, 1)
    saver.finish()
    allowed[0] = False
    save(saver, 2)
    with pytest.raises(RunError, match="other workers have been started"):
        saver.finish()
    assert newest(folder) == (1, [])
    assert keys(client, folder) == in_folders([1])


def test_kills_while_it_uploads_leave_a_valid_checkpoint_each_time(server, folder, new_saver):
    """A checkpoint takes about a dozen requests."""
    client, puts = server
    save(first := new_saver(folder), 1)
    first.finish()

    def uploads(count):
        puts.names.clear()
        end = time.monotonic() + 60
        while len(puts.names) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    reached, torn = [1], 0
    for _ in kill_at(folder, [partial(uploads, count) for count in (1, 4, 7, 10, 12, 14, 20)]):
        torn += len({key.split("/")[0] for key in keys(client, folder)}) > len(steps(folder))
        step, warnings = newest(folder)
        assert warnings == []
        assert step is not None
        assert step >= reached[-1]
        assert_holds(folder, step)
        reached.append(step)
    assert reached[-1] > 1
    assert torn > 0


# metrics


def told_of(folder, **options):
    events = []
    return Recorder(folder, events.append, **options), events


def test_rows_appear_when_they_are_flushed_and_each_metric_once(folder):
    first, events = told_of(folder)
    first.metrics(1, {"a": 1.0})
    first.metrics(2, {"a": 2.0})
    assert len(events) == 2
    assert read_metrics(folder) == []
    first.flush()
    assert [(row["step"], row["a"]) for row in read_metrics(folder)] == [(1, 1.0), (2, 2.0)]
    first.metrics(3, {"a": 3.0})  # a kill follows: this row is in no checkpoint's past either
    second, events = told_of(folder)
    for step in (2, 3, 4):
        second.metrics(step, {"a": step + 0.5})
    assert [event["step"] for event in events] == [2, 3, 4]
    second.close()
    assert [(row["step"], row["a"]) for row in read_metrics(folder)] == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]


def test_rows_of_workers_that_others_have_followed_are_not_written(client, folder):
    def guard():
        raise RunError("other workers have been started")

    first, _ = told_of(folder)
    first.metrics(1, {"a": 1.0})
    first.close()
    before = client.get_object(Bucket=BUCKET, Key=str(folder).removeprefix(f"s3://{BUCKET}/") + f"/{METRICS}")
    late, _ = told_of(folder, guard=guard)
    late.metrics(2, {"a": 9.0})
    with pytest.raises(RunError, match="other workers have been started"):
        late.flush()
    after = client.get_object(Bucket=BUCKET, Key=str(folder).removeprefix(f"s3://{BUCKET}/") + f"/{METRICS}")
    assert before["Body"].read() == after["Body"].read()


def test_a_bucket_that_is_gone_is_an_error_at_flush(server):
    recorder, events = told_of(at("s3://no-such-bucket/run"))
    recorder.metrics(1, {"a": 1.0})
    assert events[0]["metrics"] == {"a": 1.0}
    with pytest.raises(RunError, match="no-such-bucket"):
        recorder.flush()


# a run


def run(config, folder, runtime=None):
    recorder = Recorder(folder)
    sources = Sources(Noise(18), Noise(5, seed=1))
    try:
        train(config, runtime or Runtime(), sources, folder / "checkpoints", recorder)
    finally:
        recorder.close()


def recorded(folder):
    """Each metric of each step, but those of time."""
    return [
        (row["step"], key, value)
        for row in read_metrics(folder)
        for key, value in row.items()
        if key.startswith(("train/loss", "train/top", "val/", "lr", "epoch"))
    ]


def test_a_run_in_a_bucket_that_was_stopped_ends_as_one_on_a_disk_that_was_not(client, folder, tmp_path):
    config = make_config(
        train__ema_decay=0.8, checkpoint__every_steps=5, checkpoint__keep_last=2, checkpoint__keep_best=0
    )
    local = at(tmp_path)
    run(config, local)
    for step in (3, 4):
        with pytest.raises(StoppedError):
            run(config, folder, stop_after(step))
    assert newest(folder / "checkpoints") == (7, [])
    run(config, folder)
    assert steps(folder / "checkpoints")[-1] == steps(local / "checkpoints")[-1] == 12
    name = "step_00000012"
    assert_same_bits(folder / "checkpoints" / name, local / "checkpoints" / name)
    assert recorded(folder) == recorded(local)
    assert len({row[:2] for row in recorded(folder)}) == len(recorded(folder)) > 24
    left = {key.split("/")[1] for key in keys(client, folder) if key.startswith("checkpoints/")}
    assert left == {path.name for path in checkpoint.saved(local / "checkpoints")}
    before = keys(client, folder)
    run(config, folder)  # it is at its end
    assert keys(client, folder) == before


def test_a_run_in_a_bucket_goes_on_from_before_a_damaged_checkpoint(client, folder, tmp_path):
    config = make_config(checkpoint__every_steps=4)
    run(config, at(tmp_path))
    with pytest.raises(StoppedError):
        run(config, folder, stop_after(6))
    flip(client, key_of(folder / "checkpoints", 6, "model.safetensors"))
    run(config, folder)
    name = "step_00000012"
    assert_same_bits(folder / "checkpoints" / name, at(tmp_path) / "checkpoints" / name)
    assert recorded(folder) == recorded(at(tmp_path))


def test_workers_that_others_have_followed_make_no_checkpoint(client, folder, new_saver):
    first = next_attempt(Run(make_config(), folder, None))
    saver = new_saver(first.checkpoints, before=first.check_attempt)
    save(saver, 1)
    saver.finish()
    second = next_attempt(first)
    assert second.attempt == first.attempt + 1
    second.check_attempt()
    save(saver, 2)
    with pytest.raises(RunError):
        saver.finish()
    assert steps(folder / "checkpoints") == [1]
    later = new_saver(second.checkpoints, before=second.check_attempt)
    save(later, 2)
    later.finish()
    assert_holds(folder / "checkpoints", 2)
