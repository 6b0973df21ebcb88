"""What a request gets where it says nothing of it: OpenAI's defaults, or those that the model was published with."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from server.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """OpenAI's, as they stand here. The names are those of generation_config.json, too."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


OPENAI_DEFAULTS = SamplingDefaults()
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def of_generation_config(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Those that the file names; it may hold much else. Raises ConfigError for values that no sampler can use."""
    named = {f.name: generation_config.get(f.name) for f in fields(SamplingDefaults)}
    given = {name: _checked(name, value) for name, value in named.items() if value is not None}
    return SamplingDefaults(**given)


def _checked(name: str, value: Any) -> Any:
    low, high = _RANGES[name]
    kinds = int if name == "top_k" else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise ConfigError(
            f"generation_config.json: {name} is {str(value)[:40]!r}, not between {low} and {high}; "
            "--generation-config none ignores the file"
        )
    return value
