"""The values that a sweep tries: what a key may be, what is drawn, and the corners where a check may fail."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from raytrain.config import Section

MAX_CORNERS = 1000
"""Up to so many corners of a space all are looked at, else those of each two keys."""

Params = dict[str, Any]
"""Values by dotted key."""


class Domain(Section):
    """What one key may be: exactly one of these. A bare list is a grid."""

    grid: tuple[Any, ...] | None = Field(default=None, min_length=1)
    """Each of these values, with each value of the other grids."""
    choice: tuple[Any, ...] | None = Field(default=None, min_length=1)
    """One of these values."""
    uniform: tuple[float, float] | None = None
    """A number from the first to the second."""
    loguniform: tuple[float, float] | None = None
    """The same, with a logarithm that is uniform."""
    quniform: tuple[float, float, float] | None = None
    """A number from the first to the second that is a multiple of the third."""
    randint: tuple[int, int] | None = None
    """A whole number from the first to below the second."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return {"grid": value}
        if not isinstance(value, dict):
            raise ValueError("is no list, and no one of choice, grid, uniform, loguniform, quniform and randint")  # noqa: TRY004 - pydantic takes this one
        return value

    @model_validator(mode="after")
    def _check(self) -> "Domain":
        if len(self.model_fields_set) != 1 or self.of is None:
            raise ValueError("takes one of choice, grid, uniform, loguniform, quniform and randint")
        if not self.is_list:
            low, high = self.of[:2]
            if not low < high:
                raise ValueError(f"{self.kind} needs a lower end below the upper one, not {low} and {high}")
            if self.kind == "loguniform" and low <= 0:
                raise ValueError(f"loguniform needs ends above 0, not {low}")
            if self.quniform is not None and not 0 < self.quniform[2] <= high - low:
                raise ValueError(f"quniform needs a positive step within its ends, not {self.quniform[2]}")
        return self

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return next(iter(self.model_fields_set))

    @property
    def of(self) -> tuple[Any, ...]:
        """Its values, or its ends."""
        return getattr(self, self.kind)

    @property
    def is_list(self) -> bool:
        """Whether it has its values one by one."""
        return self.kind in ("grid", "choice")

    def at(self, quantile: float) -> Any:
        """The value at a place from 0 to below 1, as many values on each stretch as on another of the same length."""
        if self.is_list:
            return self.of[int(quantile * len(self.of))]
        low, high = self.of[:2]
        if self.kind == "loguniform":
            return float(f"{math.exp(math.log(low) + quantile * (math.log(high) - math.log(low))):.6g}")
        if self.kind == "randint":
            return low + int(quantile * (high - low))
        value = low + quantile * (high - low)
        if self.quniform is None:
            return float(f"{value:.6g}")
        step = self.quniform[2]
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return float(f"{min(last, max(first, round(value / step))) * step:.12g}")

    def corners(self) -> list[Any]:
        """All values of a list; of a range both ends."""
        return list(self.of) if self.is_list else [self.at(0.0), self.at(1 - 1e-12)]


Space = Mapping[str, Domain]


def grid(space: Space) -> list[Params]:
    """Each combination of the values, those of the last key changing fastest. All domains must be lists."""
    return list(_product({key: domain.of for key, domain in space.items()}))


def draw(space: Space, trials: int, seed: int) -> list[Params]:
    """So many points of the space, at random, and spread evenly over each key's values (McKay 1979).

    Each key's values are cut into as many stretches as there are trials, and each stretch is drawn from once: of three
    choices, twelve trials have each four times.
    """
    rng = np.random.default_rng(seed)
    columns = {key: (rng.permutation(trials) + rng.random(trials)) / trials for key in space}
    return [{key: space[key].at(float(columns[key][number])) for key in space} for number in range(trials)]


def corners(space: Space) -> Iterator[Params]:
    """Points at the edge of the space: all of them, or where they are many those of each two keys."""
    ends = {key: domain.corners() for key, domain in space.items()}
    if math.prod(len(values) for values in ends.values()) <= MAX_CORNERS:
        yield from _product(ends)
        return
    first = {key: values[0] for key, values in ends.items()}
    for pair in itertools.combinations(ends, 2):
        for params in _product({key: ends[key] for key in pair}):
            yield {**first, **params}


def _product(values: Mapping[str, Sequence[Any]]) -> Iterator[Params]:
    for point in itertools.product(*values.values()):
        yield dict(zip(values, point, strict=True))
