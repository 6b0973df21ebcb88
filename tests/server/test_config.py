"""Settings: every source, their order, and messages that say what to do."""

import argparse
from pathlib import Path

import pytest

from server import config
from server.errors import ConfigError
from server.setting import flag_of, key_of, leaves
from server.units import parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("2GiB", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5KiB", 1536),
        ("3M", 3 << 20),
    ],
)
def test_numbers_with_units(text: str, value: int) -> None:
    """Regression: a decimal unit read as a binary one, or the other way round."""
    assert parse_number(text) == value


@pytest.mark.parametrize("text", ["", "four", "- 1", "4 KiBs", "1e9", "4kk"])
def test_what_is_no_number_is_refused(text: str) -> None:
    """Regression: a typing error that becomes some other number."""
    with pytest.raises(ValueError, match="not a number"):
        parse_number(text)


def test_precedence(tmp_path: Path) -> None:
    """Regression: a source that overrides a stronger one."""
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nblock_size: 32\n")
    env = {"PAGETURNER_PORT": "3", "PAGETURNER_MAX_NUM_SEQS": "4", "HOME": "/"}
    loaded = config.load({"api.port": "5"}, config_file=str(file), environment=env)
    assert (loaded.api.port, loaded.engine.scheduler.max_num_seqs, loaded.engine.cache.block_size) == (5, 4, 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("port: ninety", "not a number"),
        ("port: -1", "--port -1: must be at least 0"),
        ("port: 99999", "--port 99999: must be at most 65535"),
        ("max-num-seqs: 1.5", "not a whole number"),
        ("watermark: .nan", "--watermark nan: must be at least 0"),
        ("dtype: int3", "choose one of auto, float32"),
        ("prefix-cache: perhaps", "neither true nor false"),
        ("- port", "found a list"),
        ("port: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_told_apart(tmp_path: Path, content: str, message: str) -> None:
    """Regression: an unknown key that is ignored, or a traceback instead of a sentence."""
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        config.load(config_file=str(file), environment={})


def test_every_choice_can_be_written_in_a_file(tmp_path: Path) -> None:
    """Regression: on and off, which YAML reads as truth values, refused with a message that offers them."""
    file = tmp_path / "c.yaml"
    for path, setting in leaves(config.ServerConfig):
        for choice in setting.metadata["choices"] or ():
            file.write_text(f"{key_of(setting)}: {choice}\n")
            loaded: object = config.load(config_file=str(file), environment={})
            for name in path:
                loaded = getattr(loaded, name)
            assert loaded == choice


def test_an_unknown_variable_is_an_error() -> None:
    """Regression: PAGETURNER_MAXLEN=... that does nothing."""
    with pytest.raises(ConfigError, match="PAGETURNER_MAXLEN"):
        config.load(environment={"PAGETURNER_MAXLEN": "1"})


def test_every_setting_has_a_flag_that_reaches_it() -> None:
    """Regression: a field that no flag, or a flag that no field, belongs to."""
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    given = parser.parse_args(["--max-num-seqs", "7", "--no-prefix-cache", "--api-key", "a", "--api-key", "b"])
    loaded = config.load(vars(given), environment={})
    assert loaded.engine.scheduler.max_num_seqs == 7
    assert loaded.engine.cache.prefix_cache is False
    assert loaded.api.api_keys == ("a", "b")
    fields = [f for _, f in leaves(config.ServerConfig)]
    assert len({flag_of(f) for f in fields}) == len(fields)


def test_keys_of_a_file_join_the_others(tmp_path: Path) -> None:
    """Regression: --api-key-file that replaces --api-key, or keeps blank lines as the empty key."""
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    loaded = config.load({"api.api_keys": ["zero"], "api.api_key_file": str(file)}, environment={})
    assert loaded.api.api_keys == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="no key"):
        config.load({"api.api_key_file": str(file)}, environment={})


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"api.api_keys": [""]}, {}, "--api-key is empty"),
        ({"api.api_keys": ["good", " "]}, {}, "--api-key is empty"),
        ({}, {"PAGETURNER_API_KEY": ""}, "--api-key is empty"),
        ({"api.host": ""}, {}, "--host is empty"),
        ({"engine.model.served_model_name": ["a", ""]}, {}, "--served-model-name is empty"),
    ],
)
def test_an_empty_value_opens_no_door(flags: dict[str, object], environment: dict[str, str], message: str) -> None:
    """Regression: an unset shell variable that became the empty key, no key at all, or every network interface."""
    with pytest.raises(ConfigError, match=message):
        config.load(flags, environment=environment)


def test_the_engine_does_not_inherit_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: API keys readable in the engine process's environment."""
    monkeypatch.setenv("PAGETURNER_API_KEY", "secret")
    assert "secret" not in config.engine_environment(2).values()
    assert config.engine_environment(2)["OMP_NUM_THREADS"] == "2"


def test_a_child_that_runs_a_clients_text_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: API keys and credentials in the environment of the process that renders a request's template."""
    for name in ("PAGETURNER_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in config.bare_environment().values()
