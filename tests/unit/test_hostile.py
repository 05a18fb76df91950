"""Faults that a hostile reader found: data that would be lost, doubled or mislabelled without a word."""

import io
import os
import tarfile
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from raytrain.config import Data
from raytrain.data import fill, loader
from raytrain.data.augment import eval_transform
from raytrain.data.bad import BadImages
from raytrain.data.decode import decode
from raytrain.data.identity import agree_on_data
from raytrain.data.origin import split_of
from raytrain.data.source import Sources, open_sources
from raytrain.errors import DataError
from raytrain.prepare import main as prepare
from tests.datasets import encoded, numbered, photo_samples, piece, write_folder, write_parquet, write_tar
from tests.ranks import run_ranks


def write_images(root, splits=("train", "val")):
    for split in splits:
        write_folder(root / split, photo_samples(3, ("a", "b")))
    return root


def opened(source, path):
    return open_sources(Data(source=source, path=str(path), cache_path=path.with_name("cache")))


class Labelled:
    def __init__(self, names, labels):
        self.class_names, self.labels = names, np.array(labels)


def agree(runtime, of_ranks):
    try:
        agree_on_data(Sources(*(Labelled(*part) for part in of_ranks[runtime.rank])), runtime)
    except DataError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_are_refused_on_all_of_them():
    same = ((("a", "b"), [0, 1, 1]), (("a", "b"), [0]))
    assert run_ranks(2, agree, [same, same]) == ["", ""]
    for other, what in (
        (((("a", "c"), [0, 1, 1]), (("a", "c"), [0])), "class_names"),
        (((("a", "b"), [0, 1]), (("a", "b"), [0])), "train_images, train_labels"),
        ((same[0], (("a", "b"), [1])), "val_labels"),
    ):
        messages = run_ranks(2, agree, [same, other])
        assert messages[0] == messages[1]
        assert f"the data of rank 1 is not that of rank 0: {what} differ" in messages[0]


def test_a_link_that_leads_back_is_refused_by_prepare_too(tmp_path, capsys):
    root = write_images(tmp_path / "data")
    (root / "train/a/loop").symlink_to("..")
    assert prepare([str(root), str(tmp_path / "out")]) == 2
    assert "does a link lead back" in capsys.readouterr().err
    with pytest.raises(DataError, match="does a link lead back"):
        opened("folder", root)


@pytest.mark.parametrize("place", ["train/a/l.jpg", "train/c"])
def test_a_link_to_nothing_is_refused(tmp_path, place):
    root = write_images(tmp_path / "data")
    (root / place).symlink_to("/nowhere/at/all")
    with pytest.raises(DataError, match=rf"{place} is a link to nothing"):
        opened("folder", root)
    assert prepare([str(root), str(tmp_path / "out")]) == 2


def test_a_folder_in_the_place_of_another_is_listed_anew(tmp_path):
    """With the times of the one that was there before."""
    one, two = write_images(tmp_path / "one"), write_images(tmp_path / "two")
    (two / "train/a/more.png").write_bytes(numbered(1))
    for root in (one, two):
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
            os.utime(folder, (1e9, 1e9))
    link = tmp_path / "data"
    link.symlink_to(one)
    assert len(opened("folder", link).train.labels) == 6
    link.unlink()
    link.symlink_to(two)
    assert len(opened("folder", link).train.labels) == 7


def samples_of_tar():
    return {
        f"{i}.{part}": numbered(i) if part == "png" else b"%d" % (i % 2) for i in range(4) for part in ("png", "cls")
    }


def test_a_key_with_a_dot_is_refused_by_name(tmp_path):
    root = tmp_path / "data"
    write_tar(root / "val-0.tar", samples_of_tar())
    write_tar(root / "train-0.tar", {**samples_of_tar(), "img.v2.png": numbered(9), "img.v2.cls": b"1"})
    with pytest.raises(DataError, match=r"train-0\.tar: img\.v2\.png .* more than one dot"):
        opened("webdataset", root)


def test_a_link_in_a_tar_is_refused_by_name(tmp_path):
    root = tmp_path / "data"
    for split in ("train", "val"):
        write_tar(root / f"{split}-0.tar", samples_of_tar())
    with tarfile.open(root / "train-0.tar", "a") as tar:
        member = tarfile.TarInfo("9.png")
        member.type, member.linkname = tarfile.LNKTYPE, "0.png"
        tar.addfile(member)
    with pytest.raises(DataError, match=r"train-0\.tar: 9\.png is a link"):
        opened("webdataset", root)


def test_a_number_in_cls_is_the_number_of_the_class_whatever_its_name(tmp_path):
    root = tmp_path / "data"
    for split in ("train", "val"):
        write_tar(root / f"{split}-0.tar", samples_of_tar())
    (root / "classnames.txt").write_bytes(b"\xef\xbb\xbf1\n0\n")  # with a byte order mark
    sources = opened("webdataset", root)
    assert sources.train.class_names == ("1", "0")
    assert sources.train.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("val/train-of-thought.parquet", "val"),
        ("training_data/val-000.parquet", "val"),
        ("data/train-00000-of-00002.parquet", "train"),
        ("my train set/0.parquet", "train"),
        ("imagenet1k-validation-03.tar", "val"),
        ("train/test/0.parquet", "train"),
        ("data/test-0.parquet", "test"),
        ("strained.parquet", None),
    ],
)
def test_the_set_of_a_file(name, split):
    assert split_of(name) == split


def test_the_cache_knows_the_class_names_that_labels_were_read_with(tmp_path):
    root = tmp_path / "data"
    write_parquet(root / "val-0.parquet", [numbered(0), numbered(1)], [0, 1])
    for names in (("cat", "dog"), ("dog", "cat")):
        write_parquet(root / "train-0.parquet", [numbered(0), numbered(1)], [0, 1], names)
        sources = opened("parquet", root)
        assert sources.val.class_names == names
        assert sources.val.labels.tolist() == [0, 1]


def test_two_classes_of_one_name_are_refused_where_the_lists_differ(tmp_path):
    root = tmp_path / "data"
    write_parquet(root / "train-0.parquet", [numbered(i) for i in range(3)], [0, 1, 2], ("crane", "dog", "crane"))
    write_parquet(root / "val-0.parquet", [numbered(0)], [0], ("dog", "crane", "crane"))
    with pytest.raises(DataError, match="two classes are called crane"):
        opened("parquet", root)


def test_a_set_without_any_bytes_is_of_bad_images(tmp_path):
    root = tmp_path / "data"
    write_parquet(root / "train-0.parquet", [numbered(0), numbered(1)], [0, 1])
    write_parquet(root / "val-0.parquet", pa.array([None, b""], pa.binary()), [0, 1])
    data = Data(source="parquet", path=str(root), cache_path=tmp_path / "cache", image_size=8, on_bad_image="skip")
    source, bad = open_sources(data).val, BadImages(2, 1)
    batches = list(loader.eval_batches(source, data, 2, 0, 1, 1, torch.device("cpu"), bad))
    assert [batch.count for batch in batches] == [0]


# pixels


def test_values_whose_range_nothing_tells_are_refused():
    for array in (np.full((4, 4), 0.5, np.float32), np.full((4, 4), 2**30, np.int32)):
        with pytest.raises(DataError, match="whose range nothing tells"):
            decode(encoded(Image.fromarray(array), "tiff"), str)


def with_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(piece(0, 20, 40), exif=exif)


def test_a_fill_byte_before_a_marker_does_not_hide_the_orientation():
    plain = with_orientation(6)
    place = plain.index(b"\xff\xe1")
    filled = plain[:place] + b"\xff" + plain[place:]
    assert decode(plain, str).shape == (40, 20, 3)
    assert (decode(filled, str) == decode(plain, str)).all()


def test_both_decoders_turn_an_image_by_the_same_rule():
    """Whoever falls back to Pillow finds the size that was said before."""
    for image in (with_orientation(6), encoded(piece(0, 20, 40), xmp=b'<x tiff:Orientation="6"/>')):
        odd = image[:-2] + b"\x00\x01\x02" + image[-2:]  # bytes that simplejpeg does not accept before the end
        assert (decode(odd, str) == decode(image, str)).all()


def test_a_subsampling_that_simplejpeg_does_not_know_is_left_to_pillow():
    image = bytearray(encoded(piece(0, 32, 32)))
    image[image.index(b"\xff\xc0") + 11] = 0x14  # luma 1 x 4
    want = np.asarray(Image.open(io.BytesIO(bytes(image))).convert("RGB"))
    assert (decode(bytes(image), str) == want).all()


def test_a_thin_image_is_not_resized_as_a_whole(monkeypatch):
    sizes = []
    resize = torch.nn.functional.interpolate

    def watch(part, size, **options):
        sizes.append(size)
        return resize(part, size, **options)

    monkeypatch.setattr(torch.nn.functional, "interpolate", watch)
    for shape in ((60_000, 1, 3), (1, 60_000, 3)):
        assert (eval_transform(torch.full(shape, 9, dtype=torch.uint8), Data(image_size=32)) == 9).all()
    assert sizes == [(32 * 32, 32), (32, 32 * 32)]


# machines


class Unreadable:
    class_names, labels = ("a",), np.zeros(4, np.int64)

    def prefetch(self, indices):
        pass

    def read(self, index):
        raise DataError(f"cannot read image {index}: Input/output error")

    def name(self, index):
        return str(index)


def test_an_image_that_cannot_be_read_is_no_bad_image():
    job = fill.Job(np.arange(4), Data(image_size=8))
    images = torch.empty((4, 8, 8, 3), dtype=torch.uint8)
    with pytest.raises(DataError, match="cannot read image 0"):
        fill.fill(Unreadable(), job, images, range(4), skip=True)


def test_loader_threads_that_cannot_all_start_do_not_wait_for_each_other(monkeypatch):
    start, started = threading.Thread.start, []

    def fail(thread):
        started.append(thread)
        if len(started) == 3:
            raise RuntimeError("no more threads")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="no more threads"):
        loader._start_threads(5)
    monkeypatch.undo()
    for thread in started[:2]:
        thread.join(20)
        assert not thread.is_alive()


def test_a_tar_beside_train_and_val_does_not_make_a_folder_a_tar_dataset(tmp_path, capsys):
    root = write_images(tmp_path / "data")
    write_tar(root / "ILSVRC2012_img_train.tar", {"0.png": numbered(0), "0.cls": b"0"})
    assert prepare([str(root), str(tmp_path / "out")]) == 0
    assert "train: 6 images of 2 classes" in capsys.readouterr().out


def test_tars_without_samples_are_refused(tmp_path, capsys):
    for split in ("train", "val"):
        write_tar(tmp_path / f"data/{split}-0.tar", {"readme.txt": b"nothing"})
    assert prepare([str(tmp_path / "data"), str(tmp_path / "out")]) == 2
    assert "has no images" in capsys.readouterr().err
