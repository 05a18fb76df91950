"""`python -m raytrain.prepare`: what it writes, what becomes of each image, and what an end at any point does."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image, ImageOps

from raytrain.data.decode import decode
from raytrain.errors import DataError
from raytrain.prepare import main
from tests.datasets import (
    Sample,
    bad_images,
    encoded,
    manifest,
    numbered,
    open_dataset,
    photo_samples,
    piece,
    pixels_of,
    stored,
    write_folder,
    write_forms,
    write_parquet,
)

ROOT = Path(__file__).parents[2]
ORIENTATION = 0x0112


def prepare(*words):
    """In this process, with one worker."""
    return main([*map(str, words), "--workers", "1"])


def start(*words):
    """As a command, in a session of its own."""
    command = [sys.executable, "-m", "raytrain.prepare", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@contextmanager
def started(*words):
    """The command as it runs; at the end of the block neither it nor its children do."""
    process = start(*words)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def command(*words):
    """(exit code, stdout, stderr) of the command."""
    with started(*words) as process:
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


def refused(capsys, *words):
    """What the command says when it ends with a user's error."""
    capsys.readouterr()
    assert prepare(*words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("raytrain: ")
    assert "Traceback" not in out + err
    return err


def rows_of(folder, cache):
    """{name in the source: (encoded, label)} of one prepared set."""
    both = open_dataset("arrow", folder, cache)
    found = {}
    for source in both:
        for index, label in enumerate(source.labels.tolist()):
            name = re.search(r"\(from (.*)\)$", source.name(index), re.DOTALL).group(1)
            value = source.read(index)
            found[name] = (value if hasattr(value, "numpy") else bytes(value), label)
    return found


def exif(orientation):
    found = Image.Exif()
    found[ORIENTATION] = orientation
    return found


def deep_png(pixels):
    """A PNG of 16 bits in RGB, which Pillow does not write."""

    def chunk(name, body):
        return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def odd_images():
    """{file: bytes} of each kind that is converted, {file: pixels} that lossless ones have, and plain ones."""
    photo = piece(1)
    transparent = photo.convert("RGBA")
    transparent.putalpha(photo.convert("L"))
    grey = np.asarray(photo.convert("L"))
    deep = (grey * 257.0 - 20 * (grey > 100)).astype(np.uint16)
    odd = {
        "progressive.jpg": encoded(photo, progressive=True, quality=95),
        "cmyk.jpg": encoded(photo.convert("CMYK"), quality=95),
        "progressive-cmyk.jpg": encoded(photo.convert("CMYK"), progressive=True, quality=95),
        "palette.png": encoded(photo.quantize(64), "png"),
        "palette-transparent.png": encoded(photo.quantize(64), "png", transparency=bytes(range(64))),
        "grey16.png": encoded(Image.fromarray(deep), "png"),
        "rgb16.png": deep_png(np.stack([deep, deep[::-1], deep // 2], 2)),
        "rgba.png": encoded(transparent, "png"),
        "grey-alpha.png": encoded(transparent.convert("LA"), "png"),
    }
    plain = {
        "baseline.jpg": encoded(photo),
        "optimized.jpg": encoded(photo, optimize=True, subsampling=0),
        "grey.jpg": encoded(photo.convert("L")),
        "rgb.png": encoded(photo, "png"),
        "grey.png": encoded(photo.convert("L"), "png"),
    }
    eight = (deep / 257).round()
    exact = {
        "palette.png": pixels_of(odd["palette.png"]),
        "palette-transparent.png": np.asarray(photo.quantize(64).convert("RGB")),
        "grey16.png": np.stack([eight] * 3, 2),
        "rgb16.png": np.stack([eight, eight[::-1], (deep // 2 / 257).round()], 2),
        "rgba.png": np.asarray(photo),
        "grey-alpha.png": np.stack([grey] * 3, 2),
    }
    return odd, plain, exact


def one_class(root, images):
    """A dataset of these as its training set, the first one its validation set too."""
    samples = [Sample("a", name, body) for name, body in images.items()]
    write_folder(root / "train", samples)
    write_folder(root / "val", [Sample("a", "val.png", numbered(0))])
    return root


def is_progressive(image_bytes):
    return "progressive" in Image.open(io.BytesIO(image_bytes)).info


# what it writes and says


def test_the_command_writes_shards_and_a_manifest_and_reports(tmp_path):
    samples = photo_samples(6)
    broken = {"cut.jpg": bad_images()["cut.jpg"]}
    write_folder(tmp_path / "src/train", samples)
    write_folder(tmp_path / "src/train", [Sample("dog", name, body) for name, body in broken.items()])
    write_folder(tmp_path / "src/val", photo_samples(2, seed=500))
    code, out, err = command(tmp_path / "src", tmp_path / "dst", "--max-bad-fraction", 0.1)
    assert (code, err) == (0, "")
    for text in (
        "12 images of 2 classes",
        "4 images of 2 classes",
        "dog/cut.jpg",
        "iB of images became",
        "1 bad ",
    ):
        assert text in out, out
    for split, count in (("train", 12), ("val", 4)):
        made = manifest(tmp_path / "dst" / split)
        assert made["class_names"] == ["cat", "dog"]
        assert made["images"] == count
        assert made["images_per_class"] == [count // 2, count // 2]
        assert {path.name for path in (tmp_path / "dst" / split).iterdir()} == {
            "dataset.json",
            *(shard["name"] for shard in made["shards"]),
        }
        hashes = stored(tmp_path / "dst" / split)
        for shard in made["shards"]:
            assert shard["sha256"] == hashes[shard["name"]]
            assert shard["size"] == (tmp_path / "dst" / split / shard["name"]).stat().st_size
        assert sum(shard["rows"] for shard in made["shards"]) == count
    made = manifest(tmp_path / "dst/train")
    assert [bad["name"] for bad in made["bad"]] == ["dog/cut.jpg"]
    assert made["bad"][0]["reason"]
    assert made["bytes_in"] == sum(len(sample.encoded) for sample in samples) + len(broken["cut.jpg"])
    assert made["bytes_out"] == sum(len(sample.encoded) for sample in samples)
    assert sorted(path.name for path in (tmp_path / "dst").iterdir()) == ["train", "val"]


def test_a_single_set_becomes_a_single_set(tmp_path):
    write_folder(tmp_path / "src", photo_samples(3))
    assert prepare(tmp_path / "src", tmp_path / "dst") == 0
    assert manifest(tmp_path / "dst")["images"] == 6
    assert not (tmp_path / "dst/train").exists()


def test_a_second_run_does_nothing_and_says_the_same(tmp_path, capsys):
    write_folder(tmp_path / "src/train", photo_samples(3))
    write_folder(tmp_path / "src/val", photo_samples(2))
    assert prepare(tmp_path / "src", tmp_path / "dst") == 0
    first = capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").rglob("*.*")}
    assert prepare(tmp_path / "src", tmp_path / "dst") == 0
    second = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "dst").rglob("*.*")} == before
    assert first.endswith(second)
    assert "6 images of 2 classes" in second


def test_other_settings_or_files_for_the_same_folder_are_refused(tmp_path, capsys):
    write_folder(tmp_path / "src/train", photo_samples(3))
    write_folder(tmp_path / "src/val", photo_samples(2))
    assert prepare(tmp_path / "src", tmp_path / "dst") == 0
    before = stored(tmp_path / "dst")
    for words in (("--max-side", 30), ("--raw", 30), ("--quality", 50), ("--shard-gib", 0.5)):
        assert str(tmp_path / "dst") in refused(capsys, tmp_path / "src", tmp_path / "dst", *words)
    write_folder(tmp_path / "src/train", [Sample("cat", "new.png", numbered(0))])
    assert str(tmp_path / "dst") in refused(capsys, tmp_path / "src", tmp_path / "dst")
    assert stored(tmp_path / "dst") == before


def test_what_cannot_be_is_refused_in_one_line(tmp_path, capsys):
    assert "nowhere" in refused(capsys, tmp_path / "nowhere", tmp_path / "dst")
    (tmp_path / "bare").mkdir()
    assert "bare" in refused(capsys, tmp_path / "bare", tmp_path / "dst")
    write_folder(tmp_path / "src", photo_samples(1))
    (tmp_path / "file").write_text("in the way")
    assert "file" in refused(capsys, tmp_path / "src", tmp_path / "file")
    assert "file" in refused(capsys, tmp_path / "src", tmp_path / "file/dst")
    assert "file" in refused(capsys, tmp_path / "file", tmp_path / "dst")
    assert not (tmp_path / "dst").exists() or not list((tmp_path / "dst").rglob("dataset.json"))


def test_a_dataset_is_not_prepared_into_itself(tmp_path, capsys):
    """It would be mixed up with what is made from it."""
    write_folder(tmp_path / "src/train", photo_samples(1))
    write_folder(tmp_path / "src/val", photo_samples(1))
    before = stored(tmp_path / "src")
    assert "src" in refused(capsys, tmp_path / "src", tmp_path / "src")
    assert stored(tmp_path / "src") == before


def test_words_out_of_range_are_refused(tmp_path):
    write_folder(tmp_path / "src", photo_samples(1))
    for words in (("--quality", "0"), ("--max-side", "0"), ("--raw", "8", "--max-side", "8"), ("--shard-gib", "inf")):
        with pytest.raises(SystemExit) as ended:
            prepare(tmp_path / "src", tmp_path / "dst", *words)
        assert ended.value.code == 2


def test_bad_images_above_the_fraction_end_it_by_name(tmp_path, capsys):
    """A12."""
    broken = bad_images()
    images = {f"{i:02d}.png": numbered(i) for i in range(16)} | broken
    src = one_class(tmp_path / "src", images)
    err = refused(capsys, src, tmp_path / "dst")
    assert "max-bad-fraction" in err or "max_bad_fraction" in err
    assert any(name in err for name in broken)
    assert not (tmp_path / "dst/train/dataset.json").exists()
    refused(capsys, src, tmp_path / "dst", "--max-bad-fraction", 0.19)
    assert prepare(src, tmp_path / "dst", "--max-bad-fraction", 0.2) == 0
    out = capsys.readouterr().out
    made = manifest(tmp_path / "dst/train")
    assert sorted(bad["name"] for bad in made["bad"]) == sorted(f"a/{name}" for name in broken)
    for bad in made["bad"]:
        assert bad["reason"]
        assert bad["name"] in out
    assert made["images"] == 16
    rows = rows_of(tmp_path / "dst", tmp_path / "cache")
    assert {name: body for name, (body, _) in rows.items() if name != "a/val.png"} == {
        f"a/{name}": body for name, body in images.items() if name not in broken
    }


# what becomes of an image


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The kinds of images, and prepared at full size, with a longer side of 40, and small enough as they are."""
    root = tmp_path_factory.mktemp("odd")
    converted, plain, exact = odd_images()
    one_class(root / "src", {**converted, **plain})
    rows = {}
    for name, words in (("full", ()), ("small", ("--max-side", 40)), ("large", ("--max-side", 500))):
        assert prepare(root / "src", root / name, *words) == 0
        assert manifest(root / name / "train")["bad"] == []
        rows[name] = {key.removeprefix("a/"): row[0] for key, row in rows_of(root / name, root / "cache").items()}
    return {**converted, **plain}, plain, exact, rows


def test_without_a_size_plain_images_stay_byte_for_byte(odd):
    _, plain, _, rows = odd
    assert {name: rows["full"][name] for name in plain} == plain


def test_without_a_size_odd_images_become_plain_ones_with_the_right_pixels(odd):
    images, plain, exact, rows = odd
    for name in set(images) - set(plain):
        made = Image.open(io.BytesIO(rows["full"][name]))
        if name.endswith(".png"):
            assert (made.format, made.mode) == ("PNG", "RGB"), name
            assert (decode(rows["full"][name], str) == exact[name]).all(), name
        else:
            assert (made.format, made.mode) == ("JPEG", "RGB"), name
            assert not is_progressive(rows["full"][name]), name
            difference = np.abs(pixels_of(rows["full"][name]) - pixels_of(images[name]).astype(float))
            assert difference.mean() < 4, name
        assert (decode(rows["full"][name], str) == pixels_of(rows["full"][name])).all(), name


def test_every_kind_decodes_to_what_is_stored_of_it(odd):
    images, _, exact, rows = odd
    for name, image in images.items():
        got = decode(image, str).astype(float)
        if name in exact:
            assert (got == exact[name]).all(), name
        assert np.abs(got - decode(rows["full"][name], str)).mean() < 4, name


def test_with_a_size_all_become_baseline_jpegs_of_that_size(odd):
    images, _, _, rows = odd
    for name, image in images.items():
        for size, expected in (("small", (40, 30)), ("large", (64, 48))):
            made = Image.open(io.BytesIO(rows[size][name]))
            assert (made.format, made.size) == ("JPEG", expected), name
            assert made.mode in ("RGB", "L")
            assert not is_progressive(rows[size][name]), name
            resized = Image.fromarray(decode(image, str)).resize(expected, Image.Resampling.BILINEAR)
            difference = np.abs(decode(rows[size][name], str) - np.asarray(resized).astype(float))
            assert difference.mean() < 5, (name, size, difference.mean())
    for name in ("baseline.jpg", "optimized.jpg", "grey.jpg"):
        assert rows["large"][name] == images[name]  # small enough: as it was


SIZES = [(300, 200), (200, 300), (101, 100), (50, 40), (333, 17), (17, 333), (64, 64), (65, 64), (1, 200)]


@pytest.mark.parametrize("kind", ["--max-side", "--short-side", "--raw"])
def test_larger_images_get_the_size_and_smaller_ones_keep_theirs(tmp_path, kind):
    images = {f"{w}x{h}.png": encoded(piece(w, 200, 200).resize((w, h)), "png") for w, h in SIZES}
    assert prepare(one_class(tmp_path / "src", images), tmp_path / "dst", kind, 64) == 0
    rows = rows_of(tmp_path / "dst", tmp_path / "cache")
    for width, height in SIZES:
        row = rows[f"a/{width}x{height}.png"][0]
        got = np.asarray(row) if kind == "--raw" else pixels_of(row)
        side = min(width, height) if kind == "--short-side" else max(width, height)
        scale = min(1, 64 / side)
        exact = (height * scale, width * scale)
        assert all(abs(a - b) < 1 or a == 1 for a, b in zip(got.shape, exact, strict=False)), (got.shape, exact)
        if scale < 1:
            assert (min if kind == "--short-side" else max)(got.shape[:2]) == 64
        assert got.shape[2] == 3
        original = Image.open(io.BytesIO(images[f"{width}x{height}.png"]))
        differences = [
            np.abs(got - np.asarray(original.resize((got.shape[1], got.shape[0]), way)).astype(float)).mean()
            for way in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
        ]
        assert min(differences) < (0.5 if kind == "--raw" else 6), (width, height)
        if kind == "--raw" and scale == 1:
            assert differences[0] == 0


def test_raw_pixels_train_as_they_are(tmp_path):
    write_folder(tmp_path / "src/train", photo_samples(2))
    write_folder(tmp_path / "src/val", photo_samples(1))
    assert prepare(tmp_path / "src", tmp_path / "dst", "--raw", 40) == 0
    source = open_dataset("arrow", tmp_path / "dst", tmp_path / "cache").train
    for index in range(4):
        image = source.read(index)
        assert image.dtype.is_floating_point is False
        assert image.ndim == 3
        assert max(image.shape) == 40
    assert manifest(tmp_path / "dst/train")["bytes_out"] == sum(source.read(i).numel() for i in range(4))


@pytest.mark.parametrize("words", [(), ("--max-side", 40), ("--short-side", 20), ("--raw", 40)])
def test_images_stand_upright_as_their_orientation_says(tmp_path, words):
    photo = piece(2)
    images = {}
    for orientation in range(1, 9):
        for name, options in (("base", {}), ("prog", {"progressive": True})):
            images[f"{name}{orientation}.jpg"] = encoded(photo, quality=95, exif=exif(orientation), **options)
        images[f"png{orientation}.png"] = encoded(photo, "png", exif=exif(orientation))
        images[f"palette{orientation}.png"] = encoded(photo.quantize(64), "png", exif=exif(orientation))
        tiny = photo.resize((16, 12))
        images[f"tiny{orientation}.jpg"] = encoded(tiny, quality=95, exif=exif(orientation))
    assert prepare(one_class(tmp_path / "src", images), tmp_path / "dst", *words) == 0
    rows = rows_of(tmp_path / "dst", tmp_path / "cache")
    for name, image in images.items():
        row = rows[f"a/{name}"][0]
        got = np.asarray(row) if words[:1] == ("--raw",) else decode(row, str)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(image))).convert("RGB")
        if not words:
            assert got.shape[:2] == (upright.height, upright.width)
            assert (decode(image, str) == np.asarray(upright)).all()
        expected = np.asarray(upright.resize((got.shape[1], got.shape[0]), Image.Resampling.BILINEAR)).astype(float)
        assert (got.shape[0] > got.shape[1]) == (upright.height > upright.width), name
        assert np.abs(got - expected).mean() < 6, name
        if isinstance(row, bytes) and row != image:
            assert not Image.open(io.BytesIO(row)).getexif(), name


def test_quality_is_that_of_the_jpegs(tmp_path):
    src = one_class(tmp_path / "src", {"a.png": encoded(piece(3), "png")})
    for quality in (30, 95):
        assert prepare(src, tmp_path / str(quality), "--max-side", 60, "--quality", quality) == 0
        (made,) = [b for n, (b, _) in rows_of(tmp_path / str(quality), tmp_path / "cache").items() if n == "a/a.png"]
        same = Image.open(io.BytesIO(encoded(piece(3), quality=quality)))
        assert Image.open(io.BytesIO(made)).quantization == same.quantization


# from every form


def test_every_form_prepares_to_the_same_images(tmp_path):
    splits = {"train": photo_samples(6), "val": photo_samples(2, seed=500)}
    forms = write_forms(tmp_path, splits)
    assert prepare(forms["folder"][1], tmp_path / "full") == 0
    forms["arrow"] = ("arrow", tmp_path / "full")
    held = {}
    for form, (kind, path) in forms.items():
        assert prepare(path, tmp_path / "out" / form, "--max-side", 40) == 0
        assert prepare(path, tmp_path / "out" / f"{form}-said", "--max-side", 40, "--form", kind) == 0
        assert stored(tmp_path / "out" / form) == stored(tmp_path / "out" / f"{form}-said")
        sources = open_dataset("arrow", tmp_path / "out" / form, tmp_path / "cache")
        assert sources.train.class_names == ("cat", "dog")
        held[form] = [
            [(bytes(source.read(i)), label) for i, label in enumerate(source.labels.tolist())] for source in sources
        ]
    assert [len(found) for found in held["folder"]] == [12, 4]
    assert all(found == held["folder"] for found in held.values())


def test_a_validation_set_that_lacks_a_class_keeps_the_training_sets_numbers(tmp_path):
    """A01."""
    write_folder(tmp_path / "folder/train", [Sample(name, "0.png", numbered(0)) for name in "abc"])
    write_folder(tmp_path / "folder/val", [Sample(name, "0.png", numbered(0)) for name in "ac"])
    for split, labels in (("train", [0, 1, 2]), ("val", [0, 2])):
        write_parquet(tmp_path / f"parquet/{split}-0.parquet", [numbered(0)] * len(labels), labels)
        text = [("a", "b", "c")[label] for label in labels]
        write_parquet(tmp_path / f"text/{split}-0.parquet", [numbered(0)] * len(labels), text)
    for form in ("folder", "parquet", "text"):
        assert prepare(tmp_path / form, tmp_path / "dst" / form) == 0
        sources = open_dataset("arrow", tmp_path / "dst" / form, tmp_path / "cache")
        for source in sources:
            assert source.class_names == (("0", "1", "2") if form == "parquet" else ("a", "b", "c"))
        assert [source.labels.tolist() for source in sources] == [[0, 1, 2], [0, 2]]


def test_a_class_that_only_the_validation_set_has_is_refused(tmp_path, capsys):
    """A01."""
    write_folder(tmp_path / "src/train", photo_samples(1))
    write_folder(tmp_path / "src/val", photo_samples(1, classes=("cat", "eel")))
    assert "eel" in refused(capsys, tmp_path / "src", tmp_path / "dst")


def test_stored_pixels_are_not_prepared_again(tmp_path, capsys):
    write_folder(tmp_path / "src/train", photo_samples(2))
    write_folder(tmp_path / "src/val", photo_samples(1))
    assert prepare(tmp_path / "src", tmp_path / "raw", "--raw", 60) == 0
    assert "raw/train holds pixels" in refused(capsys, tmp_path / "raw", tmp_path / "dst", "--raw", 30)


def test_names_of_any_kind_are_kept(tmp_path):
    samples = [Sample("ünï cödé, 'quoted\"", name, numbered(i)) for i, name in enumerate((" x.png", "new\nline.png"))]
    write_folder(tmp_path / "src/train", samples)
    write_folder(tmp_path / "src/val", samples)
    assert prepare(tmp_path / "src", tmp_path / "dst") == 0
    source = open_dataset("arrow", tmp_path / "dst", tmp_path / "cache").train
    assert source.class_names == (samples[0].label,)
    assert [bytes(source.read(i)) for i in range(2)] == [numbered(0), numbered(1)]


# shards, workers, interruptions


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """A dataset of so many bytes, most of them zeros after the images, that it is cut into a dozen parts."""
    root = tmp_path_factory.mktemp("heavy")
    samples = photo_samples(20)
    write_folder(root / "src/train", samples)
    for sample in samples[::4]:
        os.truncate(root / "src/train" / sample.label / sample.file, 18 * 2**20)
    write_folder(root / "src/val", photo_samples(2, seed=500))
    words = (root / "src", "--max-side", "40", "--shard-gib", "0.00002")
    assert prepare(words[0], root / "whole", *words[1:]) == 0
    assert len(manifest(root / "whole/train")["shards"]) > 5
    yield words, stored(root / "whole")
    shutil.rmtree(root)


def test_several_workers_write_the_same_bytes_as_one(heavy, tmp_path):
    words, whole = heavy
    code, _, err = command(words[0], tmp_path / "dst", *words[1:], "--workers", "2")
    assert (code, err) == (0, "")
    assert stored(tmp_path / "dst") == whole


def test_shards_keep_to_their_size(heavy, tmp_path):
    for shard in Path(heavy[0][0].parent, "whole/train").glob("*.arrow"):
        assert shard.stat().st_size < 0.00002 * 2**30 + 4000  # of the format's own


def seen_in(folder, seen):
    """Adds all the names that there are in a folder."""
    with suppress(FileNotFoundError):
        seen.update(path for path in folder.rglob("*") if path.is_file())
    return seen


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_any_point_and_run_again_gives_the_same_bytes(heavy, tmp_path, workers):
    words, whole = heavy
    dst = tmp_path / "dst"
    kills = 0
    for files in (1, 2, 5, 9):  # new ones that the run may make
        with started(words[0], dst, *words[1:], "--workers", str(workers)) as process:
            before = seen_in(dst, set())
            seen = set(before)
            end = time.monotonic() + 120
            while process.poll() is None and len(seen_in(dst, seen)) - len(before) < files:
                assert time.monotonic() < end
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
        if not (dst / "train/dataset.json").exists():
            with pytest.raises(DataError, match="dst/train"):
                open_dataset("arrow", dst, tmp_path / "cache")
    assert kills >= 2
    done = {path: path.stat().st_mtime_ns for path in dst.rglob("shard-*.arrow")}
    assert prepare(words[0], dst, *words[1:]) == 0
    assert stored(dst) == whole
    kept = [path for path, when in done.items() if path.stat().st_mtime_ns == when]
    assert len(kept) >= len(done) / 2  # finished shards are not made again


def test_killed_after_random_times_and_run_again_gives_the_same_bytes(heavy, tmp_path):
    words, whole = heavy
    random = np.random.default_rng()
    for number in range(2):
        dst = tmp_path / str(number)
        with started(words[0], dst, *words[1:], "--workers", "1") as process:
            end = time.monotonic() + 120
            while process.poll() is None and not dst.exists():
                assert time.monotonic() < end
            time.sleep(random.uniform(0, 0.3))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert prepare(words[0], dst, *words[1:]) == 0
        assert stored(dst) == whole


def test_killed_as_it_tidies_up_and_run_again_leaves_nothing_beside_the_shards(heavy, tmp_path):
    words, whole = heavy
    dst = tmp_path / "dst"
    assert prepare(words[0], dst, *words[1:]) == 0
    for leftover in ("train/.writing-removed-parts/plan", "val/parts/plan", "val/.writing-abc/shard.arrow"):
        (dst / leftover).parent.mkdir()
        (dst / leftover).write_bytes(b"left")
    assert prepare(words[0], dst, *words[1:]) == 0
    assert stored(dst) == whole


@pytest.mark.parametrize("moment", ["workers start", "shards come"])
def test_ctrl_c_ends_it_in_one_line_and_it_goes_on(heavy, tmp_path, moment):
    words, whole = heavy
    dst = tmp_path / "dst"
    with started(words[0], dst, *words[1:], "--workers", "2") as process:
        end = time.monotonic() + 120
        children = []
        while len(children) < 3 if moment == "workers start" else not list(dst.rglob("*.arrow")):  # one is a tracker
            assert time.monotonic() < end
            assert process.poll() is None
            children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.5 if moment == "workers start" else 0)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 130, out + err
        assert "Traceback" not in out + err, err
        assert psutil.wait_procs(children, timeout=60)[1] == []
    assert prepare(words[0], dst, *words[1:]) == 0
    assert stored(dst) == whole


def test_no_child_outlives_a_killed_command(heavy, tmp_path):
    words, whole = heavy
    dst = tmp_path / "dst"
    with started(words[0], dst, *words[1:], "--workers", "2") as process:
        end = time.monotonic() + 120
        children = []
        while not list(dst.rglob("*.arrow")):
            assert time.monotonic() < end
            assert process.poll() is None
            children = psutil.Process(process.pid).children(recursive=True) or children
        assert children
        process.kill()
        process.wait()
        assert psutil.wait_procs(children, timeout=60)[1] == []
    assert prepare(words[0], dst, *words[1:]) == 0
    assert stored(dst) == whole


def test_two_at_once_on_one_folder_leave_it_whole_or_refuse(heavy, tmp_path):
    words, whole = heavy
    dst = tmp_path / "dst"
    both = [*words[1:], "--workers", "1"]
    with started(words[0], dst, *both) as one, started(words[0], dst, *both) as two:
        ends = [(*process.communicate(timeout=120), process.returncode) for process in (one, two)]
    assert 0 in [end[2] for end in ends], ends
    assert "Traceback" not in "".join(end[0] + end[1] for end in ends), ends
    assert stored(dst) == whole


# opening


@pytest.fixture
def prepared(tmp_path):
    write_folder(tmp_path / "src/train", photo_samples(10))
    write_folder(tmp_path / "src/val", photo_samples(2))
    assert prepare(tmp_path / "src", tmp_path / "dst", "--shard-gib", 0.00002) == 0
    assert len(manifest(tmp_path / "dst/train")["shards"]) > 1
    return tmp_path / "dst"


def test_a_shard_too_short_too_long_or_missing_is_refused_by_name(prepared, tmp_path):
    for split in ("train", "val"):
        shard = max((prepared / split).glob("*.arrow"))
        whole = shard.read_bytes()
        for wrong in (whole[: len(whole) // 2], whole[:-1], whole + b"\0", b""):
            shard.write_bytes(wrong)
            with pytest.raises(DataError, match=f"{split}/{shard.name}"):
                open_dataset("arrow", prepared, tmp_path / "cache")
        shard.unlink()
        with pytest.raises(DataError, match=f"{split}/{shard.name}"):
            open_dataset("arrow", prepared, tmp_path / "cache")
        shard.write_bytes(whole)
    assert len(open_dataset("arrow", prepared, tmp_path / "cache").train.labels) == 20


def test_a_shard_of_the_right_size_and_the_wrong_content_is_refused_or_its_images_are_bad(prepared, tmp_path):
    shard = min((prepared / "train").glob("*.arrow"))
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match=shard.name):
        open_dataset("arrow", prepared, tmp_path / "cache")


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b'{"format": 1}', b"\xff\xfe", b'{"format": 99}'])
def test_a_manifest_that_is_missing_or_damaged_is_refused_by_name(prepared, tmp_path, content):
    path = prepared / "val/dataset.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"dst/val"):
        open_dataset("arrow", prepared, tmp_path / "cache")


def test_sets_with_other_classes_are_refused(prepared, tmp_path):
    shutil.rmtree(prepared / "val")
    write_folder(tmp_path / "other", photo_samples(1, classes=("cat", "eel")))
    assert prepare(tmp_path / "other", prepared / "val") == 0
    with pytest.raises(DataError, match=r"dst/val.*eel"):
        open_dataset("arrow", prepared, tmp_path / "cache")
