"""A Responses request -> the chat request that says the same."""

from typing import Any, ClassVar

from pydantic import ValidationError

from server.api.schemas import Body, ChatBody, invalid_request
from server.api.unsupported import RESPONSES, Harmless
from server.errors import InvalidRequest, UnsupportedFeature

LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset({LOGPROBS, "reasoning.encrypted_content"})
"""Reasoning comes in the clear here, so there is nothing to encrypt for the client to carry."""


class ResponsesBody(Body):
    unsupported: ClassVar[Harmless] = RESPONSES
    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    truncation: str | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    stream_options: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_SAME_IN_CHAT = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "top_k", "min_p", "repetition_penalty", "seed",
    "stop", "ignore_eos", "cache_salt", "priority", "timeout", "chat_template_kwargs",
)  # fmt: skip


def as_chat_body(body: ResponsesBody) -> ChatBody:
    """Raises InvalidRequest for what is wrong, UnsupportedFeature for what needs a server that remembers."""
    _refuse_unsupported(body)
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME_IN_CHAT}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    if LOGPROBS in (body.include or ()):
        chat["logprobs"], chat["top_logprobs"] = True, body.top_logprobs
    elif body.top_logprobs:
        raise InvalidRequest(f"top_logprobs needs include = [{LOGPROBS!r}]", param="top_logprobs")
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    chat["tool_choice"] = _tool_choice(body.tool_choice)
    chat["response_format"] = _response_format(body.text)
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.get("effort")
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        raise invalid_request(error, ChatBody) from None


def _refuse_unsupported(body: ResponsesBody) -> None:
    for name, harmless in (
        ("background", (False,)),
        ("previous_response_id", ()),
        ("conversation", ()),
        ("prompt", ()),
        ("max_tool_calls", ()),
        ("store", (False,)),
        ("truncation", ("disabled",)),
        ("service_tier", ("auto", "default")),
    ):
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise UnsupportedFeature(f"{name} is not supported: this server keeps no responses", param=name)
    for field, name, harmless in (
        (body.text, "text.verbosity", ("medium",)),
        (body.reasoning, "reasoning.summary", ("auto",)),
        (body.reasoning, "reasoning.generate_summary", ("auto",)),
        (body.reasoning, "reasoning.context", ("auto",)),
        (body.reasoning, "reasoning.mode", ("standard",)),
    ):
        value = (field or {}).get(name.partition(".")[2])
        if value is not None and value not in harmless:
            raise UnsupportedFeature(f"{name} is not supported here", param=name)
    for name in body.include or ():
        if name not in _INCLUDES:
            raise UnsupportedFeature(f"include: {name[:80]!r} is not supported", param="include")


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for number, item in enumerate(body.input):
        _add_item(messages, item, f"input[{number}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """The model's own items that follow each other (reasoning, message, calls) are one assistant message in a chat."""
    match item.get("type", "message"):
        case "message":
            if item.get("role") == "assistant":
                _assistant_turn(messages)["content"] = item.get("content")
            else:
                messages.append({"role": item.get("role"), "content": item.get("content")})
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
            }
            _assistant_turn(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        case "reasoning":
            content = item.get("content") or []
            if not isinstance(content, list):
                raise InvalidRequest(f"{where}.content must be a list", param=f"{where}.content")
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            if texts:
                turn = _assistant_turn(messages)
                turn["reasoning_content"] = "".join(text for text in texts if isinstance(text, str))
        case other:
            raise UnsupportedFeature(f"{where}.type: {str(other)[:40]!r} is not supported", param=f"{where}.type")


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedFeature(f"{where}.type: only functions can be called here", param=f"{where}.type")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: dict[str, Any] | None) -> Any:
    given = (text or {}).get("format")
    if isinstance(given, dict) and given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}
    return given
