"""What a setting is: a field of a configuration class, with its range, its flag and the reading of its value."""

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import field
from typing import Any, get_args, get_origin

from server.errors import ConfigError
from server.units import parse_number


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    flag: str | None = None,
    internal: bool = False,
) -> Any:
    """A dataclass field with its range, its help text and, where the name alone doesn't say it, its flag."""
    metadata = {"help": help, "low": low, "high": high, "choices": choices, "flag": flag, "internal": internal}
    return field(default=default, metadata=metadata)


class Validated:
    """Checks every field against the range in its metadata, so that a config that exists is a config that works."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, meta = getattr(self, f.name), f.metadata
            if value is None or not meta:
                continue
            if meta["choices"] and value not in meta["choices"]:
                raise ConfigError(f"{flag_of(f)} {value!r}: choose one of {', '.join(meta['choices'])}")
            if meta["low"] is not None and not value >= meta["low"]:  # neither is NaN
                raise ConfigError(f"{flag_of(f)} {value}: must be at least {meta['low']}")
            if meta["high"] is not None and not value <= meta["high"]:
                raise ConfigError(f"{flag_of(f)} {value}: must be at most {meta['high']}")


def flag_of(f: dataclasses.Field[Any]) -> str:
    """The field's command-line flag."""
    return "--" + key_of(f)


def key_of(f: dataclasses.Field[Any]) -> str:
    """Its key in YAML."""
    name: str = f.metadata.get("flag") or f.name.removesuffix("_s").replace("_", "-")
    return name


def leaves(config_class: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dataclasses.Field[Any]]]:
    """(path, field) of every setting below a config class, nested ones included."""
    for f in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(f.type):
            yield from leaves(f.type, (*path, f.name))  # type: ignore[arg-type]
        elif not f.metadata["internal"]:
            yield (*path, f.name), f


def plain_type(f: dataclasses.Field[Any]) -> type:
    """int, float, str, bool or tuple: the field's type without its None."""
    kinds = get_args(f.type) if isinstance(f.type, types.UnionType) else (f.type,)
    kind: type = next(k for k in kinds if k is not type(None))
    return tuple if get_origin(kind) is tuple else kind


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def convert(f: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """A raw value (text, or what YAML read) as the field's type. Raises ConfigError that names the source."""
    kind = plain_type(f)
    try:
        if value is None:
            return None
        if kind is tuple:
            return tuple(str(v) for v in value) if isinstance(value, list | tuple) else tuple(str(value).split(","))
        if kind is bool:
            if isinstance(value, bool):
                return value
            if str(value).lower() in _TRUE + _FALSE:
                return str(value).lower() in _TRUE
            raise ValueError(f"{value!r} is neither true nor false")
        if kind is int:
            return parse_number(str(value))
        if kind is float:
            return float(value)
        if isinstance(value, bool):  # how YAML reads a bare on or off
            return "on" if value else "off"
        return str(value)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None
