"""Every setting, in one place: frozen, validated, and the only reader of the environment.

Precedence: command line > PAGETURNER_* environment > YAML file > default. Unknown keys are errors.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, and how they are held."""

    model: str = ""
    """A folder, a .gguf file or a hub id; empty: the embedded default model."""
    served_model_name: str = ""
    """Empty: derived from the model."""
    max_model_len: int | None = None
    """None: what the checkpoint allows, shrunk to what the KV cache holds."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16", "float16"."""
    quantization: str = "auto"
    """"auto": keep quantised weights where the backend is faster so. "none": dequantise. "int8": quantise on load."""
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16
    kv_cache_memory: int | None = None
    """Bytes; None: derived from free memory."""
    num_blocks: int | None = None
    """Overrides the bytes: exactly so many usable blocks."""
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 64
    """Most requests in one step: the rows of the page table."""
    max_num_batched_tokens: int = 2048
    """Most new tokens in one step."""
    policy: str = "fcfs"
    """"fcfs" or "priority"."""
    watermark: float = 0.01
    """Share of the blocks that admission leaves free, so that running requests can grow."""


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str = "auto"
    """"auto", "cpu", "cuda"."""
    backend: str = "auto"
    """"auto", "cpu", "triton", "reference"."""
    enforce_eager: bool = False
    deterministic: bool = False
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that the engine process gets to know. Crosses the process border as JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for. Bounded by default; each can be raised."""

    max_body_bytes: int = 16 << 20
    max_n: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 64
    max_stop_bytes: int = 4096
    max_batch_prompts: int = 256
    max_grammar_bytes: int = 256 << 10
    max_logit_bias: int = 1024
    max_queue: int = 1024
    """Requests that are open but not running; beyond it: 429."""


@dataclass(frozen=True, slots=True)
class ApiConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    metrics_namespace: str = "pageturner"
    metrics_need_key: bool = False
    cors_origins: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 120.0
    """A step that takes longer counts as a hang: the engine is replaced."""
    log_format: str = "text"
    log_level: str = "info"
    log_requests: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
