"""`pageturner plan` says beforehand what `serve` would do."""

import io

import pytest
from rich.console import Console

from server import config, plan
from server.config import CacheConfig, EngineConfig, ModelConfig
from server.errors import StartupError
from server.models.registry import read_spec
from server.weights.locate import locate

MIB = 1 << 20


def planned(*, cache: CacheConfig | None = None, max_model_len: int | None = None) -> str:
    out = io.StringIO()
    engine = EngineConfig(model=ModelConfig(max_model_len=max_model_len), cache=cache or CacheConfig())
    assert plan.run(engine, Console(file=out, width=200)) == 0
    return out.getvalue()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


@pytest.mark.parametrize(
    ("cache", "row"),
    [
        (CacheConfig(num_blocks=1023), ["360 MiB", "16,368", "15", "3", "1"]),
        (CacheConfig(kv_cache_memory=360 * MIB), ["360 MiB", "16,368", "15", "3", "1"]),
        (CacheConfig(num_blocks=1023, kv_cache_memory=MIB), ["360 MiB", "16,368", "15", "3", "1"]),
        (CacheConfig(num_blocks=1023, kv_cache_dtype="fp8"), ["180 MiB", "16,368", "15", "3", "1"]),
        (CacheConfig(num_blocks=1023, block_size=8), ["180 MiB", "8,184", "7", "1", "1"]),
    ],
)
def test_each_setting_of_the_cache_counts(cache, row):
    """A flag that is taken and ignored: the plan is for another server. The null block takes memory, too."""
    assert rows(planned(cache=cache)) == [row]


def test_lengths_end_where_the_cache_does():
    """A length that serve would shrink is promised."""
    assert rows(planned(cache=CacheConfig(num_blocks=100)))[0][1:] == ["1,600", "1", "1"]


@pytest.mark.parametrize(
    ("cache", "max_model_len", "message"),
    [
        (CacheConfig(), 8193, "more than the model's 8192 positions"),
        (CacheConfig(num_blocks=10), 161, "holds 160 tokens"),
        (CacheConfig(kv_cache_memory=MIB), 100, "holds 16 tokens"),
        (CacheConfig(kv_cache_memory=500_000), None, "too small for a single block"),
    ],
)
def test_what_serve_refuses_is_refused(cache, max_model_len, message):
    """A plan for a server that doesn't start."""
    with pytest.raises(StartupError, match=message):
        planned(cache=cache, max_model_len=max_model_len)


def test_every_dtype_has_a_size():
    """A dtype that serve takes ends the plan in a KeyError."""
    spec = read_spec(locate(""))
    choices = next(f for f in config.ModelConfig.__dataclass_fields__.values() if f.name == "dtype").metadata["choices"]
    assert {plan.kv_bytes_per_token(spec, name) // 11520 for name in choices} == {2, 4}
