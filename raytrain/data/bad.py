"""Images that could not be decoded and are left out, where the config says so."""

from typing import NamedTuple

from raytrain import config
from raytrain.data.source import Source, Sources
from raytrain.distributed import Runtime
from raytrain.errors import DataError


class BadImage(NamedTuple):
    """One of them."""

    sample: int
    """Its number in its set."""
    name: str
    """File, or shard and row."""
    reason: str


class BadImages:
    """The bad images of one set, each counted once.

    Args:
        num_images: size of the set.
        max_fraction: share of them that may be bad.
    """

    def __init__(self, num_images: int, max_fraction: float) -> None:
        self._num_images, self._max_fraction = num_images, max_fraction
        self._known: dict[int, BadImage] = {}
        self._new: dict[int, BadImage] = {}

    @staticmethod
    def of_sets(data: config.Data, sources: Sources) -> "dict[str, BadImages]":
        """One for each set by its name, or none where a bad image ends the run."""
        if data.on_bad_image == "fail":
            return {}
        return {
            split: BadImages(len(source.labels), data.max_bad_fraction)
            for split, source in zip(sources._fields, sources, strict=True)
        }

    def __len__(self) -> int:
        """Those that all ranks know of."""
        return len(self._known)

    def add(self, sample: int, source: Source, error: DataError) -> None:
        """Takes in one that this rank has met."""
        if sample not in self._known:
            self._new[sample] = BadImage(sample, source.name(sample), str(error))

    def share(self, runtime: Runtime) -> list[BadImage]:
        """Those that any rank has met since the last call. All ranks must call."""
        found = {image.sample: image for own in runtime.gather(list(self._new.values())) for image in own}
        self._new.clear()
        fresh = [found[sample] for sample in sorted(found) if sample not in self._known]
        self._known.update(found)
        return fresh

    def check(self) -> None:
        """Compares what all ranks know of with what may be.

        Raises:
            DataError: too many; on all ranks.
        """
        if len(self._known) > self._max_fraction * self._num_images:
            some = "\n  ".join(image.reason for image in list(self._known.values())[:5])
            raise DataError(
                f"{len(self._known)} of {self._num_images:,} images are bad, more than data.max_bad_fraction "
                f"{self._max_fraction:g}; repair them or raise that; bad_images.jsonl in the run directory lists them, "
                f"such as\n  {some}"
            )
