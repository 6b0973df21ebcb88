"""The model's own defaults, from its generation_config.json."""

from typing import Any

import pytest

from server.errors import ConfigError
from server.frontend.sampling_defaults import OPENAI_DEFAULTS, SamplingDefaults, of_generation_config


@pytest.mark.parametrize(
    ("file", "defaults"),
    [
        ({}, OPENAI_DEFAULTS),
        ({"eos_token_id": [1, 2], "do_sample": True, "temperature": None}, OPENAI_DEFAULTS),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)),
        ({"repetition_penalty": 1.05, "min_p": 0}, SamplingDefaults(repetition_penalty=1.05)),
    ],
)
def test_what_the_file_names_is_taken(file: dict[str, Any], defaults: SamplingDefaults) -> None:
    """Regression: a model tuned for temperature 0.6 that rambles at 1.0, unlike everywhere else it is served."""
    assert of_generation_config(file) == defaults


@pytest.mark.parametrize(
    "file", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": 2.5}, {"top_k": True}, {"min_p": float("nan")}]
)
def test_nonsense_is_refused_at_the_start(file: dict[str, Any]) -> None:
    """Regression: a broken file that fails every request, instead of the start."""
    with pytest.raises(ConfigError, match=f"{next(iter(file))}.*--generation-config none"):
        of_generation_config(file)
