"""Why a request ended. The wire values are OpenAI's."""

import enum


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"
