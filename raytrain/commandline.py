"""From the words of a command line to a config: `[CONFIG] [section.key=value ...]`, and the help."""

import difflib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError

from raytrain.config import RECIPE_SECTIONS, SPEED_KEYS, VARIANTS, Config
from raytrain.errors import ConfigError


class Request(NamedTuple):
    """What a command line asks for."""

    config_name: str
    config: Config
    overrides: dict[str, Any]
    flags: frozenset[str]


def parse(words: Sequence[str], default: str, flags: frozenset[str]) -> Request:
    """Reads `[CONFIG] [section.key=value ...] [--flag ...]`.

    Raises:
        ConfigError: an unknown flag, key or config, or a value out of range.
    """
    given = {word for word in words if word.startswith("-")}
    if unknown := sorted(given - flags):
        raise ConfigError(f"unknown option {unknown[0]}{nearest(unknown[0], flags)}; see --help")
    names = [word for word in words if word not in given and "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"one config at a time, not {' and '.join(names)}; overrides are section.key=value")
    overrides = read_overrides(word for word in words if word not in given and "=" in word)
    name = names[0] if names else default
    path = find_config(name)
    return Request(path.stem, build(read_yaml(path), overrides, path), overrides, frozenset(given))


def read_overrides(words: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key, of words `section.key=value`.

    Raises:
        ConfigError: an unknown key, or a value that cannot be read.
    """
    return dict(_override(word) for word in words)


def find_config(name: str) -> Path:
    """The file of a config that is named (`resnet50_imagenet`) or pathed (`my/recipe.yaml`).

    Raises:
        ConfigError: there is none.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        if not Path(name).is_file():
            raise ConfigError(f"no config file {name}")
        return Path(name)
    shipped = {path.stem: path for path in _shipped_folder().glob("*.yaml")}
    if name not in shipped:
        hint = nearest(name, shipped)
        raise ConfigError(
            f"no config named {name}{hint}; there are {', '.join(sorted(shipped))}, or give a path to a .yaml"
        )
    return shipped[name]


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a config file as plain values.

    Raises:
        ConfigError: not readable, or not a mapping of sections.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config {path}: {error}") from error
    return parse_yaml(text, path)


def parse_yaml(text: str, where: Path | str) -> dict[str, Any]:
    """A config's text as plain values.

    Raises:
        ConfigError: it is no YAML, or not a mapping of sections.
    """
    try:
        values = yaml.safe_load(text) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read config {where}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        raise ConfigError(f"config {where} must be sections of `key: value`, see --help")
    return values


def build(values: Mapping[str, Any], overrides: Mapping[str, Any], where: Path | str) -> Config:
    """Lays overrides over a config's values and checks the whole.

    Raises:
        ConfigError: names every key at fault, what is wrong with it, and the nearest known key.
    """
    try:
        return Config.model_validate(lay_over(values, overrides))
    except ValidationError as error:
        lines = [_explain(fault["loc"], fault, where, overrides) for fault in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def lay_over(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A copy of values by section and key, with others by dotted key in their place."""
    merged = {section: dict(keys) for section, keys in values.items()}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        merged.setdefault(section, {})[key] = value
    return merged


def dump(config: Config) -> str:
    """The whole config as YAML, which `read_yaml` and `build` read back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Each value by its dotted key; tuples as lists, paths as strings."""
    return {
        f"{section}.{key}": value
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
    }


def changed_recipe(old: Config, new: Config) -> list[str]:
    """What differs between two configs and would change the mathematics, a line each."""
    before, after = flatten(old), flatten(new)
    keys = {*(key for key in before if key.split(".")[0] in RECIPE_SECTIONS), "run.seed"} - set(SPEED_KEYS)
    if old.comm.compression in {"powersgd", "onebit"} or old.optim.name == "onebit_adam":
        keys.add("comm.bucket_cap_mb")  # there a bucket has a scale, or matrices
    return [f"{key}: {before[key]} -> {after[key]}" for key in before if key in keys and before[key] != after[key]]


def help_text(usage: str) -> str:
    """The usage, the configs that ship and every key with its default and its docstring."""
    lines = [usage.strip(), "", "configs:"]
    for path in sorted(_shipped_folder().glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"  {path.stem:<20} {first}")
    lines += ["", "keys, as section.key=value (null means off):"]
    for section, field in Config.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        lines.append(f"\n{section}: {(model.__doc__ or '').strip()}")
        for key, leaf in model.model_fields.items():
            default = (
                yaml.safe_dump(
                    leaf.default if not isinstance(leaf.default, Path) else str(leaf.default),
                    default_flow_style=True,
                )
                .removesuffix("...\n")
                .strip()
                if not isinstance(leaf.default, tuple)
                else str(list(leaf.default))
            )
            lines.append(f"  {section}.{key}={default}")
            lines.append(
                textwrap.fill(
                    " ".join((leaf.description or "").split()),
                    100,
                    initial_indent="      ",
                    subsequent_indent="      ",
                )
            )
    return "\n".join(lines)


def _override(word: str) -> tuple[str, Any]:
    dotted, _, text = word.partition("=")
    known = list(known_keys())
    if dotted not in known:
        raise ConfigError(f"unknown key {dotted}{nearest(dotted, known)}; see --help")
    try:
        value = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        if not _takes_text(dotted):
            raise ConfigError(f"{dotted}: cannot read the value {text!r}: {error}") from error
        value = text
    is_text = value is None or isinstance(value, str)
    return dotted, text if _takes_text(dotted) and not is_text else value  # a name such as 2024-01-02 is no date


def _explain(location: tuple[int | str, ...], fault: Any, where: Path | str, overrides: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in location[:2])
    inside = [part for part in location[2:] if isinstance(part, str) and part not in VARIANTS]
    dotted = ".".join([key, *inside])
    origin = "" if key in overrides else f" (in {where})"
    if fault["type"] == "extra_forbidden":
        known = [] if inside else list(known_keys()) if len(location) > 1 else list(Config.model_fields)
        return f"unknown key {dotted}{nearest(dotted, known)}{origin}"
    message = fault["msg"].removeprefix("Value error, ")
    if len(location) < 2:  # a check over several keys, which its message names
        return f"{dotted}: {message}" if dotted else message
    return f"{dotted}: {message}, not {fault['input']!r}{origin}"


def _takes_text(dotted: str) -> bool:
    section, key = dotted.split(".")
    model = Config.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    kind = model.model_fields[key].annotation
    return kind is str or str in get_args(kind)


def known_keys() -> Iterator[str]:
    """Every key of a config, dotted."""
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, BaseModel)
        yield from (f"{section}.{key}" for key in field.annotation.model_fields)


def nearest(word: str, known: Any) -> str:
    """', did you mean X?' or nothing. A key without its section is matched by its own name."""
    tails = {str(name).rsplit(".", 1)[-1]: str(name) for name in known}
    close = difflib.get_close_matches(word, [str(name) for name in known], 1) or [
        tails[tail] for tail in difflib.get_close_matches(word.rsplit(".", 1)[-1], tails, 1)
    ]
    return f", did you mean {close[0]}?" if close else ""


def _shipped_folder() -> Path:
    """`configs/` lies inside the package in a wheel, and beside it in a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"
