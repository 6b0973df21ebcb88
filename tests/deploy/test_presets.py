from pathlib import Path

import pytest

from server import config

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))


def load(preset: Path, tmp_path: Path) -> config.ServerConfig:
    """The preset, with what only a deployment has: a file of keys."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    environment = {"PAGETURNER_API_KEY_FILE": str(keys)} if "api-key-file" in preset.read_text() else {}
    return config.load(config_file=str(preset), environment=environment)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_loads(preset, tmp_path):
    """A setting is renamed and the presets that people start from end in "unknown setting"."""
    settings = load(preset, tmp_path)
    assert settings != config.ServerConfig()
    scheduler = settings.engine.scheduler
    assert scheduler.max_num_batched_tokens >= scheduler.max_num_seqs


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_says_what_it_is_for(preset):
    """A preset that nobody can choose, because only its name says something."""
    first = preset.read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


def test_presets_reach_their_fields(tmp_path):
    """YAML that loads and changes nothing: units or nested fields are lost on the way."""
    laptop = load(ROOT / "configs/laptop.yaml", tmp_path)
    assert laptop.engine.cache.kv_cache_memory == 256 << 20
    assert laptop.engine.scheduler.max_num_seqs == 4
    assert load(ROOT / "configs/long-context.yaml", tmp_path).engine.model.max_model_len == 32 << 10
    tenants = load(ROOT / "configs/multi-tenant.yaml", tmp_path)
    assert tenants.api.api_keys == ("secret",)
    assert tenants.api.limits.max_body_bytes == 4 << 20
