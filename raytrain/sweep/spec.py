"""What a sweep is: the schema of its file, its trials, and the checks that come before the first of them.

A file has a section `sweep`, a section `space` with what each key may be, and any of a run's sections, which hold for
all trials:

    sweep: {base: quickstart, search: random, trials: 12}
    space:
      optim.base_lr: {loguniform: [0.01, 1.0]}
      schedule.lr_scaling: {choice: [linear, sqrt, none]}
    train: {epochs: 4}
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from raytrain.commandline import build, find_config, known_keys, lay_over, nearest, read_yaml
from raytrain.config import Config, Section
from raytrain.errors import ConfigError
from raytrain.sweep.space import Domain, Params, corners, draw, grid

FIXED_KEYS = {
    "run.name": "a trial's name is its number",
    "run.storage_path": "trials lie in the sweep's directory",
    "scaling.num_workers": "all trials have sweep.workers",
    "checkpoint.best_by": "it is sweep.metric",
}
"""Keys that no space may have, and why."""
MAX_FAULTS = 5
"""Points of a space whose faults are told."""


class Sweep(Section):
    """The search."""

    base: str = "quickstart"
    """Config that the trials change: the name of one that ships, or a path."""
    metric: Literal["val/top1", "val/loss"] = "val/top1"
    """What the trials are compared by."""
    mode: Literal["max", "min"] = "max"
    """Whether it is better when it is greater or less."""
    best: Literal["best", "last"] = "best"
    """Which of its evaluations a trial counts with."""
    search: Literal["grid", "random"] = "grid"
    """`grid`: each combination of the space's values. `random`: points drawn at random, spread evenly over each key."""
    trials: int | None = Field(default=None, ge=1)
    """How many trials. None: those of the grid."""
    workers: int = Field(default=1, ge=1)
    """Workers of each trial."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Fixes what is drawn."""

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        if (self.metric == "val/loss") != (self.mode == "min"):
            raise ValueError(f"sweep.mode {self.mode} would look for the worst {self.metric}")
        if (self.search == "grid") != (self.trials is None):
            raise ValueError("sweep.trials goes with sweep.search=random, which needs it, and not with a grid")
        return self


class Spec(NamedTuple):
    """A sweep that was read and checked for itself."""

    name: str
    sweep: Sweep
    space: dict[str, Domain]
    fixed: dict[str, dict[str, Any]]
    """The base config's values with what holds for all trials laid over them, by section and key."""

    def config(self, params: Mapping[str, Any]) -> Config:
        """A trial's config.

        Raises:
            ConfigError: it cannot be one.
        """
        own = {"scaling.num_workers": self.sweep.workers, "checkpoint.best_by": self.sweep.metric}
        return build(self.fixed, {**own, **params}, f"sweep {self.name}")


def read_spec(name: str, overrides: Mapping[str, Any]) -> Spec:
    """Reads the sweep that is named (`sweep_lr`) or pathed.

    Args:
        name: of the sweep.
        overrides: by dotted key, laid over the file: `sweep.trials`, `space.optim.base_lr`, `train.epochs`.

    Raises:
        ConfigError: there is no such file, or a key or a value in it is at fault.
    """
    path = find_config(name)
    file = lay_over(read_yaml(path), overrides)
    if "space" not in file:
        raise ConfigError(f"{path} is no sweep: it has no section `space`; a run's config is for raytrain.fit")
    sweep = _validate(lambda: Sweep.model_validate(file.pop("sweep", {})), "sweep", list(Sweep.model_fields), path)
    space = {key: _domain(key, value, path) for key, value in file.pop("space").items() if value is not None}
    if not space:
        raise ConfigError(f"the space of {path} is empty")
    if sweep.search == "grid" and (ranges := [key for key, domain in space.items() if not domain.is_list]):
        raise ConfigError(
            f"{ranges[0]} is a range, which a grid has no end of; set sweep.search=random, sweep.trials=N"
        )
    own = {f"{section}.{key}": value for section, keys in file.items() for key, value in keys.items()}
    for key in own:
        if key in space:
            raise ConfigError(f"{key} is set for all trials and in the space too; take out one of them (in {path})")
        if key in FIXED_KEYS and not key.startswith("run."):  # those of run are the sweep's own
            raise ConfigError(f"{key} cannot be set for trials ({path}): {FIXED_KEYS[key]}")
    return Spec(path.stem, sweep, space, lay_over(read_yaml(find_config(sweep.base)), own))


def make_trials(spec: Spec) -> list[Params]:
    """The trials of a sweep, the same each time."""
    if spec.sweep.trials is None:
        return grid(spec.space)
    return draw(spec.space, spec.sweep.trials, spec.sweep.seed)


def check_points(spec: Spec, check: Callable[[Config], object]) -> None:
    """Looks at every trial, and at the corners of the space.

    Args:
        spec: the sweep.
        check: raises ConfigError where a config and the data do not fit each other.

    Raises:
        ConfigError: names points at fault and what is wrong with them.
    """
    faults: dict[str, str] = {}
    for params in (*make_trials(spec), *corners(spec.space)):
        try:
            check(spec.config(params))
        except ConfigError as error:
            faults.setdefault(str(error), ", ".join(f"{key}={value}" for key, value in params.items()))
    if faults:
        lines = [f"{point}:\n  {fault}" for fault, point in list(faults.items())[:MAX_FAULTS]]
        if len(faults) > MAX_FAULTS:
            lines.append(f"and {len(faults) - MAX_FAULTS} more")
        raise ConfigError("\n".join([f"the space of sweep {spec.name} has points that cannot be trained", *lines]))


def _domain(key: str, value: Any, path: Path) -> Domain:
    known = list(known_keys())
    if key not in known:
        raise ConfigError(f"unknown key {key} in the space of {path}{nearest(key, known)}")
    if key in FIXED_KEYS:
        raise ConfigError(f"{key} cannot be in a space ({path}): {FIXED_KEYS[key]}")
    return _validate(lambda: Domain.model_validate(value), f"space.{key}", list(Domain.model_fields), path)


def _validate(make: Callable[[], Any], where: str, known: list[str], path: Path) -> Any:
    try:
        return make()
    except ValidationError as error:
        fault = error.errors()[0]
        dotted = ".".join([where, *map(str, fault["loc"])])
        if fault["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key {dotted}{nearest(str(fault['loc'][0]), known)} (in {path})") from None
        raise ConfigError(f"{dotted}: {fault['msg'].removeprefix('Value error, ')} (in {path})") from None
