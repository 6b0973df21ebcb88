"""Messages between the API process and the engine. One direction each: Command in, Event out.

All times are `time.monotonic()` seconds: on one machine that clock is shared by all processes and never jumps.
"""

import msgspec

from server.protocol.finish import FinishReason
from server.protocol.sampling import SamplingParams

# --------------------------------------------------------------------------------------------- commands: API -> engine


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """One sequence to generate. n > 1 is n of these. Written by: nobody."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    resumed_token_ids: list[int] = []
    """Output tokens that an engine, now dead, had already produced: the sequence goes on behind them."""
    priority: int = 0
    """Lower runs first. Equal priorities run in order of arrival."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    deadline: float | None = None
    client: str = ""
    """Whose it is: clients take turns."""
    run_alone: bool = False
    """Suspected of killing the engine: no other request is in a step with it until it has produced a token."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Ask for an Inspection with the same token."""

    token: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    pass


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop now. Draining is the API process's business: it sends this when nothing is open."""


Command = GenerateRequest | AbortRequests | Inspect | ResetPrefixCache | Shutdown

# ----------------------------------------------------------------------------------------------- events: engine -> API


class MemoryLedger(msgspec.Struct, frozen=True):
    """Where the memory went, bytes."""

    weights: int
    kv_cache: int
    activations: int
    free: int
    total: int


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    phase: str
    """"importing", "loading weights", "allocating KV cache", "warming up"."""
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    max_model_len: int
    """What fits, perhaps less than the checkpoint allows."""
    num_blocks: int
    """Usable ones: the null block is not counted."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    device: str
    dtype: str
    backend: str
    ledger: MemoryLedger


class StartupFailed(msgspec.Struct, frozen=True, tag="startup_failed"):
    """The engine can't start and says why; it exits after this."""

    message: str


class StepBegun(msgspec.Struct, frozen=True, tag="step_begun"):
    """Sent before a step touches the device. If the engine dies before its StepOutput, these are the suspects."""

    step_id: int
    request_ids: list[str] | None
    """None: the same as in the previous StepBegun."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class OutputDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What a step added to one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it where finish_reason is STOP. It is the last of token_ids."""
    num_cached_tokens: int | None = None
    """Prompt tokens taken from the prefix cache; set on the first delta only."""
    logprobs: list[TokenLogprobs] | None = None
    """One an entry of token_ids."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Set once, on the delta that completes the prompt; entry 0 is None."""
    scheduled_time: float | None = None
    """When the request first entered a step; set on the first delta only."""
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges as they are now; counters as growth since the previous StepOutput."""

    num_running: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    """Free to take, but their content can still be hit."""
    blocks_free: int = 0
    step_num_tokens: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up."""
    prefix_cache_hits: int = 0
    """Tokens found."""
    num_preemptions: int = 0
    preemption_recomputed_tokens: int = 0


class StepOutput(msgspec.Struct, frozen=True, tag="step_output"):
    step_id: int
    """-1: no step ran, only the statistics (and perhaps ends of requests) are new."""
    deltas: list[OutputDelta]
    stats: EngineStats
    time: float


class Inspection(msgspec.Struct, frozen=True, tag="inspection"):
    token: int
    payload: bytes
    """JSON: {"pages": {...}, "requests": [...]}."""


Event = Loading | Ready | StartupFailed | StepBegun | StepOutput | Inspection
