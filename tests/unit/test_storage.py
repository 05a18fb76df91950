"""Datasets in an object store: a real S3 server on this machine, written to by prepare and trained from."""

import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from raytrain.config import Train
from raytrain.data.loader import eval_batches, train_batches
from raytrain.data.source import open_sources
from raytrain.errors import DataError
from raytrain.plan import make_plan
from raytrain.prepare import main
from tests.datasets import (
    config,
    encoded,
    held_by,
    open_dataset,
    photo_samples,
    piece,
    write_folder,
    write_forms,
    write_parquet,
)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
BUCKET = "photos"


class Requests(logging.Handler):
    """What the server was asked for: (method, path)."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        if found := re.search(r'"(?:\x1b\[[0-9;]*m)*(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP', record.getMessage()):
            self.seen.append((found[1], found[2].split("?")[0]))

    def downloads(self):
        return [path for method, path in self.seen if method == "GET" and path.endswith((".arrow", ".parquet", ".tar"))]


@pytest.fixture(scope="module")
def store(s3):
    """A server with one bucket: (boto3's client, the requests it gets)."""
    s3.create_bucket(Bucket=BUCKET)
    requests, log = Requests(), logging.getLogger("werkzeug")
    log.addHandler(requests)
    log.setLevel(logging.INFO)
    yield s3, requests
    log.removeHandler(requests)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A dataset in all forms, prepared into several shards: {form: (source, path)}."""
    root = tmp_path_factory.mktemp("local")
    forms = write_forms(root, {"train": photo_samples(12), "val": photo_samples(3, seed=500)})
    assert prepare(root / "folder", root / "arrow", *SHARDS) == 0
    return {**forms, "arrow": ("arrow", root / "arrow")}


SHARDS = ("--shard-gib", 0.00001)


@pytest.fixture(scope="module")
def remote(store, local):
    """The same in the bucket, under FORM/: {form: (source, url)}; prepare itself wrote the Arrow shards."""
    for form, (_, path) in local.items():
        if form != "arrow":
            upload(store[0], path, form)
    assert prepare(f"s3://{BUCKET}/folder", f"s3://{BUCKET}/arrow", *SHARDS) == 0
    return {form: (source, f"s3://{BUCKET}/{form}") for form, (source, _) in local.items()}


def prepare(*words):
    """In this process, with one worker."""
    return main([*map(str, words), "--workers", "1"])


def upload(client, folder, prefix):
    for path in folder.rglob("*"):
        if path.is_file():
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes())


def objects(client, prefix):
    """{key without the prefix: content}; markers of folders left out."""
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/"):
        for item in page.get("Contents", ()):
            if item["Key"].endswith("/"):
                continue
            body = client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
            found[item["Key"].removeprefix(f"{prefix}/")] = body
    return found


def copy_of(client, prefix, to):
    for key, body in objects(client, prefix).items():
        client.put_object(Bucket=BUCKET, Key=f"{to}/{key}", Body=body)
    return f"s3://{BUCKET}/{to}"


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix in (".arrow", ".json")}


def batches(source, path, cache):
    data = config(source, path, cache, image_size=24, train_crop="random_resized", flip=0.5)
    sources = open_sources(data)
    plan = make_plan(Train(global_batch_size=8, micro_batch_size=4, epochs=2), len(sources.train.labels))
    for own in train_batches(sources.train, data, plan, 3, 0, 1, 0, 2, CPU):
        yield from own.batches
    yield from eval_batches(sources.val, data, 4, 0, 1, 2, CPU)


# reading and writing


def test_prepare_writes_the_objects_that_it_writes_as_files(store, local, remote):
    expected = files(local["arrow"][1])
    assert len([name for name in expected if name.startswith("train/") and name.endswith(".arrow")]) > 2
    written = objects(store[0], "arrow")
    assert written.keys() == expected.keys()
    for name, body in written.items():
        if name.endswith(".json"):  # says what it was made from
            manifests = [{**json.loads(found), "made_from": None} for found in (body, expected[name])]
            assert manifests[0] == manifests[1]
        else:
            assert body == expected[name]


def test_prepare_reads_and_writes_objects_from_any_form(store, local, remote, tmp_path):
    for form in ("plain", "struct", "tar", "arrow"):
        assert prepare(remote[form][1], tmp_path / form, "--max-side", 40) == 0
        assert prepare(local[form][1], tmp_path / f"local-{form}", "--max-side", 40) == 0
        assert files(tmp_path / form).keys() == files(tmp_path / f"local-{form}").keys()
        sources = [open_dataset("arrow", tmp_path / name, tmp_path / "cache") for name in (form, f"local-{form}")]
        assert [held_by(source) for source in sources[0]] == [held_by(source) for source in sources[1]]


@pytest.mark.parametrize("form", ["arrow", "folder", "plain", "struct", "tar"])
def test_training_from_objects_gives_the_batches_of_local_files(local, remote, tmp_path, form):
    ours = list(batches(*remote[form], tmp_path / "cache"))
    theirs = list(batches(*local["folder"], tmp_path / "cache"))
    assert len(ours) == len(theirs) == 14
    for got, expected in zip(ours, theirs, strict=True):
        assert torch.equal(got.images, expected.images)
        assert torch.equal(got.labels, expected.labels)


@pytest.mark.parametrize("form", ["arrow", "folder", "plain", "tar"])
def test_a_second_opening_downloads_nothing_again(store, remote, tmp_path, form):
    _, requests = store
    requests.seen.clear()
    expected = [held_by(source) for source in open_dataset(*remote[form], tmp_path)]
    assert requests.seen
    before = times(tmp_path)
    gc.collect()
    requests.seen.clear()
    sources = open_dataset(*remote[form], tmp_path)
    assert [held_by(source) for source in sources] == expected
    assert times(tmp_path) == before
    bodies = [path for path in requests.downloads() if path.endswith(".arrow") or form == "tar"]
    assert bodies == []
    assert not [path for method, path in requests.seen if method == "GET" and path.endswith((".jpg", ".png"))]


def test_a_source_of_objects_names_the_object(remote, tmp_path):
    for form, name in (("plain", "train/1.parquet row 1"), ("tar", "photos-train-0001.tar"), ("folder", "dog/001.jpg")):
        assert name in open_dataset(*remote[form], tmp_path).train.name(13)


def test_a_trailing_slash_changes_nothing(remote, tmp_path):
    expected = held_by(open_dataset(*remote["arrow"], tmp_path).train)
    before = times(tmp_path)
    assert held_by(open_dataset("arrow", remote["arrow"][1] + "/", tmp_path).train) == expected
    assert times(tmp_path) == before


def test_changed_objects_are_noticed(store, remote, tmp_path):
    client, _ = store
    url = copy_of(client, "plain", "changing")
    assert len(open_dataset("parquet", url, tmp_path / "cache").train.labels) == 24
    samples = photo_samples(3, seed=77)
    write_parquet(tmp_path / "new.parquet", [s.encoded for s in samples], [0, 0, 0, 1, 1, 1], ("cat", "dog"))
    client.put_object(Bucket=BUCKET, Key="changing/train/1.parquet", Body=(tmp_path / "new.parquet").read_bytes())
    source = open_dataset("parquet", url, tmp_path / "cache").train
    assert len(source.labels) == 18
    assert bytes(source.read(17)) == samples[-1].encoded


def test_shards_prepared_anew_under_the_same_name_are_noticed(store, local, tmp_path):
    upload(store[0], local["arrow"][1], "anew")
    held = held_by(open_dataset("arrow", f"s3://{BUCKET}/anew", tmp_path / "cache").train)
    assert prepare(local["folder"][1], tmp_path / "small", "--max-side", 30) == 0
    for key in objects(store[0], "anew"):
        store[0].delete_object(Bucket=BUCKET, Key=f"anew/{key}")
    upload(store[0], tmp_path / "small", "anew")
    again = held_by(open_dataset("arrow", f"s3://{BUCKET}/anew", tmp_path / "cache").train)
    assert again == held_by(open_dataset("arrow", tmp_path / "small", tmp_path / "cache").train)
    assert again != held


# what goes wrong


@pytest.mark.parametrize("damage", ["half", "byte", "gone"])
def test_a_shard_that_is_cut_short_changed_or_gone_is_named_when_it_is_fetched(store, remote, tmp_path, damage):
    client, _ = store
    url = copy_of(client, "arrow", f"damaged-{damage}")
    keys = sorted(key for key in objects(client, f"damaged-{damage}") if re.match(r"train/.*\.arrow", key))
    key = f"damaged-{damage}/{keys[1]}"
    whole = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    middle = len(whole) // 2
    if damage == "gone":
        client.delete_object(Bucket=BUCKET, Key=key)
    else:
        changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        client.put_object(Bucket=BUCKET, Key=key, Body=whole[:middle] if damage == "half" else changed)
    for _ in range(2):
        with pytest.raises(DataError, match=keys[1].split("/")[1]):
            open_dataset("arrow", url, tmp_path)
        gc.collect()
    client.put_object(Bucket=BUCKET, Key=key, Body=whole)
    whole_again = open_dataset("arrow", url, tmp_path).train
    assert held_by(whole_again) == held_by(open_dataset(*remote["arrow"], tmp_path).train)


def test_a_fetched_shard_cut_short_on_this_disk_is_named_or_fetched_again(remote, tmp_path):
    expected = held_by(open_dataset(*remote["arrow"], tmp_path).train)
    gc.collect()
    shard = max(tmp_path.rglob("*.arrow"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    try:
        assert held_by(open_dataset(*remote["arrow"], tmp_path).train) == expected
    except DataError as error:
        assert shard.name in str(error)  # noqa: PT017


def test_a_wrong_bucket_or_prefix_is_refused_in_one_clear_line(remote, tmp_path, capsys):
    for source in ("arrow", "folder", "parquet", "webdataset"):
        for url in ("s3://no-such-bucket/arrow", f"s3://{BUCKET}/no/such"):
            with pytest.raises(DataError, match=url.removeprefix("s3://")) as refused:
                open_dataset(source, url, tmp_path / "cache")
            assert len(str(refused.value).splitlines()) == 1
    capsys.readouterr()
    assert prepare("s3://no-such-bucket/x", tmp_path / "dst") == 2
    assert prepare(f"s3://{BUCKET}/no/such", tmp_path / "dst") == 2
    assert prepare(remote["plain"][1], "s3://no-such-bucket/x") == 2
    errors = capsys.readouterr().err
    assert errors.count("raytrain: ") == len(errors.splitlines()) == 3
    assert "Traceback" not in errors


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "ftp://host/x", "s4://bucket/x"])
def test_a_url_that_is_none_is_refused(remote, tmp_path, url):
    with pytest.raises(DataError, match=r"data\.path|" + re.escape(url.rstrip("/"))):
        open_dataset("arrow", url, tmp_path)


def test_a_server_that_does_not_answer_is_refused(tmp_path):
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "raytrain.prepare", "s3://photos/x", str(tmp_path / "dst")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("raytrain: ")
    assert "photos/x" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_cache_keeps_to_its_limit(store, remote, tmp_path):
    random = np.random.default_rng(0)
    for number in range(2):
        images = [encoded(piece(i)) + random.bytes(100_000) for i in range(10)]
        write_parquet(tmp_path / f"{number}/train/0.parquet", images, [0] * 10)
        write_parquet(tmp_path / f"{number}/val/0.parquet", images[:1], [0])
        assert prepare(tmp_path / str(number), f"s3://{BUCKET}/limit-{number}", "--shard-gib", 0.0003) == 0
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"limit-0.*cache_gib"):
        open_dataset("arrow", f"s3://{BUCKET}/limit-0", cache, cache_gib=0.0005)
    assert not list(cache.rglob("*.arrow"))
    gc.collect()
    for number in (0, 1, 0):
        sources = open_dataset("arrow", f"s3://{BUCKET}/limit-{number}", cache, cache_gib=0.0013)
        assert held_by(sources.train) == held_by(open_dataset("parquet", tmp_path / str(number), cache / "x").train)
        assert sum(path.stat().st_size for path in cache.glob("datasets/*/*.arrow")) < 0.0013 * 2**30
        del sources
        gc.collect()


# interruptions


def test_prepare_killed_while_it_uploads_and_run_again_gives_the_same_objects(store, local, remote):
    client, requests = store
    words = [local["folder"][1], f"s3://{BUCKET}/killed", *SHARDS]
    expected = files(local["arrow"][1])
    kills = 0
    for uploads in (1, 2, 4):
        requests.seen.clear()
        command = [sys.executable, "-m", "raytrain.prepare", *map(str, words), "--workers", "1"]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        end = time.monotonic() + 120
        while process.poll() is None and len([path for method, path in requests.seen if method == "PUT"]) < uploads:
            assert time.monotonic() < end
        kills += process.poll() is None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        so_far = objects(client, "killed")
        if "train/dataset.json" not in so_far:
            assert {key: body for key, body in so_far.items() if key.endswith(".arrow")}.items() <= expected.items()
    assert kills >= 1
    assert prepare(*words) == 0
    assert objects(client, "killed") == expected


def test_a_fetch_that_was_killed_is_finished_by_the_next(store, remote, tmp_path):
    _, requests = store
    script = (
        "import sys; from raytrain.config import Data; from raytrain.data.source import open_sources; "
        "open_sources(Data(source='arrow', path=sys.argv[1], cache_path=sys.argv[2], image_size=8))"
    )
    requests.seen.clear()
    process = subprocess.Popen(
        [sys.executable, "-c", script, remote["arrow"][1], str(tmp_path)], cwd=ROOT, start_new_session=True
    )
    end = time.monotonic() + 120
    while process.poll() is None and not requests.downloads():
        assert time.monotonic() < end
    process.kill()
    process.wait()
    expected = held_by(open_dataset(*remote["plain"], tmp_path / "other").train)
    assert held_by(open_dataset(*remote["arrow"], tmp_path).train) == expected
    shutil.rmtree(tmp_path)


def test_a_folder_of_objects_with_a_wrong_class_is_refused(store, remote, tmp_path):
    write_folder(tmp_path / "f/train", photo_samples(1))
    write_folder(tmp_path / "f/val", photo_samples(1, classes=("cat", "eel")))
    upload(store[0], tmp_path / "f", "wrong-class")
    with pytest.raises(DataError, match="eel"):
        open_dataset("folder", f"s3://{BUCKET}/wrong-class", tmp_path / "cache")
