"""What tells one dataset from another: for ranks that must have the same, and for runs that go on."""

import hashlib
from collections.abc import Mapping
from typing import Any

from raytrain.data.source import Sources
from raytrain.distributed import Runtime
from raytrain.errors import DataError
from raytrain.storage import Storage


def agree_on_data(sources: Sources, runtime: Runtime) -> dict[str, Any]:
    """Class names, and size and SHA-256 of the labels of each set. All ranks must call.

    Raises:
        DataError: ranks have different data; on all of them.
    """
    own: dict[str, Any] = {"class_names": list(sources.train.class_names)}
    for split, source in zip(sources._fields, sources, strict=True):
        own[f"{split}_images"] = len(source.labels)
        own[f"{split}_labels"] = hashlib.sha256(source.labels.tobytes()).hexdigest()
    everywhere = runtime.gather(own)
    for rank, other in enumerate(everywhere):
        if differing := [key for key in own if other[key] != everywhere[0][key]]:
            raise DataError(
                f"the data of rank {rank} is not that of rank 0: {', '.join(differing)} differ; give all nodes the "
                "same files"
            )
    return own


def check_same_data(path: Storage, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares with what a checkpoint holds: labels and the order of samples mean something else in other data.

    Raises:
        DataError: it was trained on other data.
    """
    for key, value in now.items():
        if saved.get(key, value) != value:
            was = "are others, though as many" if key.endswith("_labels") else f"was {saved[key]}, is {value}"
            raise DataError(
                f"the data is not what checkpoint {path} was trained on: {key} {was}; give the data of that time, or "
                "start a new run"
            )
