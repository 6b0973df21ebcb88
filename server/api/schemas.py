"""Request bodies. Types are strict: "hot" is no temperature, true is no number. frontend.params checks the ranges."""

import logging
import types
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.api.unsupported import EVERYWHERE, Harmless, refuse_unsupported
from server.errors import InvalidRequest
from server.frontend.params import SamplingOptions
from server.metrics.logging import log_event
from server.protocol import GrammarSpec

logger = logging.getLogger("pageturner.api")

_MAX_UNKNOWN_NAMES = 256
_seen_unknown: set[str] = set()


class Body(BaseModel):
    """A JSON object. Unknown fields are ignored, and logged once each."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[Harmless] = EVERYWHERE
    """Fields that are known and not honored."""


_B = TypeVar("_B", bound=Body)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: Any = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    timeout: float | None = None
    user: str | None = None

    def sampling_options(
        self, *, max_tokens: int | None, logprobs: int | None, grammar: GrammarSpec | None
    ) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=self.stop_token_ids,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            grammar=grammar,
        )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Only together with include_usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: Annotated[
        Any,
        Field(
            description="Text, token ids, or a list of either",
            json_schema_extra={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    {"type": "array", "items": {"type": "integer"}},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ]
            },
        ),
    ]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TemplateOptions(Body):
    """How messages become a prompt."""

    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatTemplateFields(TemplateOptions):
    messages: list[dict[str, Any]]


class ChatBody(GenerationBody, ChatTemplateFields):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None
    metadata: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class TokenizeBody(TemplateOptions):
    """Either prompt or messages; of a prompt, add_special_tokens is the only option."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    def as_chat(self) -> ChatTemplateFields:
        return ChatTemplateFields.model_validate(
            {name: getattr(self, name) for name in ChatTemplateFields.model_fields}
        )


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def parse(body_type: type[_B], body: bytes) -> _B:
    """Raises InvalidRequest that names the field, also for what is no JSON, no UTF-8 or no object."""
    try:
        parsed = body_type.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, body_type) from None
    unknown = parsed.model_extra or {}
    refuse_unsupported(unknown, body_type.unsupported)
    if isinstance(parsed, GenerationBody) and parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")
    for name in unknown.keys() - body_type.unsupported.keys():
        _note_unknown(name)
    return parsed


def invalid_request(error: ValidationError, body_type: type[Body]) -> InvalidRequest:
    """What the first of pydantic's errors says, with the field as the client spells it."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return InvalidRequest("The body must be a JSON object")
    name = str(first["loc"][0])
    # Of a union there is an error for each kind, with the kind's name in its location; the deepest one came closest.
    num_hidden = 1 + _has_kinds(body_type, name)
    found = [(e["loc"][num_hidden:], e["msg"]) for e in errors if e["loc"][0] == name]
    deepest = max((loc for loc, _ in found), key=len)
    param = name + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in deepest)
    if first["type"] == "missing":
        return InvalidRequest(f"{param} is missing", param=param)
    messages = dict.fromkeys(message for loc, message in found if loc == deepest)
    listed = " or ".join(messages).replace(f" or {_SHOULD_BE}", " or ")
    return InvalidRequest(f"{param}: {listed.removeprefix('Value error, ')}", param=param)


_SHOULD_BE = "Input should be "


def _has_kinds(body_type: type[Body], name: str) -> bool:
    """Whether a field may be of several types, null aside."""
    field = body_type.model_fields.get(name)
    if field is None or get_origin(field.annotation) not in (types.UnionType, Union):
        return False
    return sum(kind is not type(None) for kind in get_args(field.annotation)) > 1


def _note_unknown(name: str) -> None:
    if name not in _seen_unknown and len(_seen_unknown) < _MAX_UNKNOWN_NAMES:
        _seen_unknown.add(name)
        log_event(logger, "unknown request field ignored", field=name[:80])
