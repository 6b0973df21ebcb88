"""Composition root of the engine: from a configuration to a core that can step."""

import dataclasses
from collections.abc import Callable

import torch

from kernels.backend import resolve
from kernels.errors import BackendUnavailable
from kernels.layout import KVCacheSpec
from kernels.ops import Ops
from paging import KVCacheManager
from server.config import DeviceConfig, EngineConfig, SchedulerConfig
from server.engine.core import EngineCore
from server.engine.faults import FaultyRunner
from server.engine.grammar_gate import GrammarGate
from server.errors import ConfigError
from server.models.decoder import Decoder
from server.models.registry import read_spec
from server.models.spec import ModelSpec
from server.protocol import Ready
from server.runner.decode_graphs import capture_cuda
from server.runner.interface import Runner
from server.runner.kv_cache import allocate_kv_cache, kv_cache_spec
from server.runner.memory import MemoryPlan, estimate_activations, measure_memory, plan
from server.runner.model_runner import ModelRunner
from server.scheduler.scheduler import Scheduler
from server.structured import GrammarCompiler
from server.tokenizer import load_tokenizer
from server.weights.load import load_model
from server.weights.locate import locate

Report = Callable[[str, float], None]
"""Gets the phase and the share of it that is done."""

_WARM_UP_TOKENS = 64
CPU_PREFILL_TOKENS, CPU_PREFILL_TOKENS_PER_STREAM = 12, 2
"""A decode step costs what reading the weights does, and something a request; prompt tokens cost what they are. So many
of them make a step three times as long, whatever the batch (docs/benchmarks/cpu.md)."""


def assemble(config: EngineConfig, report: Report) -> tuple[EngineCore, Ready]:
    """Loads the model, sizes and allocates the KV cache, warms up. Raises StartupError."""
    device = _device(config.device)
    if config.device.num_threads is not None:
        torch.set_num_threads(config.device.num_threads)
    files = locate(config.model.model)
    spec = read_spec(files)
    ops = _ops(config.device, device)
    model = load_model(
        files,
        spec,
        ops,
        dtype=_dtype(config, device),
        device=device,
        # Backends multiply quantised weights by rounded activations; who asks for float32 asks for float32.
        keep_quantized=config.model.quantization == "auto" and config.model.dtype != "float32",
        on_progress=lambda share: report("loading weights", share),
    )
    report("allocating KV cache", 0.0)
    kv_dtype = torch.float8_e4m3fn if config.cache.kv_cache_dtype == "fp8" else model.dtype
    kv_spec = kv_cache_spec(spec, block_size=config.cache.block_size, dtype=kv_dtype)
    memory = _plan_memory(config, model, kv_spec, device)
    kv_cache = allocate_kv_cache(ops, kv_spec, num_blocks=memory.num_blocks, device=device)
    manager = _manager(config, memory)
    gate = GrammarGate(lambda: GrammarCompiler(load_tokenizer(files), vocab_size=spec.vocab_size))
    runner = ModelRunner(
        model=model,
        kv_cache=kv_cache,
        page_table=manager.page_table.view,
        max_num_seqs=config.scheduler.max_num_seqs,
        device=device,
        start_grammar=gate.start,
        capture=capture_cuda if device.type == "cuda" and not config.device.enforce_eager else None,
        lookahead=_looks_ahead(config.scheduler, device),
    )
    report("warming up", 0.0)
    runner.warm_up(_WARM_UP_TOKENS)
    scheduler = Scheduler(config=_smooth(config.scheduler, device), manager=manager, max_model_len=memory.max_model_len)
    core = EngineCore(
        scheduler=scheduler,
        runner=_with_faults(runner, config.faults),
        gate=gate,
        lookahead=_looks_ahead(config.scheduler, device),
    )
    return core, _ready(config, memory, spec, device, model.dtype, ops)


def _looks_ahead(config: SchedulerConfig, device: torch.device) -> bool:
    if config.async_scheduling == "auto":
        return device.type == "cuda"
    return config.async_scheduling == "on"


def _smooth(config: SchedulerConfig, device: torch.device) -> SchedulerConfig:
    """A CPU computes a few prompt tokens for what a decode step costs, a GPU hundreds: so chunks are kept short, and
    nobody is let in who would have to be preempted and computed again."""
    if device.type != "cpu":
        return config
    if config.admission == "auto":
        config = dataclasses.replace(config, admission="forecast")
    if config.max_num_prefill_tokens is None:
        config = dataclasses.replace(
            config,
            max_num_prefill_tokens=CPU_PREFILL_TOKENS,
            prefill_tokens_per_stream=CPU_PREFILL_TOKENS_PER_STREAM,
        )
    return config


def _plan_memory(config: EngineConfig, model: Decoder, kv_spec: KVCacheSpec, device: torch.device) -> MemoryPlan:
    num_seqs, num_tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    return plan(
        model.spec,
        kv_spec,
        measure_memory(device),
        weights=model.weight_bytes,
        activations=estimate_activations(model.spec, num_tokens=num_tokens, num_sequences=num_seqs, dtype=model.dtype),
        max_num_seqs=num_seqs,
        max_model_len=config.model.max_model_len,
        num_blocks=config.cache.num_blocks,
        kv_cache_memory=config.cache.kv_cache_memory,
        gpu_memory_utilization=config.cache.gpu_memory_utilization if device.type == "cuda" else None,
    )


def _manager(config: EngineConfig, memory: MemoryPlan) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=memory.num_blocks,
        block_size=config.cache.block_size,
        max_requests=config.scheduler.max_num_seqs,
        max_blocks_per_request=-(-memory.max_model_len // config.cache.block_size),
        enable_prefix_cache=config.cache.prefix_cache,
    )


def _ready(
    config: EngineConfig, memory: MemoryPlan, spec: ModelSpec, device: torch.device, dtype: torch.dtype, ops: Ops
) -> Ready:
    return Ready(
        max_model_len=memory.max_model_len,
        num_blocks=memory.num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=spec.vocab_size,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        backend=ops.name,
        ledger=memory.ledger,
    )


def _ops(config: DeviceConfig, device: torch.device) -> Ops:
    try:
        return resolve(config.backend, str(device), batch_invariant=config.batch_invariant)
    except BackendUnavailable as error:
        raise ConfigError(f"--backend {config.backend}: {error}") from None


def _with_faults(runner: Runner, faults: str) -> Runner:
    return FaultyRunner(runner, faults) if faults else runner


def _device(config: DeviceConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this PyTorch sees no GPU; use --device cpu, or install a CUDA build of torch")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """ "auto" is 16 bits wherever the hardware multiplies them natively."""
    name = config.model.dtype
    if name == "float16" and device.type == "cpu" and config.device.batch_invariant:
        raise ConfigError("--batch-invariant: in float16 a CPU multiplies with torch; use --dtype bfloat16 or float32")
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
