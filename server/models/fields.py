"""Typed access to a checkpoint's configuration. Whatever a file may hold, the answer is a value or a ModelLoadError."""

import math
from collections.abc import Mapping
from typing import Any

from server.errors import ModelLoadError

LARGEST = 1 << 30


class Fields:
    """A mapping from outside (config.json or GGUF metadata) with checked reads. where: its name in messages."""

    def __init__(self, values: Mapping[str, Any], where: str, *, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The raw value; None where it is absent or null."""
        return self.values.get(self.prefix + key)

    def int(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.where} has no {self.prefix}{key}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ModelLoadError(f"{self.where}: {self.prefix}{key} = {value!r} is not an integer in {least}..{most}")
        return value

    def float(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.where} has no {self.prefix}{key}")
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not usable or (positive and value <= 0):
            kind = "a positive number" if positive else "a finite number"
            raise ModelLoadError(f"{self.where}: {self.prefix}{key} = {value!r} is not {kind}")
        return float(value)

    def bool(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.where}: {self.prefix}{key} = {value!r} is neither true nor false")
        return value

    def mapping(self, key: str) -> "Fields | None":
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{self.where}: {self.prefix}{key} is not an object")
        return Fields(value, f"{self.where}: {self.prefix}{key}")

    def refuse(self, key: str, *allowed: object) -> None:
        """ModelLoadError unless the value is absent, null, false or one of those allowed."""
        value = self.get(key)
        if value is None or value is False or value in allowed:
            return
        raise ModelLoadError(f"{self.where}: {self.prefix}{key} = {value!r} is not supported")
