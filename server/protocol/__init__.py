"""What crosses the border between the API process and the engine. No torch, no web stack."""

from server.protocol.finish import FinishReason
from server.protocol.messages import (
    AbortRequests,
    Command,
    EngineStats,
    Event,
    GenerateRequest,
    Inspect,
    Inspection,
    Loading,
    MemoryLedger,
    OutputDelta,
    Ready,
    ResetPrefixCache,
    Shutdown,
    StartupFailed,
    StepBegun,
    StepOutput,
    TokenLogprobs,
)
from server.protocol.sampling import GREEDY_TEMPERATURE, GrammarSpec, SamplingParams

__all__ = [
    "GREEDY_TEMPERATURE",
    "AbortRequests",
    "Command",
    "EngineStats",
    "Event",
    "FinishReason",
    "GenerateRequest",
    "GrammarSpec",
    "Inspect",
    "Inspection",
    "Loading",
    "MemoryLedger",
    "OutputDelta",
    "Ready",
    "ResetPrefixCache",
    "SamplingParams",
    "Shutdown",
    "StartupFailed",
    "StepBegun",
    "StepOutput",
    "TokenLogprobs",
]
