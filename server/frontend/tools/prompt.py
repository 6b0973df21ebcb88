"""Tells a model of its tools where its chat template does not."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INSTRUCTIONS = """You can call functions to help with the user's request. These are their signatures:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON, in this form:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def with_tool_instructions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation with a system message that lists the tools (OpenAI's tool objects) in the Hermes format.

    Calls and their results in the conversation become text, which any template can render.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    plain = [_as_text(message) for message in messages]
    if plain and plain[0].get("role") in ("system", "developer"):
        content = plain[0].get("content")
        parts = [content] if isinstance(content, str) else list(content or ())
        plain[0] = {**plain[0], "content": "\n\n".join([*(_text(part) for part in parts), instructions])}
        return plain
    return [{"role": "system", "content": instructions}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = message.get("content")
        parts = [content] if isinstance(content, str) else list(content or ())
        result = "\n".join(_text(part) for part in parts)
        return {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    texts = [_text(message["content"])] if isinstance(message.get("content"), str) else []
    for call in calls:
        function = call.get("function", {})
        arguments = function.get("arguments") or "{}"
        head = f'{{"name": {json.dumps(function.get("name"))}, "arguments": '
        texts.append(f"<tool_call>\n{head}{arguments}}}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(texts)}


def _text(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text", "")) if isinstance(part, Mapping) else ""
