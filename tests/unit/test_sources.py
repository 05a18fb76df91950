"""Datasets in every form: which samples they have, in which order, what is wrong with them, and what is cached."""

import gc
import hashlib
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raytrain.config import Train
from raytrain.data.bad import BadImages
from raytrain.data.decode import decode
from raytrain.data.loader import eval_batches, train_batches
from raytrain.data.source import open_sources
from raytrain.distributed import Runtime
from raytrain.errors import DataError
from raytrain.plan import make_plan
from raytrain.prepare import main as prepare
from tests.datasets import (
    Sample,
    bad_images,
    config,
    encoded,
    held_by,
    numbered,
    open_dataset,
    photo_samples,
    piece,
    pixels_of,
    sample_tar,
    write_folder,
    write_forms,
    write_parquet,
    write_tar,
)
from tests.ranks import run_ranks

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
FORMS = ("folder", "arrow", "plain", "struct", "tar")
SLOW = pytest.mark.skipif(not os.environ.get("RAYTRAIN_SLOW_TESTS"), reason="RAYTRAIN_SLOW_TESTS is not set")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """One dataset in all forms: {form: (source, path)}, and where they are cached."""
    root = tmp_path_factory.mktemp("forms")
    found = write_forms(root, {"train": photo_samples(12), "val": photo_samples(3, seed=500)})
    assert prepare([str(root / "folder"), str(root / "arrow"), "--workers", "1"]) == 0
    return {**found, "arrow": ("arrow", root / "arrow")}, root / "cache"


@pytest.fixture(scope="module")
def broken():
    return bad_images()


@pytest.fixture(autouse=True)
def _no_hang():
    """A test that waits for ever for a lock fails."""

    def fail(signum, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(200)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def parquet_dataset(root, labels, names=None, val=(0,), name="train/0.parquet"):
    """Numbered images with these labels."""
    write_parquet(root / name, [numbered(i) for i in range(len(labels))], labels, names)
    write_parquet(root / "val/0.parquet", [numbered(i) for i in range(len(val))], list(val), names)
    return root


class Walk(NamedTuple):
    """What one rank sees of two epochs."""

    samples: list  # the samples of each step, by the colour of their images
    counts: list  # the images that each step's batches say they have
    ones: list  # of each step, ones summed over the ranks
    bad: list  # what the ranks told each other of
    error: str


def walk(runtime, datas):
    return [walk_one(runtime, data) for data in datas]


def walk_one(runtime, data):
    source = open_sources(data).train
    plan = make_plan(Train(global_batch_size=4, micro_batch_size=2, epochs=2), len(source.labels))
    bad = BadImages(len(source.labels), data.max_bad_fraction) if data.on_bad_image == "skip" else None
    seen = Walk([], [], [], [], "")
    batches = train_batches(source, data, plan, 0, runtime.rank, runtime.world_size, 0, 2, CPU, bad)
    try:
        for own in batches:
            parts = [(batch.images[:, 0, 0, 0], batch.labels >= 0) for batch in own.batches]
            seen.samples.append([number for images, has_label in parts for number in images[has_label].tolist()])
            seen.counts.append(sum(batch.count for batch in own.batches))
            seen.ones.append(runtime.sum(torch.ones(3)).tolist())
            if bad is not None:
                seen.bad.extend((found.name, found.reason) for found in bad.share(runtime))
                bad.check()
    except DataError as error:
        seen = seen._replace(error=str(error))
    batches.close()
    runtime.barrier()
    return seen


# the same batches from every form


@pytest.mark.parametrize("form", FORMS[1:])
def test_every_form_gives_the_same_batches_bit_for_bit(forms, form):
    settings = {"image_size": 24, "train_crop": "random_resized", "flip": 0.5, "color_jitter": (0.3, 0.3, 0.3)}
    plan = make_plan(Train(global_batch_size=8, micro_batch_size=4, epochs=2), 24)

    def batches(form):
        data = config(*forms[0][form], forms[1], **settings)
        sources = open_sources(data)
        assert sources.train.class_names == sources.val.class_names == ("cat", "dog")
        for own in train_batches(sources.train, data, plan, 3, 0, 1, 0, 2, CPU):
            yield from own.batches
        yield from eval_batches(sources.val, data, 4, 0, 1, 2, CPU)

    pairs = list(zip(batches("folder"), batches(form), strict=True))
    assert sum(batch.count for batch, _ in pairs) == 2 * 24 + 6
    for expected, got in pairs:
        assert got.images.dtype == torch.uint8
        assert torch.equal(got.images, expected.images)
        assert torch.equal(got.labels, expected.labels)
        assert got.count == expected.count


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_what_was_written(forms, form):
    train, val = open_dataset(*forms[0][form], forms[1])
    for source, samples in ((train, photo_samples(12)), (val, photo_samples(3, seed=500))):
        assert source.labels.dtype == np.int64
        assert source.labels.tolist() == [("cat", "dog").index(sample.label) for sample in samples]
        assert [bytes(source.read(i)) for i in range(len(samples))] == [sample.encoded for sample in samples]
        assert len({source.name(i) for i in range(len(samples))}) == len(samples)


@pytest.mark.parametrize("form", FORMS)
def test_a_name_says_where_the_user_finds_the_image(forms, form):
    source = open_dataset(*forms[0][form], forms[1]).train
    place = {
        "folder": "folder/train/dog/001.jpg",
        "arrow": "dog/001.jpg",
        "plain": "train/1.parquet row 1",
        "struct": "data/train-00001-of-00002.parquet row 1",
        "tar": "photos-train-0001.tar 00001",
    }
    assert place[form] in source.name(13)


# A02


def test_uneven_parquet_files_and_row_groups_keep_ranks_in_step(tmp_path):
    """A02, the first step of A12."""
    for name, rows, sizes in (("files", range(30), (10, 20)), ("groups", range(33), (33,))):
        start = 0
        for number, size in enumerate(sizes):
            images = [numbered(row) for row in rows[start : start + size]]
            path = tmp_path / name / f"train/{number}.parquet"
            write_parquet(path, images, list(rows[start : start + size]), row_group_size=10)
            start += size
        write_parquet(tmp_path / name / "val/0.parquet", [numbered(0)], [0])
    groups = pq.ParquetFile(tmp_path / "groups/train/0.parquet").metadata
    assert [groups.row_group(i).num_rows for i in range(4)] == [10, 10, 10, 3]
    datas = [config("parquet", tmp_path / name, tmp_path / "cache") for name in ("files", "groups")]
    ranks = run_ranks(2, walk, datas, timeout_seconds=60)
    for job, (count, steps) in enumerate(((30, 8), (33, 8))):
        walks = [rank[job] for rank in ranks]
        assert [len(seen.samples) for seen in walks] == [2 * steps, 2 * steps]
        for epoch in (slice(0, steps), slice(steps, None)):
            samples = [number for seen in walks for step in seen.samples[epoch] for number in step]
            assert Counter(samples) == Counter(range(count))
            assert sum(sum(seen.counts[epoch]) for seen in walks) == count
        for seen in walks:
            assert seen.ones == [[2.0, 2.0, 2.0]] * (2 * steps)
            assert seen.error == ""


# A12


def bad_dataset(root, form, broken, good=36):
    """Good images and bad ones of one class, the bad among the good. Returns the names of the bad ones."""
    images = [(f"{number:03d}.png", numbered(number)) for number in range(good)]
    for place, (name, body) in enumerate(broken.items()):
        images.insert(3 + 7 * place, (f"{3 + 7 * place:03d}-{name}", body))
    images = [(name if form == "parquet" else f"{i:03d}-{name}", body) for i, (name, body) in enumerate(images)]
    bad = [i for i, (_, body) in enumerate(images) if body in broken.values()]
    if form == "folder":
        write_folder(root / "train", [Sample("a", name, body) for name, body in images])
        write_folder(root / "val", [Sample("a", "0.png", numbered(0))])
        return [f"train/a/{images[i][0]}" for i in bad]
    write_parquet(root / "train/0.parquet", [body for _, body in images], [0] * len(images))
    write_parquet(root / "val/0.parquet", [numbered(0)], [0])
    return [f"train/0.parquet row {i}" for i in bad]


@pytest.mark.parametrize("form", ["folder", "parquet"])
@pytest.mark.parametrize("kind", ["empty.jpg", "cut.jpg", "text.jpg", "bomb.png"])
def test_a_bad_image_ends_a_strict_run_by_name(tmp_path, broken, form, kind):
    """A12."""
    (name,) = bad_dataset(tmp_path, form, {kind: broken[kind]}, good=7)
    seen = walk_one(Runtime(), config(form, tmp_path, tmp_path / "cache"))
    assert name in seen.error
    assert len(seen.samples) < 4


def test_bad_images_are_skipped_counted_once_and_listed_with_ranks_in_step(tmp_path, broken):
    """A12."""
    names = {form: bad_dataset(tmp_path / form, form, broken) for form in ("folder", "parquet")}
    assert {form: len(listed) for form, listed in names.items()} == {"folder": 4, "parquet": 4}
    datas = [
        config(form, tmp_path / form, tmp_path / "cache", on_bad_image="skip", max_bad_fraction=fraction)
        for form in ("folder", "parquet")
        for fraction in (0.1, 0.05)  # 4 of 40 are not above the first
    ]
    ranks = run_ranks(2, walk, datas, timeout_seconds=60)
    for job, data in enumerate(datas):
        first, second = (rank[job] for rank in ranks)
        expected = names[data.source]
        assert len(first.samples) == len(second.samples)
        assert first.bad == second.bad
        if data.max_bad_fraction == 0.05:
            assert first.error == second.error
            assert len(first.samples) < 20
            assert "max_bad_fraction" in first.error
            assert any(name in first.error for name in expected)
            continue
        assert first.error == ""
        assert len(first.samples) == 20
        listed = Counter(next(name for name in expected if name in told) for told, _ in first.bad)
        assert listed == Counter(expected)
        assert all(reason for _, reason in first.bad)
        for epoch in (slice(0, 10), slice(10, None)):
            samples = [number for seen in (first, second) for step in seen.samples[epoch] for number in step]
            assert Counter(samples) == Counter(range(36))
            assert sum(first.counts[epoch]) + sum(second.counts[epoch]) == 36


def test_bad_images_of_the_validation_set_are_skipped_and_counted(tmp_path, broken):
    write_folder(tmp_path / "train", [Sample("a", "0.png", numbered(0))])
    images = [(f"{i}.png", numbered(i)) for i in range(9)] + [(f"9-{name}", body) for name, body in broken.items()]
    write_folder(tmp_path / "val", [Sample("a", name, body) for name, body in images])
    data = config("folder", tmp_path, tmp_path / "cache", on_bad_image="skip", max_bad_fraction=0.5)
    source = open_sources(data).val
    bad = BadImages(13, 0.5)
    batches = [batch for rank in range(2) for batch in eval_batches(source, data, 3, rank, 2, 2, CPU, bad)]
    assert sorted(number for batch in batches for number in batch.images[batch.labels >= 0][:, 0, 0, 0].tolist()) == [
        *range(9)
    ]
    assert sum(batch.count for batch in batches) == 9
    assert sorted(found.name.rsplit("-", 1)[1] for found in bad.share(Runtime())) == sorted(broken)


# which samples, which labels


def test_hidden_folders_and_stray_files_shift_no_label_and_an_empty_class_is_refused(tmp_path):
    """B37."""
    for split in ("train", "val"):
        write_folder(tmp_path / split, [Sample(name, "0.png", numbered(0)) for name in ("a", "b")])
        write_folder(tmp_path / split, [Sample(".ipynb_checkpoints", "0.png", numbered(0))])
        write_folder(tmp_path / split, [Sample("a/.thumbnails", "0.png", numbered(0))])
        (tmp_path / split / "stray.png").write_bytes(numbered(0))
    (tmp_path / "stray.png").write_bytes(numbered(0))
    for split in ("train", "val"):
        (tmp_path / split / "empty").mkdir()
        if split == "val":
            write_folder(tmp_path / "train", [Sample("empty", "0.png", numbered(0))])
        with pytest.raises(DataError, match=f"{split}/empty"):
            open_dataset("folder", tmp_path, tmp_path / "cache")
        shutil.rmtree(tmp_path / "train/empty")
    (tmp_path / "val/empty").rmdir()
    for source in open_dataset("folder", tmp_path, tmp_path / "cache"):
        assert source.class_names == ("a", "b")
        assert source.labels.tolist() == [0, 1]


def test_a_class_with_files_but_no_images_is_empty(tmp_path):
    """B37."""
    write_folder(tmp_path / "train", [Sample("a", "0.png", numbered(0)), Sample("notes", "0.txt", b"no image")])
    write_folder(tmp_path / "val", [Sample("a", "0.png", numbered(0))])
    with pytest.raises(DataError, match="train/notes"):
        open_dataset("folder", tmp_path, tmp_path / "cache")


def test_images_are_found_in_nested_folders_and_behind_links(tmp_path):
    write_folder(tmp_path / "elsewhere", [Sample("x", "1.png", numbered(1)), Sample("x", "2.png", numbered(2))])
    write_folder(tmp_path / "train", [Sample("a/p/q", "3.png", numbered(3)), Sample("a/r", "4.JPEG", numbered(4))])
    (tmp_path / "train/a/5.png").symlink_to(tmp_path / "elsewhere/x/1.png")
    (tmp_path / "train/a/linked").symlink_to(tmp_path / "elsewhere/x")
    (tmp_path / "train/b").symlink_to(tmp_path / "elsewhere/x")
    write_folder(tmp_path / "validation", [Sample("b", "0.png", numbered(0))])
    train, val = open_dataset("folder", tmp_path, tmp_path / "cache")
    found = Counter((int(label), train.read(i)) for i, label in enumerate(train.labels))
    a, b = [1, 1, 2, 3, 4], [1, 2]
    assert found == Counter([(0, numbered(i)) for i in a] + [(1, numbered(i)) for i in b])
    assert val.labels.tolist() == [1]


def test_names_of_any_kind_are_kept_and_one_that_is_no_text_is_refused(tmp_path):
    samples = [Sample("ünï cödé, 'quoted\"", name, numbered(i)) for i, name in enumerate((" x.png", "new\nline.png"))]
    write_folder(tmp_path / "train", samples)
    write_folder(tmp_path / "val", samples)
    for _ in range(2):
        for source in open_dataset("folder", tmp_path, tmp_path / "cache"):
            assert source.class_names == (samples[0].label,)
            assert [source.read(i) for i in range(2)] == [numbered(0), numbered(1)]
    (tmp_path / "val" / samples[0].label / os.fsdecode(b"latin-\xe9.png")).write_bytes(numbered(9))
    with pytest.raises(DataError, match="latin-") as refused:
        open_dataset("folder", tmp_path, tmp_path / "cache")
    assert str(refused.value).encode()  # can be shown


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("train/x.parquet", "val/x.parquet"),
        ("train/deep/x.parquet", "validation/x.parquet"),
        ("train-00000-of-00001.parquet", "val-00000-of-00001.parquet"),
        ("data/train-0.parquet", "data/validation-0.parquet"),
        ("data/my_train.parquet", "data/my.validation.parquet"),
    ],
)
def test_the_files_of_a_set_are_found_by_folder_or_word(tmp_path, train, val):
    write_parquet(tmp_path / train, [numbered(1), numbered(2)], [0, 1])
    write_parquet(tmp_path / val, [numbered(3)], [0])
    write_parquet(tmp_path / "data/test-0.parquet", [numbered(5)], [0])
    sources = open_dataset("parquet", tmp_path, tmp_path / "cache")
    assert [bytes(sources.train.read(i)) for i in range(len(sources.train.labels))] == [numbered(1), numbered(2)]
    assert [bytes(sources.val.read(i)) for i in range(len(sources.val.labels))] == [numbered(3)]


def test_a_file_of_no_set_is_refused_by_name(tmp_path):
    write_parquet(tmp_path / "train-0.parquet", [numbered(1)], [0])
    write_parquet(tmp_path / "val-0.parquet", [numbered(1)], [0])
    write_parquet(tmp_path / "strained-interval.parquet", [numbered(4)], [0])
    with pytest.raises(DataError, match=r"strained-interval\.parquet belongs to no set"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")


def test_files_follow_one_another_in_the_order_of_their_names(tmp_path):
    for number in (2, 0, 1):
        write_parquet(tmp_path / f"train-{number}-of-3.parquet", [numbered(number)] * 2, [number, number])
    write_parquet(tmp_path / "val-0.parquet", [numbered(0)], [0])
    source = open_dataset("parquet", tmp_path, tmp_path / "cache").train
    assert source.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert [bytes(source.read(i)) for i in range(6)] == [numbered(i // 2) for i in range(6)]


def test_files_without_a_set_are_refused(tmp_path):
    write_parquet(tmp_path / "data.parquet", [numbered(0)], [0])
    with pytest.raises(DataError, match=f"{tmp_path}.*train"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")
    with pytest.raises(DataError, match=f"{tmp_path}.*train"):
        open_dataset("webdataset", tmp_path, tmp_path / "cache")
    write_parquet(tmp_path / "train.parquet", [numbered(0)], [0])
    with pytest.raises(DataError, match=f"{tmp_path}.*val"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")


def test_columns_are_found_by_their_kind_or_named(tmp_path):
    for split in ("train", "val"):
        columns = {
            "id": pa.array([7, 8]),
            "picture": pa.array([numbered(1), numbered(2)], pa.large_binary()),
            "thumb": pa.array([numbered(3), numbered(4)], pa.binary()),
            "kind": ["x", "y"],
            "more": ["y", "x"],
        }
        (tmp_path / split).mkdir()
        pq.write_table(pa.table(columns), tmp_path / split / "0.parquet")
    with pytest.raises(DataError, match=r"train/0\.parquet.*(picture|image_column)"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")
    for image, label, first, order in (("picture", "kind", 1, [0, 1]), ("thumb", "more", 3, [1, 0])):
        sources = open_dataset("parquet", tmp_path, tmp_path / "cache", image_column=image, label_column=label)
        for source in sources:
            assert source.class_names == ("x", "y")
            assert source.labels.tolist() == order
            assert [bytes(source.read(i)) for i in range(2)] == [numbered(first), numbered(first + 1)]
    for keys in ({"image_column": "photo"}, {"image_column": "picture", "label_column": "photo"}):
        with pytest.raises(DataError, match=r"train/0\.parquet.*photo"):
            open_dataset("parquet", tmp_path, tmp_path / "cache", **keys)


def test_files_with_another_schema_are_refused_by_name(tmp_path):
    write_parquet(tmp_path / "train/0.parquet", [numbered(0)], [0])
    write_parquet(tmp_path / "train/1.parquet", [numbered(0)], ["0"])
    write_parquet(tmp_path / "val/0.parquet", [numbered(0)], [0])
    with pytest.raises(DataError, match=r"train/1\.parquet"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["empty", "text", "cut"])
@pytest.mark.parametrize("source", ["parquet", "webdataset"])
def test_a_file_that_is_none_of_its_kind_is_refused_by_name(tmp_path, source, kind):
    suffix = "parquet" if source == "parquet" else "tar"
    samples = [Sample("a", f"{i}.jpg", encoded(piece(i))) for i in range(20)]
    for split in ("train", "val"):
        write_parquet(tmp_path / f"{split}-1.parquet", [sample.encoded for sample in samples], [0] * 20)
        sample_tar(tmp_path / f"{split}-1.tar", samples, ["a"])
        shutil.copy(tmp_path / f"{split}-1.{suffix}", tmp_path / f"{split}-0.{suffix}")
    path = tmp_path / f"train-1.{suffix}"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"no such thing\n" * 100, "cut": whole[: len(whole) // 2]}[kind])
    with pytest.raises(DataError, match=rf"train-1\.{suffix}"):
        open_dataset(source, tmp_path, tmp_path / "cache")
    path.write_bytes(whole)
    assert len(open_dataset(source, tmp_path, tmp_path / "cache").train.labels) == 40


# B39


@pytest.mark.parametrize("names", [None, ("x", "y", "z")])
@pytest.mark.parametrize(
    ("labels", "row", "value"),
    [([1, 2, 3], 2, "3"), ([0, 1, 2, -1], 3, "-1"), ([0, 1, None, 2], 2, "null"), ([0, -100, 1, 2], 1, "-100")],
)
def test_a_wrong_label_is_named_with_file_and_row_before_the_first_step(tmp_path, labels, row, value, names):
    """B39."""
    with pytest.raises(DataError, match=rf"train/0\.parquet.* row {row}\b.*{value}\b"):
        open_dataset("parquet", parquet_dataset(tmp_path, labels, names), tmp_path / "cache")


def test_a_wrong_label_is_found_in_a_later_file_and_row_group(tmp_path):
    """B39."""
    parquet_dataset(tmp_path, [0, 1, 2])
    write_parquet(tmp_path / "train/1.parquet", [numbered(i) for i in range(50)], [1] * 47 + [-1, 1, 1], None, 10)
    with pytest.raises(DataError, match=r"train/1\.parquet.* row 47\b.*-1\b"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("names", [None, ("x", "y", "z")])
@pytest.mark.parametrize(("label", "value"), [(3, "3"), (-1, "-1"), (None, "null")])
def test_a_wrong_label_of_the_validation_set_is_named_with_file_and_row(tmp_path, label, value, names):
    """B39."""
    with pytest.raises(DataError, match=rf"val/0\.parquet.* row 1\b.*{value}\b"):
        open_dataset("parquet", parquet_dataset(tmp_path, [0, 1, 2], names, val=(0, label)), tmp_path / "cache")


def test_labels_with_a_gap_are_refused(tmp_path):
    """B39."""
    with pytest.raises(DataError, match=r"train/0\.parquet.* row 3\b.*\b4\b"):
        open_dataset("parquet", parquet_dataset(tmp_path, [0, 1, 2, 4]), tmp_path / "cache")


def test_names_from_the_schema_count_where_not_all_labels_occur(tmp_path):
    """B39."""
    sources = open_dataset("parquet", parquet_dataset(tmp_path, [2, 0], ("x", "y", "z")), tmp_path / "cache")
    assert sources.train.class_names == ("x", "y", "z")
    assert sources.train.labels.tolist() == [2, 0]


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int32(), pa.uint64()])
def test_labels_of_any_integer_kind_are_taken(tmp_path, kind):
    sources = open_dataset("parquet", parquet_dataset(tmp_path, pa.array([1, 0, 1], kind)), tmp_path / "cache")
    assert sources.train.labels.tolist() == [1, 0, 1]
    assert sources.train.labels.dtype == np.int64


@pytest.mark.parametrize("dictionary", [False, True])
def test_string_labels_become_sorted_classes(tmp_path, dictionary):
    labels = pa.array(["b", "a10", "a2", "b"])
    labels = labels.dictionary_encode() if dictionary else labels
    train, val = open_dataset("parquet", parquet_dataset(tmp_path, labels, val=("b",)), tmp_path / "cache")
    assert train.class_names == val.class_names == ("a10", "a2", "b")
    assert train.labels.tolist() == [2, 0, 1, 2]
    assert val.labels.tolist() == [2]


def test_a_string_label_that_is_null_or_unknown_is_named_with_file_and_row(tmp_path):
    """B39."""
    with pytest.raises(DataError, match=r"train/0\.parquet.* row 1\b.*null"):
        open_dataset("parquet", parquet_dataset(tmp_path / "null", ["a", None], val=("a",)), tmp_path / "cache")
    with pytest.raises(DataError, match=r"val/0\.parquet.* row 1\b.*\bc\b"):
        open_dataset("parquet", parquet_dataset(tmp_path / "c", ["a", "b"], val=("a", "c")), tmp_path / "cache")


def test_integers_in_a_dictionary_are_labels_like_others(tmp_path):
    """As pandas writes a categorical column."""
    labels = pa.array([2, 0, 1, 2]).dictionary_encode()
    train, val = open_dataset("parquet", parquet_dataset(tmp_path, labels), tmp_path / "cache")
    assert train.class_names == val.class_names == ("0", "1", "2")
    assert (train.labels.tolist(), val.labels.tolist()) == ([2, 0, 1, 2], [0])


def test_ten_classes_and_more_keep_the_order_of_their_numbers(tmp_path):
    dataset = parquet_dataset(tmp_path, list(range(12)), val=(11, 2))
    train, val = open_dataset("parquet", dataset, tmp_path / "cache")
    assert train.class_names == tuple(str(number) for number in range(12))
    assert (train.labels.tolist(), val.labels.tolist()) == (list(range(12)), [11, 2])


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("source", ["parquet", "webdataset"])
def test_a_set_without_rows_is_refused_and_a_file_without_rows_is_passed_over(tmp_path, source, split):
    def write(name, count):
        if source == "parquet":
            images = [numbered(i) for i in range(count)]
            write_parquet(tmp_path / f"{name}.parquet", images, pa.array([0] * count, pa.int64()))
        else:
            sample_tar(tmp_path / f"{name}.tar", [Sample("a", "x.png", numbered(i)) for i in range(count)], ["a"])

    write("train-0", 2)
    write("val-0", 2)
    write(f"{split}-0", 0)
    with pytest.raises(DataError, match=split):
        open_dataset(source, tmp_path, tmp_path / "cache")
    write(f"{split}-1", 3)
    sources = open_dataset(source, tmp_path, tmp_path / "cache")
    assert len(getattr(sources, split).labels) == 3


def test_names_in_another_order_in_the_validation_set_do_not_shift_labels(tmp_path):
    """B39."""
    write_parquet(tmp_path / "train/0.parquet", [numbered(0), numbered(1)], [0, 1], ("x", "y"))
    write_parquet(tmp_path / "val/0.parquet", [numbered(0), numbered(1)], [0, 1], ("y", "x"))
    train, val = open_dataset("parquet", tmp_path, tmp_path / "cache")
    assert train.class_names == val.class_names == ("x", "y")
    assert val.labels.tolist() == [1, 0]


def test_files_of_one_set_that_name_classes_otherwise_are_refused(tmp_path):
    """B39."""
    write_parquet(tmp_path / "train/0.parquet", [numbered(0), numbered(1)], [0, 1], ("x", "y"))
    write_parquet(tmp_path / "train/1.parquet", [numbered(0), numbered(1)], [0, 1], ("y", "x"))
    write_parquet(tmp_path / "val/0.parquet", [numbered(0)], [0], ("x", "y"))
    with pytest.raises(DataError, match=r"train/1\.parquet"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")


def test_sets_prepared_one_by_one_have_the_labels_of_the_training_set(tmp_path):
    """A01: the validation set lacks a class, and was numbered without it."""
    write_folder(tmp_path / "src/train", [Sample(name, "0.png", numbered(0)) for name in "abc"])
    write_folder(tmp_path / "src/val", [Sample(name, "0.png", numbered(0)) for name in "ac"])
    for split in ("train", "val"):
        assert prepare([str(tmp_path / "src" / split), str(tmp_path / "dst" / split), "--workers", "1"]) == 0
    train, val = open_dataset("arrow", tmp_path / "dst", tmp_path / "cache")
    assert train.class_names == val.class_names == ("a", "b", "c")
    assert val.labels.tolist() == [0, 2]


def tar_dataset(root, labels, classnames=None, val=(0,)):
    for split, given in (("train", labels), ("val", val)):
        members = {}
        for i, label in enumerate(given):
            members[f"key{i}.png"] = numbered(i)
            if label is not None:
                members[f"key{i}.cls"] = str(label).encode()
        write_tar(root / split / "0.tar", members)
    if classnames is not None:
        (root / "classnames.txt").write_text("\n".join(classnames))
    return root


@pytest.mark.parametrize("names", [None, ("x", "y", "z")])
@pytest.mark.parametrize(
    ("labels", "key", "value"),
    [
        ([1, 2, 3], "key2", "3"),
        ([0, 1, 2, -1], "key3", "-1"),
        ([0, 1, None, 2], "key2", "cls"),
        ([0, -100, 1, 2], "key1", "-100"),
        ([0, 1, "cat", 2], "key2", "cat"),
        ([0, 1, "1.5", 2], "key2", r"1\.5"),
        ([0, 1, "", 2], "key2", "label ''"),
    ],
)
def test_a_wrong_label_of_a_tar_is_named_with_file_and_key(tmp_path, labels, key, value, names):
    """B39."""
    with pytest.raises(DataError, match=rf"train/0\.tar.*\b{key}\b.*{value}"):
        open_dataset("webdataset", tar_dataset(tmp_path, labels, names), tmp_path / "cache")


def test_a_wrong_label_of_a_tar_of_the_validation_set_is_named_with_file_and_key(tmp_path):
    """B39."""
    with pytest.raises(DataError, match=r"val/0\.tar.*\bkey1\b.*2"):
        open_dataset("webdataset", tar_dataset(tmp_path, [0, 1], val=(0, 2)), tmp_path / "cache")


def test_tar_labels_may_be_names_that_classnames_lists(tmp_path):
    tar_dataset(tmp_path, ["dog", "wild cat", "dog\n"], ("wild cat", "dog", "emu"), val=("emu",))
    train, val = open_dataset("webdataset", tmp_path, tmp_path / "cache")
    assert train.class_names == val.class_names == ("wild cat", "dog", "emu")
    assert train.labels.tolist() == [1, 0, 1]
    assert val.labels.tolist() == [2]


def test_tar_members_form_samples_by_key_in_any_order(tmp_path):
    members = {
        "./b/0.cls": b"1",
        "./b/0.png": numbered(1),
        "b/1.json": b"{}",
        "b/1.PNG": numbered(2),
        "b/1.cls": b"0\n",
        "b/long" + "g" * 150 + ".jpeg": numbered(3),
        "b/long" + "g" * 150 + ".cls": b" 1 ",
        "README.txt": b"no sample",
    }
    for split in ("train", "val"):
        write_tar(tmp_path / f"x-{split}-0.tar", members)
    source = open_dataset("webdataset", tmp_path, tmp_path / "cache").train
    assert source.labels.tolist() == [1, 0, 1]
    assert [bytes(source.read(i)) for i in range(3)] == [numbered(1), numbered(2), numbered(3)]


def test_tar_members_of_a_sample_that_lie_apart_are_joined_or_refused(tmp_path):
    """As `tar cf x.tar *.png *.cls` writes them."""
    members = {f"{i}.png": numbered(i) for i in range(3)} | {f"{i}.cls": str(i).encode() for i in (2, 0, 1)}
    for split in ("train", "val"):
        write_tar(tmp_path / f"{split}.tar", members)
    try:
        source = open_dataset("webdataset", tmp_path, tmp_path / "cache").train
    except DataError as error:
        assert "train.tar" in str(error)  # noqa: PT017
    else:
        found = {bytes(source.read(i)): label for i, label in enumerate(source.labels.tolist())}
        assert found == {numbered(i): i for i in range(3)}


def test_a_tar_sample_without_an_image_is_refused_by_name(tmp_path):
    write_tar(tmp_path / "train.tar", {"0.png": numbered(0), "0.cls": b"0", "1.cls": b"1", "2.png": numbered(2)})
    write_tar(tmp_path / "val.tar", {"0.png": numbered(0), "0.cls": b"0"})
    with pytest.raises(DataError, match=r"train\.tar.*\b[12]\b"):
        open_dataset("webdataset", tmp_path, tmp_path / "cache")


# B41


def test_files_may_hold_images_in_both_ways(tmp_path):
    """B41."""
    write_parquet(tmp_path / "train/0.parquet", [numbered(0), numbered(1)], pa.array([0, 1], pa.int32()))
    write_parquet(tmp_path / "train/1.parquet", [numbered(2), None], [0, 1], struct_paths=[None, "x.png"])
    (tmp_path / "train/x.png").write_bytes(numbered(3))
    write_parquet(tmp_path / "val/0.parquet", [numbered(4)], [0], struct_paths=["x.png"])
    try:
        train, val = open_dataset("parquet", tmp_path, tmp_path / "cache")
    except DataError as error:
        assert "train/1.parquet" in str(error)  # noqa: PT017
    else:
        assert [bytes(train.read(i)) for i in range(4)] == [numbered(i) for i in range(4)]
        assert bytes(val.read(0)) == numbered(4)


def test_struct_rows_are_the_pixels_of_a_plain_column(tmp_path):
    """B41."""
    images = [encoded(piece(i)) for i in range(6)]
    for split in ("train", "val"):
        write_parquet(tmp_path / f"plain/{split}/0.parquet", images, [0] * 6)
        rows, names = list(images), [f"{i}.jpg" for i in range(6)]
        rows[2], names[2] = None, "images/two.jpg"
        write_parquet(tmp_path / f"struct/{split}/0.parquet", rows, [0] * 6, struct_paths=names)
        (tmp_path / f"struct/{split}/images").mkdir()
        (tmp_path / f"struct/{split}/images/two.jpg").write_bytes(images[2])
    plain, struct = (open_dataset("parquet", tmp_path / kind, tmp_path / "cache") for kind in ("plain", "struct"))
    for expected, got in zip(plain, struct, strict=True):
        for i in range(6):
            assert (decode(got.read(i), str) == decode(expected.read(i), str)).all()
            assert (decode(got.read(i), str) == pixels_of(images[i])).all()


@pytest.mark.parametrize("row", [{"bytes": None, "path": None}, None])
def test_a_struct_row_without_image_is_a_bad_image(tmp_path, row):
    """B41."""
    rows = [{"bytes": numbered(i), "path": None} for i in range(12)]
    rows[5] = row
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for split, given in (("train", rows), ("val", rows[:2])):
        (tmp_path / split).mkdir()
        table = pa.table({"image": pa.array(given, kind), "label": [0] * len(given)})
        pq.write_table(table, tmp_path / split / "0.parquet")
    strict = walk_one(Runtime(), config("parquet", tmp_path, tmp_path / "cache"))
    assert "train/0.parquet row 5" in strict.error
    data = config("parquet", tmp_path, tmp_path / "cache", on_bad_image="skip", max_bad_fraction=0.1)
    lenient = walk_one(Runtime(), data)
    assert Counter(number for step in lenient.samples for number in step) == {i: 2 for i in range(12) if i != 5}
    assert ["train/0.parquet row 5" in name for name, _ in lenient.bad] == [True]


def test_a_path_to_nothing_is_refused_and_found_again_when_it_is_there(tmp_path):
    """B41."""
    for split in ("train", "val"):
        path = tmp_path / split / "0.parquet"
        write_parquet(path, [numbered(0), None], [0, 0], struct_paths=["0.png", "gone.png"])
    (tmp_path / "train/gone.png").write_bytes(numbered(7))
    with pytest.raises(DataError, match=r"val/gone\.png"):
        open_dataset("parquet", tmp_path, tmp_path / "cache")
    (tmp_path / "val/gone.png").write_bytes(numbered(8))
    assert bytes(open_dataset("parquet", tmp_path, tmp_path / "cache").val.read(1)) == numbered(8)


def test_a_null_in_a_plain_column_is_a_bad_image(tmp_path):
    """B41."""
    write_parquet(tmp_path / "train/0.parquet", [numbered(0), None, numbered(2)], [0, 0, 0])
    write_parquet(tmp_path / "val/0.parquet", [numbered(0)], [0])
    assert "train/0.parquet row 1" in walk_one(Runtime(), config("parquet", tmp_path, tmp_path / "cache")).error


# B43, B49


def test_an_epoch_has_each_id_once_with_crops_of_its_own_for_any_ranks_and_threads(tmp_path):
    """B43, B49."""
    photo = encoded(piece(0, 60, 60))
    write_parquet(tmp_path / "train/0.parquet", [photo] * 15, list(range(15)))
    write_parquet(tmp_path / "train/1.parquet", [photo] * 25, list(range(15, 40)), row_group_size=10)
    write_parquet(tmp_path / "val/0.parquet", [photo], [0])
    data = config(
        "parquet", tmp_path, tmp_path / "cache", train_crop="random_resized", crop_scale=(0.2, 0.9), image_size=16
    )
    source = open_sources(data).train
    plan = make_plan(Train(global_batch_size=8, micro_batch_size=2, epochs=3), 40)

    def trace(seed, world_size, threads):
        """For each epoch: the ids and the pixels, in order of step and micro-batch, and the ids of each rank."""
        ranks = [
            list(train_batches(source, data, plan, seed, rank, world_size, 0, threads, CPU))
            for rank in range(world_size)
        ]
        epochs = []
        for epoch in range(3):
            steps = [own[epoch * 5 : epoch * 5 + 5] for own in ranks]
            of_rank = [[i for part in own for batch in part.batches for i in batch.labels.tolist()] for own in steps]
            parts = [batch for step in zip(*steps, strict=True) for part in step for batch in part.batches]
            ids = [i for batch in parts for i in batch.labels.tolist()]
            pixels = [image.numpy().tobytes() for batch in parts for image in batch.images]
            epochs.append((ids, pixels, of_rank))
        return epochs

    alone = trace(0, 1, 1)
    assert len({pixels for epoch in alone for pixels in epoch[1]}) == 120
    assert len({tuple(epoch[0]) for epoch in alone}) == 3
    for world_size in (1, 2, 3):
        for threads in (1, 3):
            epochs = trace(0, world_size, threads)
            for expected, (ids, pixels, of_rank) in zip(alone, epochs, strict=True):
                assert Counter(i for own in of_rank for i in own) == Counter(range(40))
                assert ids == expected[0]
                assert pixels == expected[1]
    other = trace(1, 2, 3)
    assert [epoch[0] for epoch in other] != [epoch[0] for epoch in alone]
    assert not {pixels for epoch in other for pixels in epoch[1]} & {pixels for epoch in alone for pixels in epoch[1]}


# B44, B45

OPEN = """
import hashlib, sys
from pathlib import Path
from raytrain.config import Data
from raytrain.data.source import open_sources

def peak():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0]) // 1024

path, cache, go = sys.argv[1:]
loaded = peak()
while not Path(go).exists():
    pass
sources = open_sources(Data(source="parquet", path=path, cache_path=cache, image_size=8))
last = len(sources.train.labels) - 1
print(last + 1, hashlib.sha256(bytes(sources.train.read(last))).hexdigest())
print(peak() - loaded)
"""


def open_elsewhere(path, cache, go="/"):
    """A process that opens a dataset of Parquet and prints what it found, and how far memory rose for it, in MiB."""
    command = [sys.executable, "-c", OPEN, str(path), str(cache), str(go)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@contextmanager
def ended(process):
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(met, seconds=60):
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def test_a_large_row_group_is_read_in_slices_and_again_after_a_kill(tmp_path):
    """B44."""
    head = encoded(piece(0))
    random = np.random.default_rng(0)
    images = [head + random.bytes(100_000) for _ in range(3000)]
    write_parquet(tmp_path / "train/0.parquet", images, [i % 2 for i in range(3000)])
    write_parquet(tmp_path / "val/0.parquet", [head], [0])
    assert pq.ParquetFile(tmp_path / "train/0.parquet").num_row_groups == 1
    expected = hashlib.sha256(images[-1]).hexdigest()
    del images
    cache = tmp_path / "cache"
    with ended(open_elsewhere(tmp_path, cache)) as process:
        wait_until(lambda: sum(path.stat().st_size for path in cache.rglob("*.*") if path.is_file()) > 20_000_000)
        process.kill()
        process.wait()
    with ended(open_elsewhere(tmp_path, cache)) as process:
        out, err = process.communicate(timeout=120)
        assert err == ""
        found, growth = out.splitlines()
        assert found == f"3000 {expected}"
        assert int(growth) < 600  # pyarrow makes pages of 1024 rows, and holds three of these 100 MiB at once
    kept = [path for path in (cache / "datasets").iterdir() if path.is_dir()]
    assert len(kept) == 2  # nothing is left of the killed one
    assert sum(path.stat().st_size for folder in kept for path in folder.iterdir()) < 310_000_000


@SLOW
def test_a_row_group_of_structs_above_2_gib_is_read_whole(tmp_path):
    """B45."""
    head = encoded(piece(0))
    (tmp_path / "train").mkdir()
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({"image": kind, "label": pa.int64()})
    body = np.random.default_rng(0).bytes(3_700_000)
    chunks = [pa.array([{"bytes": head + i.to_bytes(4, "big") + body, "path": f"{i}.jpg"}], kind) for i in range(600)]
    table = pa.table({"image": pa.chunked_array(chunks), "label": pa.array([i % 2 for i in range(600)])}, schema)
    with pq.ParquetWriter(tmp_path / "train/0.parquet", schema, use_dictionary=False) as writer:
        writer.write_table(table, row_group_size=600)
    del table, chunks
    metadata = pq.ParquetFile(tmp_path / "train/0.parquet").metadata
    assert metadata.num_row_groups == 1
    assert metadata.row_group(0).total_byte_size > 2**31
    write_parquet(tmp_path / "val/0.parquet", [head], [0], struct_paths=["x.jpg"])
    source = open_dataset("parquet", tmp_path, tmp_path / "cache").train
    assert source.labels.tolist() == [i % 2 for i in range(600)]
    for i in range(600):
        assert bytes(source.read(i)) == head + i.to_bytes(4, "big") + body


# B47


def _read_all(source, number, folder):
    """Twice, as two epochs would."""
    (folder / str(number)).write_text(f"{held_by(source)} {held_by(source)}")


@pytest.mark.parametrize("form", ["folder", "arrow", "plain", "tar"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_source_is_read_after_a_fork_and_after_pickling(forms, tmp_path, form):
    """B47."""
    source = open_dataset(*forms[0][form], forms[1]).train
    expected = held_by(source)
    assert held_by(pickle.loads(pickle.dumps(source))) == expected
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_read_all, args=(source, number, tmp_path)) for number in range(2)]
    for child in children:
        child.start()
    for number, child in enumerate(children):
        child.join(60)
        assert child.exitcode == 0
        assert (tmp_path / str(number)).read_text() == f"{expected} {expected}"
    assert held_by(source) == expected


def test_sources_are_read_in_a_spawned_process(forms, tmp_path):
    """B47."""
    sources = [open_dataset(*forms[0][form], forms[1]).train for form in FORMS]
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=_read_each, args=(sources, tmp_path))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    for number, source in enumerate(sources):
        expected = held_by(source)
        assert (tmp_path / str(number)).read_text() == f"{expected} {expected}"


def _read_each(sources, folder):
    for number, source in enumerate(sources):
        _read_all(source, number, folder)


# C65


def _resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_2000_decodes_of_a_broken_jpeg_take_no_memory():
    """C65."""
    whole = encoded(piece(0, 200, 200))
    progressive = encoded(piece(0, 200, 200), progressive=True)
    middle = len(whole) // 2
    broken = [
        whole[:middle],
        whole[:middle] + b"\xff\xc4\xff\xff" + whole[middle + 4 :],
        whole[:100] + bytes(200) + whole[300:],
        progressive[: len(progressive) // 2],
    ]
    for image in broken:
        for decodes in (100, 2000):  # the first to warm up
            before = _resident_mib()
            for _ in range(decodes):
                try:
                    decode(image, lambda: "x")
                except DataError:
                    continue
        assert _resident_mib() - before < 50


# the cache


def datasets_in(cache):
    return sorted(path.name for path in (cache / "datasets").iterdir() if path.is_dir())


def test_processes_that_open_at_once_convert_once_and_read_the_same(tmp_path):
    images = [encoded(piece(i)) + bytes(200_000) for i in range(200)]
    write_parquet(tmp_path / "train/0.parquet", images, [i % 2 for i in range(200)])
    write_parquet(tmp_path / "val/0.parquet", images[:2], [0, 1])
    with (
        ended(open_elsewhere(tmp_path, tmp_path / "cache", tmp_path / "go")) as one,
        ended(open_elsewhere(tmp_path, tmp_path / "cache", tmp_path / "go")) as two,
    ):
        time.sleep(3)  # both have loaded torch
        (tmp_path / "go").touch()
        answers = [process.communicate(timeout=150) for process in (one, two)]
    for out, err in answers:
        assert err == ""
        assert out.splitlines()[0] == f"200 {hashlib.sha256(images[-1]).hexdigest()}"
    assert len(datasets_in(tmp_path / "cache")) == 2  # train and val
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
    source = open_dataset("parquet", tmp_path, tmp_path / "cache").train
    assert [bytes(source.read(i)) for i in (0, 99, 199)] == [images[0], images[99], images[199]]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")} == before


def _open_and_meet(runtime, paths, cache):
    """What ranks do: each opens the data at once with the others, and keeps it open."""
    held = []
    for path in paths:
        runtime.barrier()
        held.append(open_dataset("parquet", path, cache))
    runtime.barrier()
    return [held_by(source) for sources in held for source in sources]


def test_ranks_of_one_node_that_open_at_once_do_not_wait_for_one_another_for_ever(tmp_path):
    paths = [tmp_path / str(number) for number in range(12)]
    for number, path in enumerate(paths):
        parquet_dataset(path, [0] * (number + 2))
    first, second = run_ranks(2, _open_and_meet, paths, tmp_path / "cache", timeout_seconds=20)
    assert first == second
    assert len(datasets_in(tmp_path / "cache")) == 24


@pytest.mark.parametrize("source", ["parquet", "webdataset"])
def test_a_file_that_changed_or_came_is_noticed(tmp_path, source):
    def write(number, colours):
        if source == "parquet":
            write_parquet(tmp_path / f"train-{number}.parquet", [numbered(c) for c in colours], [0] * len(colours))
        else:
            samples = [Sample("a", "x.png", numbered(c)) for c in colours]
            sample_tar(tmp_path / f"train-{number}.tar", samples, ["a"])

    def held():
        train = open_dataset(source, tmp_path, tmp_path / "cache").train
        return [bytes(train.read(i)) for i in range(len(train.labels))]

    write_parquet(tmp_path / "val-0.parquet", [numbered(0)], [0])
    sample_tar(tmp_path / "val-0.tar", [Sample("a", "x.png", numbered(0))], ["a"])
    write(0, [1, 2])
    assert held() == [numbered(1), numbered(2)]
    suffix = "parquet" if source == "parquet" else "tar"
    size = (tmp_path / f"train-0.{suffix}").stat().st_size
    write(0, [4, 3])
    assert (tmp_path / f"train-0.{suffix}").stat().st_size == size  # only its time tells
    assert held() == [numbered(4), numbered(3)]
    write(1, [5])
    assert held() == [numbered(4), numbered(3), numbered(5)]
    (tmp_path / f"train-0.{suffix}").unlink()
    assert held() == [numbered(5)]


def test_changed_class_names_of_tars_are_noticed(tmp_path):
    tar_dataset(tmp_path, ["x", "y"], ("x", "y"), val=("x",))
    assert open_dataset("webdataset", tmp_path, tmp_path / "cache").train.labels.tolist() == [0, 1]
    (tmp_path / "classnames.txt").write_text("y\nx\n")
    train, val = open_dataset("webdataset", tmp_path, tmp_path / "cache")
    assert train.class_names == ("y", "x")
    assert (train.labels.tolist(), val.labels.tolist()) == ([1, 0], [1])


def megabyte_dataset(root, seed):
    random = np.random.default_rng(seed)
    images = [encoded(piece(i)) + random.bytes(100_000) for i in range(10)]
    write_parquet(root / "train/0.parquet", images, [0] * 10)
    write_parquet(root / "val/0.parquet", images[:1], [0])
    return root


def test_a_cache_too_small_is_refused_with_what_it_would_take(tmp_path):
    megabyte_dataset(tmp_path, 0)
    with pytest.raises(DataError, match=r"cache_gib"):
        open_dataset("parquet", tmp_path, tmp_path / "cache", cache_gib=0.0005)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.arrow")) < 0.0005 * 2**30
    assert len(open_dataset("parquet", tmp_path, tmp_path / "cache", cache_gib=0.0012).train.labels) == 10


def large_datasets(cache):
    """Those of more than a validation set."""
    return {path.parent.name for path in (cache / "datasets").glob("*/*.arrow") if path.stat().st_size > 500_000}


def test_the_dataset_used_longest_ago_makes_room_and_one_in_use_stays(tmp_path):
    first, second, third = (megabyte_dataset(tmp_path / str(i), i) for i in range(3))
    cache, room = tmp_path / "cache", 0.0024  # two of them
    expected = held_by(open_dataset("parquet", first, cache).train)
    (of_first,) = large_datasets(cache)
    open_dataset("parquet", second, cache)
    gc.collect()
    held = open_dataset("parquet", first, cache)  # second was used before it, and is not in use
    open_dataset("parquet", third, cache, cache_gib=room)
    gc.collect()
    assert len(large_datasets(cache)) == 2
    assert of_first in large_datasets(cache)
    assert held_by(held.train) == expected
    also_held = open_dataset("parquet", third, cache)
    with pytest.raises(DataError, match=r"cache_gib"):
        open_dataset("parquet", second, cache, cache_gib=room)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    assert held_by(held.train) == held_by(open_dataset("parquet", first, cache).train) == expected
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")} == before  # it was there still
    del held, also_held
    gc.collect()
    assert len(open_dataset("parquet", second, cache, cache_gib=room).train.labels) == 10
    assert sum(path.stat().st_size for path in cache.rglob("*.arrow")) < room * 2**30


def test_a_pickled_copy_of_a_source_outlives_its_place_in_the_cache(tmp_path):
    first, second = (megabyte_dataset(tmp_path / str(i), i) for i in range(2))
    source = open_dataset("parquet", first, tmp_path / "cache").train
    expected, copy = held_by(source), pickle.loads(pickle.dumps(source))
    del source
    gc.collect()
    with suppress(DataError):
        open_dataset("parquet", second, tmp_path / "cache", cache_gib=0.0013)
    assert held_by(copy) == expected


def test_a_dataset_whose_making_failed_can_be_made_while_the_error_is_kept(tmp_path):
    """A notebook keeps the last error, and with it all that its frames hold."""
    megabyte_dataset(tmp_path, 0)
    (tmp_path / "cache").mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))  # as a full disk does
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(DataError, match=r"cannot write") as kept:
            open_dataset("parquet", tmp_path, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, before)
    assert len(open_dataset("parquet", tmp_path, tmp_path / "cache").train.labels) == 10
    assert kept.value.args


def test_a_cached_shard_cut_short_is_named_or_made_again(tmp_path):
    megabyte_dataset(tmp_path, 0)
    expected = held_by(open_dataset("parquet", tmp_path, tmp_path / "cache").train)
    gc.collect()
    shard = max((tmp_path / "cache/datasets").rglob("*.arrow"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:500_000])
    try:
        assert held_by(open_dataset("parquet", tmp_path, tmp_path / "cache").train) == expected
    except DataError as error:
        assert shard.name in str(error)  # noqa: PT017


# a folder's listing

LISTED = []


def _hook(event, args):
    if LISTED and event in ("os.scandir", "os.listdir"):
        LISTED.append(os.fspath(args[0]) if args[0] is not None else ".")


sys.addaudithook(_hook)  # sees every listing of a directory by Python, whoever asks


@contextmanager
def listings(root):
    """The directories under `root` that are listed in the block."""
    LISTED[:] = ["on"]
    found = []
    try:
        yield found
    finally:
        found += [str(path) for path in LISTED[1:] if str(path).startswith(str(root))]
        LISTED.clear()


@pytest.fixture
def listed_folder(tmp_path):
    """A folder whose directories were changed last an hour ago."""
    samples = [Sample(name, f"{i}.png", numbered(i)) for name in ("a", "a/deep/er", "b") for i in range(4)]
    for split in ("train", "val"):
        write_folder(tmp_path / "data" / split, samples)
    hour_ago = time.time() - 3600
    for path in (tmp_path / "data").rglob("*"):
        os.utime(path, (hour_ago, hour_ago))
    return tmp_path / "data"


def held_in_folder(root):
    found = []
    for source in open_dataset("folder", root, root.parent / "cache"):
        names = [source.class_names[label] for label in source.labels]
        files = [source.name(i).split(f"/{root.name}/")[1] for i in range(len(names))]
        found.append([(name, file) for name, file in zip(names, files, strict=True)])
        assert all(Path(root, file).read_bytes() == source.read(i) for i, file in enumerate(files))
    return found


def files_of(root):
    """What `held_in_folder` should be."""
    return [
        sorted(
            (path.relative_to(root / split).parts[0], str(path.relative_to(root)))
            for path in (root / split).rglob("*.png")
        )
        for split in ("train", "val")
    ]


def test_a_folder_is_listed_once(listed_folder):
    with listings(listed_folder) as first:
        expected = held_in_folder(listed_folder)
    assert {str(listed_folder / "train/a/deep/er"), str(listed_folder / "val/b")} <= set(first)
    assert [sorted(found) for found in expected] == files_of(listed_folder)
    with listings(listed_folder) as second:
        assert held_in_folder(listed_folder) == expected
    assert second == []


def _add(root):
    (root / "train/a/9.png").write_bytes(numbered(9))


def _add_deep(root):
    (root / "val/a/deep/er/9.png").write_bytes(numbered(9))


def _add_deeper(root):
    write_folder(root / "train", [Sample("a/deep/er/est", "9.png", numbered(9))])


def _remove(root):
    (root / "train/b/2.png").unlink()


def _remove_deep(root):
    shutil.rmtree(root / "train/a/deep")


def _rename(root):
    (root / "train/b/2.png").rename(root / "train/b/0000.png")


def _add_class(root):
    write_folder(root / "train", [Sample("aa", "9.png", numbered(9))])


def _remove_class(root):
    for split in ("train", "val"):
        shutil.rmtree(root / split / "a")


def _move_to_another_class(root):
    (root / "train/a/1.png").rename(root / "train/b/moved.png")


def _swap_classes(root):
    (root / "train/a").rename(root / "train/c")
    (root / "train/b").rename(root / "train/a")
    (root / "train/c").rename(root / "train/b")


CHANGES = [
    _add, _add_deep, _add_deeper, _remove, _remove_deep, _rename, _add_class, _remove_class, _move_to_another_class,
    _swap_classes,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_folder_is_listed_anew(listed_folder, change):
    before = held_in_folder(listed_folder)
    held_in_folder(listed_folder)
    change(listed_folder)
    after = held_in_folder(listed_folder)
    assert [sorted(found) for found in after] == files_of(listed_folder)
    if change is not _swap_classes:
        assert after != before


def test_a_file_that_comes_at_once_after_the_listing_is_found(tmp_path):
    """However coarse the file system's clock."""
    write_folder(tmp_path / "data/train", [Sample("a", "0.png", numbered(0))])
    write_folder(tmp_path / "data/val", [Sample("a", "0.png", numbered(0))])
    for number in range(1, 20):
        write_folder(tmp_path / "data/train", [Sample("a", f"{number}.png", numbered(number))])
        assert len(held_in_folder(tmp_path / "data")[0]) == number + 1


def test_a_damaged_listing_is_made_anew(listed_folder):
    expected = held_in_folder(listed_folder)
    for path in (listed_folder.parent / "cache").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-100])
    assert held_in_folder(listed_folder) == expected


def test_a_dataset_that_prepare_made_says_what_is_in_it(forms):
    path = forms[0]["arrow"][1]
    assert json.loads((path / "train/dataset.json").read_text())["images_per_class"] == [12, 12]
