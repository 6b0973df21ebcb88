"""Every setting, in one place: frozen, validated, and the only reader of the environment.

A setting is a field of a dataclass below. Its flag, its YAML key and its PAGETURNER_* variable are made from the
field's name, so that adding a field is all it takes to add a setting. Precedence: command line > environment > YAML >
default. Unknown keys are errors.
"""

import argparse
import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from server.errors import ConfigError
from server.setting import Validated, convert, flag_of, key_of, leaves, plain_type, setting

ENVIRONMENT_PREFIX = "PAGETURNER_"


@dataclass(frozen=True, slots=True)
class ModelConfig(Validated):
    """Which weights, and how they are held."""

    model: str = setting("", "a folder, a .gguf file or a hub id; default: the embedded SmolLM2-135M-Instruct")
    served_model_name: tuple[str, ...] = setting(
        (), "a name that clients may use; repeatable, answers show the first; default: derived from the model"
    )
    max_model_len: int | None = setting(
        None, "longest prompt + answer, tokens; default: the checkpoint's, shrunk to what the KV cache holds", low=8
    )
    dtype: str = setting("auto", "of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = setting(
        "auto",
        "auto: keep quantised weights where that is faster; none: dequantise",
        choices=("auto", "none"),
    )
    chat_template: str | None = setting(None, "a Jinja file to use instead of the model's own chat template")
    generation_config: str = setting(
        "auto",
        "what a request leaves open, temperature and the like; auto: as the model's generation_config.json has it; "
        "none: as OpenAI has it",
        choices=("auto", "none"),
    )

    def __post_init__(self) -> None:
        super(ModelConfig, self).__post_init__()
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name is empty; leave it out for the model's own name")


@dataclass(frozen=True, slots=True)
class CacheConfig(Validated):
    """The paged KV cache."""

    block_size: int = setting(16, "tokens a block", low=1, high=256)
    kv_cache_dtype: str = setting("auto", "of stored keys and values: the model's, or e4m3", choices=("auto", "fp8"))
    kv_cache_memory: int | None = setting(None, "absolute size, e.g. 2GiB; default: from free memory", low=1)
    num_blocks: int | None = setting(None, "exactly so many blocks, instead of a size", low=1)
    gpu_memory_utilization: float = setting(0.9, "share of a GPU's memory to use", low=0.05, high=1.0)
    prefix_cache: bool = setting(True, "share equal prefixes between requests")


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Validated):
    """How a step is filled."""

    max_num_seqs: int = setting(64, "most requests in one step", low=1, high=4096)
    max_num_batched_tokens: int = setting(2048, "most new tokens in one step", low=16)
    max_num_prefill_tokens: int | None = setting(
        None,
        "most prompt tokens in a step that streams wait for; fewer make them smoother; default: on a CPU as many as "
        "cost two decode steps, else no limit of its own",
        low=1,
    )
    prefill_tokens_per_stream: int = setting(0, "so many more for each stream that waits", low=0, internal=True)
    policy: str = setting("fcfs", "who is admitted next", choices=("fcfs", "priority"), flag="scheduling-policy")
    async_scheduling: str = setting(
        "auto", "decide a step while the one before runs; auto: on a GPU", choices=("auto", "on", "off")
    )
    admission: str = setting(
        "auto",
        "who may start: whoever fits now, or whoever fits when all have grown as forecast; auto: forecast on a CPU",
        choices=("auto", "now", "forecast"),
    )
    watermark: float = setting(0.01, "share of the blocks that admission leaves for running requests", low=0, high=0.5)


@dataclass(frozen=True, slots=True)
class DeviceConfig(Validated):
    """What computes."""

    device: str = setting("auto", "where to run", choices=("auto", "cpu", "cuda"))
    backend: str = setting("auto", "which kernels", choices=("auto", "cpu", "triton", "reference"))
    num_threads: int | None = setting(None, "CPU threads of the engine; default: every core", low=1, high=1024)
    enforce_eager: bool = setting(False, "launch a GPU's kernels one by one instead of replaying captured graphs")
    batch_invariant: bool = setting(
        False, "the same bits whatever else is in a step, on a GPU, too; a CPU has it in float32 and bfloat16 anyway"
    )


@dataclass(frozen=True, slots=True)
class EngineConfig(Validated):
    """All that the engine process gets to know. Crosses the process border as JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    faults: str = setting("", "fault injection for tests, see server/engine/faults.py", internal=True)
    log_format: str = setting("text", "the server's own: both processes write to one stream", internal=True)
    log_level: str = setting("info", "the server's own", internal=True)


@dataclass(frozen=True, slots=True)
class Limits(Validated):
    """What one request may ask for. Bounded by default; each can be raised."""

    max_body_bytes: int = setting(16 << 20, "longest request body", low=1024)
    max_n: int = setting(128, "largest n", low=1)
    max_logprobs: int = setting(20, "most top log-probabilities a token", low=0)
    max_stop_strings: int = setting(64, "most stop strings", low=0)
    max_stop_bytes: int = setting(4096, "all stop strings together, bytes", low=0)
    max_batch_prompts: int = setting(256, "most prompts in one completion request", low=1)
    max_grammar_bytes: int = setting(256 << 10, "longest schema, pattern or grammar", low=0)
    max_logit_bias: int = setting(1024, "most entries of logit_bias", low=0)
    max_queue: int = setting(1024, "most requests that wait; beyond it: 429", low=1)
    max_header_bytes: int = setting(64 << 10, "longest request line and headers", low=1024)


@dataclass(frozen=True, slots=True)
class ApiConfig(Validated):
    """The HTTP side."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", low=0, high=65535)
    api_keys: tuple[str, ...] = setting((), "a key that clients must send; repeatable", flag="api-key")
    api_key_file: str | None = setting(None, "a file with one key a line")
    metrics_namespace: str = setting("pageturner", "prefix of the metrics; vllm gives the names that dashboards know")
    tool_call_parser: str = setting(
        "auto",
        "how the model writes tool calls; auto: as its chat template says",
        choices=("auto", "hermes", "qwen", "llama3_json", "mistral"),
    )
    metrics_need_key: bool = setting(False, "guard /metrics with the API key, too")
    cors_origins: tuple[str, ...] = setting((), "an origin that browsers may call from; repeatable", flag="cors-origin")
    limits: Limits = field(default_factory=Limits)
    read_timeout_s: float = setting(60.0, "seconds in which a client must have sent its request", low=1)
    write_timeout_s: float = setting(60.0, "seconds after which a client that does not read is cut off", low=1)
    stream_keep_alive_s: float = setting(
        15.0, "seconds of silence after which a stream gets a comment, so that no proxy cuts it; 0: never", low=0
    )
    drain_timeout_s: float = setting(30.0, "seconds that SIGTERM gives open requests", low=0)
    step_timeout_s: float = setting(120.0, "a step that takes longer counts as a hang: the engine is replaced", low=1)
    log_format: str = setting("text", "of the log lines", choices=("text", "json"))
    log_level: str = setting("info", "least level to log", choices=("debug", "info", "warning", "error"))
    log_requests: bool = setting(True, "one log line a request, without its content")

    def __post_init__(self) -> None:
        super(ApiConfig, self).__post_init__()
        if not all(key.strip() for key in self.api_keys):
            raise ConfigError("--api-key is empty: everybody would know it. Leave it out to serve without a key")
        if not self.host.strip():
            raise ConfigError("--host is empty: 127.0.0.1 serves this machine, 0.0.0.0 every network it is in")


@dataclass(frozen=True, slots=True)
class ServerConfig(Validated):
    engine: EngineConfig = field(default_factory=EngineConfig)
    api: ApiConfig = field(default_factory=ApiConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every setting as a flag, grouped by config class. Flags that are not given are absent from the namespace."""
    groups: dict[tuple[str, ...], Any] = {}
    for path, f in leaves(ServerConfig):
        if f.name == "model":
            continue
        group = groups.setdefault(path[:-1], parser.add_argument_group(" ".join(path[:-1])))
        default = f"{f.default}" if f.default not in (None, (), "") else ""
        options: dict[str, Any] = {
            "dest": ".".join(path),
            "default": argparse.SUPPRESS,
            "help": f.metadata["help"].replace("%", "%%") + (f" [{default}]" if default else ""),
        }
        if plain_type(f) is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif plain_type(f) is tuple:
            options |= {"action": "append", "metavar": "VALUE"}
        else:
            options["metavar"] = "|".join(f.metadata["choices"]) if f.metadata["choices"] else f.name.upper()
        group.add_argument(flag_of(f), **options)


def _from_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: want lines like `max-num-seqs: 64`, found a {type(loaded).__name__}")
    return {str(key).replace("_", "-"): value for key, value in loaded.items()}


def _merge_named(values: dict[str, Any], named: Mapping[str, Any], where: str) -> None:
    """Writes {key: raw value} into {path: value}; an unknown key is an error with a suggestion."""
    known = {key_of(f): (".".join(path), f) for path, f in leaves(ServerConfig)}
    for key, raw in named.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}: unknown setting {key!r}{hint}")
        dest, f = known[key]
        values[dest] = convert(f, raw, f"{where}: {key}")


def _build(config_class: type, values: Mapping[str, Any], path: str = "") -> Any:
    arguments = {}
    for f in dataclasses.fields(config_class):
        name = f"{path}{f.name}"
        if dataclasses.is_dataclass(f.type):
            arguments[f.name] = _build(f.type, values, f"{name}.")  # type: ignore[arg-type]
        elif name in values:
            arguments[f.name] = values[name]
    return config_class(**arguments)


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    config_file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerConfig:
    """Merges the sources into one validated config.

    flags: {"engine.model.model": raw value, ...}, as add_flags makes them. environment: defaults to the process's own.
    Raises ConfigError, with the source and the key in its message.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    if config_file:
        _merge_named(values, _from_yaml(Path(config_file)), f"--config {config_file}")
    # An empty variable counts as unset, but for a key: who sets that one believes the server to be guarded.
    named = {k: v for k, v in environment.items() if k.startswith(ENVIRONMENT_PREFIX)}
    prefixed = {k: v for k, v in named.items() if v != "" or k == f"{ENVIRONMENT_PREFIX}API_KEY"}
    for name, raw in prefixed.items():
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
        _merge_named(values, {key: raw}, name)
    by_dest = {".".join(path): f for path, f in leaves(ServerConfig)}
    for dest, raw in (flags or {}).items():
        values[dest] = convert(by_dest[dest], raw, flag_of(by_dest[dest]))
    config: ServerConfig = _build(ServerConfig, values)
    if config.api.api_key_file:
        config = _with_keys_of_file(config, Path(config.api.api_key_file))
    return config


def _with_keys_of_file(config: ServerConfig, path: Path) -> ServerConfig:
    try:
        keys = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key")
    return dataclasses.replace(config, api=dataclasses.replace(config.api, api_keys=config.api.api_keys + keys))


def bare_environment() -> dict[str, str]:
    """What a Python needs to find its modules, and nothing that is secret: for children that run a client's text."""
    return {k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH")}


def engine_environment(num_threads: int | None) -> dict[str, str]:
    """The engine process's environment: ours, less the server's secrets, with one idle-friendly OpenMP pool."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
    threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
    return {"OMP_WAIT_POLICY": "PASSIVE"} | kept | threads
