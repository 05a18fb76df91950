"""Small image datasets, written in each of the forms that people have them in."""

import hashlib
import io
import json
import tarfile
import zlib
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from skimage import data as photographs

from raytrain.config import Data
from raytrain.data.source import open_sources

CHELSEA = photographs.chelsea()


class Sample(NamedTuple):
    """An image of a dataset: its class, its file's name, its bytes."""

    label: str
    file: str
    encoded: bytes


def encoded(image, kind="jpeg", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels_of(image_bytes):
    """What Pillow makes of it, without regard to orientation."""
    return np.asarray(Image.open(io.BytesIO(bytes(image_bytes))).convert("RGB"))


def piece(number, height=48, width=64):
    """A part of a photograph, another for each number."""
    random = np.random.default_rng(number)
    top, left = (random.integers(0, full - part) for full, part in zip(CHELSEA.shape, (height, width), strict=False))
    return Image.fromarray(CHELSEA[top : top + height, left : left + width])


def numbered(number, side=8):
    """A PNG of one colour, which says its number."""
    return encoded(Image.new("RGB", (side, side), (number, 255 - number, 7)), "png")


def size_bomb(side=13500):
    """A valid PNG of one colour, too large for Pillow's taste."""

    def chunk(name, body):
        return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")

    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(100 * (side + 1))) for _ in range(side // 100)) + packer.flush()
    header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def bad_images():
    """A12's: {file: bytes}."""
    whole = encoded(piece(0, 200, 200))
    return {
        "empty.jpg": b"",
        "cut.jpg": whole[: len(whole) // 2],
        "text.jpg": b"not found\n",
        "bomb.png": size_bomb(),
    }


def photo_samples(per_class, classes=("cat", "dog"), seed=0):
    """JPEGs of several sizes, a PNG and a grey JPEG among them; in the order of a folder's listing."""
    samples = []
    for place, label in enumerate(classes):
        for index in range(per_class):
            number = seed + 1000 * place + index
            image = piece(number, 40 + number % 7, 50 + number % 5)
            if index % 5 == 3:
                samples.append(Sample(label, f"{index:03d}.png", encoded(image, "png")))
            elif index % 5 == 4:
                samples.append(Sample(label, f"{index:03d}.jpg", encoded(image.convert("L"), quality=90)))
            else:
                samples.append(Sample(label, f"{index:03d}.jpg", encoded(image, quality=90)))
    return samples


def write_folder(root, samples):
    for sample in samples:
        path = root / sample.label / sample.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.encoded)
    return root


def label_metadata(names):
    """A schema's metadata as Hugging Face's datasets writes it."""
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    return {"huggingface": json.dumps({"info": {"features": features}})}


def write_parquet(path, images, labels, names=None, row_group_size=None, struct_paths=None):
    """Columns `image` and `label`; the image a struct<bytes, path> where there are paths, the label with its names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if struct_paths is None:
        column = pa.array(images, pa.binary())
    else:
        rows = [{"bytes": image, "path": name} for image, name in zip(images, struct_paths, strict=True)]
        column = pa.array(rows, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"image": column, "label": labels})
    if names is not None:
        table = table.replace_schema_metadata(label_metadata(names))
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def write_tar(path, members):
    """A tar of {name: bytes} in that order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, body in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    return path


def sample_tar(path, samples, names):
    """A WebDataset shard; the label is the number of the class."""
    members = {}
    for index, sample in enumerate(samples):
        members[f"{index:05d}.{sample.file.rsplit('.', 1)[1]}"] = sample.encoded
        members[f"{index:05d}.cls"] = str(names.index(sample.label)).encode()
    return write_tar(path, members)


def write_forms(root, splits, names=("cat", "dog")):
    """The same dataset as root/{folder,plain,struct,tar}; {split: samples}. Returns {form: (source, path)}."""
    for split, samples in splits.items():
        write_folder(root / "folder" / split, samples)
        half = len(samples) // 2
        for number, part in enumerate((samples[:half], samples[half:])):
            images, labels = [sample.encoded for sample in part], [names.index(sample.label) for sample in part]
            write_parquet(root / "plain" / split / f"{number}.parquet", images, labels, names, row_group_size=7)
            paths = [sample.file for sample in part]
            name = f"{split}-{number:05d}-of-00002.parquet"
            write_parquet(root / "struct/data" / name, images, labels, names, struct_paths=paths)
            sample_tar(root / "tar" / f"photos-{split}-{number:04d}.tar", part, names)
    (root / "tar/classnames.txt").write_text("".join(f"{name}\n" for name in names))
    kinds = {"folder": "folder", "plain": "parquet", "struct": "parquet", "tar": "webdataset"}
    return {form: (kind, root / form) for form, kind in kinds.items()}


def config(source, path, cache, **keys):
    keys = {"image_size": 8, "train_crop": "resize", **keys}
    return Data(source=source, path=str(path), cache_path=cache, **keys)


def open_dataset(source, path, cache, **keys):
    return open_sources(config(source, path, cache, **keys))


def held_by(source):
    """What a source holds, in one number: the bytes and the label of each sample in turn."""
    total = hashlib.sha256()
    for index, label in enumerate(source.labels.tolist()):
        total.update(hashlib.sha256(bytes(source.read(index))).digest() + str(label).encode())
    return total.hexdigest()


def stored(folder):
    """Every file under a folder: {path: SHA-256}."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def manifest(folder):
    return json.loads((folder / "dataset.json").read_text())
