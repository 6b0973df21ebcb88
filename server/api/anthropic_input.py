"""An Anthropic Messages request -> the chat request that says the same."""

from typing import Any, ClassVar

from pydantic import ValidationError

from server.api.schemas import Body, ChatBody, invalid_request
from server.api.structured import as_json
from server.api.unsupported import MESSAGES, Harmless
from server.errors import InvalidRequest, UnsupportedFeature


class CountTokensBody(Body):
    unsupported: ClassVar[Harmless] = MESSAGES
    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountTokensBody):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None


def as_chat_body(body: CountTokensBody) -> ChatBody:
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
        if body.tool_choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    if thinking_of(body) == "disabled":
        chat["reasoning_effort"] = "none"
    chat |= _output_config(body)
    if isinstance(body, MessagesBody):
        chat |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        raise invalid_request(error, ChatBody) from None


def thinking_of(body: CountTokensBody) -> str | None:
    """ "enabled", "disabled", or "adaptive", which leaves it to the model. None: nothing was said."""
    if body.thinking is None:
        return None
    kind = body.thinking.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidRequest("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    if body.thinking.get("display") not in (None, "summarized", "omitted"):
        raise InvalidRequest("thinking.display must be summarized or omitted", param="thinking.display")
    return str(kind)


def _output_config(body: CountTokensBody) -> dict[str, Any]:
    """A schema for the answer, which older clients send as output_format, and how hard to think."""
    config = dict(body.output_config or {})
    if body.output_format is not None:
        if config.get("format") is not None:
            raise InvalidRequest("output_format and output_config.format exclude each other", param="output_format")
        config["format"] = body.output_format
    given = {name: value for name, value in config.items() if value is not None}
    if unknown := given.keys() - {"format", "effort"}:
        name = f"output_config.{min(unknown)[:80]}"
        raise UnsupportedFeature(f"{name} is not supported", param=name)
    chat: dict[str, Any] = {}
    if "effort" in given:
        chat["reasoning_effort"] = given["effort"]
    if "format" in given:
        wanted = given["format"]
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise InvalidRequest("output_config.format.type must be json_schema", param="output_config.format.type")
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": wanted.get("schema")},
        }
    return chat


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": body.system})
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
        if isinstance(content, list):
            read = _assistant_blocks if role == "assistant" else _user_blocks
            messages += read(content, f"{where}.content")
        else:
            messages.append({"role": role, "content": content})
    return messages


def _user_blocks(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Results of tools come first, as messages of their own; what else the user says follows."""
    results, parts = [], []
    for number, block in enumerate(blocks):
        match _kind(block, f"{where}[{number}]"):
            case "text":
                parts.append({"type": "text", "text": block.get("text")})
            case "tool_result":
                content = block.get("content")
                results.append(
                    {
                        "role": "tool",
                        "tool_call_id": block.get("tool_use_id"),
                        "content": "" if content is None else content,
                    }
                )
            case kind:
                raise _unsupported(kind, f"{where}[{number}]")
    return results + ([{"role": "user", "content": parts}] if parts or not results else [])


def _assistant_blocks(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts = []
    for number, block in enumerate(blocks):
        match _kind(block, f"{where}[{number}]"):
            case "text":
                texts.append(block.get("text"))
            case "tool_use":
                function = {"name": block.get("name"), "arguments": as_json(block.get("input", {}))}
                call = {"id": block.get("id"), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
            case "redacted_thinking":
                pass
            case kind:
                raise _unsupported(kind, f"{where}[{number}]")
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where}: text must be a string", param=where)
    message["content"] = "\n".join(texts) if texts else None
    return [message]


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    kind: str = block["type"]
    return kind


def _unsupported(kind: str, where: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{where}.type: {kind[:40]!r} is not supported: text and tools are", param=f"{where}.type"
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise UnsupportedFeature(f"{where}.type: only the client's own tools can be called", param=f"{where}.type")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> Any:
    match choice.get("type"):
        case "auto" | "none" as same:
            return same
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case _:
            raise InvalidRequest("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
