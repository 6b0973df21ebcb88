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

    Calls and their results in the conversation become text, which any template can render. messages: with content as
    text, as plain_content makes it.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    plain = [_as_text(message) for message in messages]
    if plain and plain[0].get("role") in ("system", "developer"):
        plain[0] = {**plain[0], "content": "\n\n".join(filter(None, (plain[0]["content"], instructions)))}
        return plain
    return [{"role": "system", "content": instructions}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call.get("function", {})
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        head = f'{{"name": {json.dumps(function.get("name"))}, "arguments": '
        texts.append(f"<tool_call>\n{head}{arguments}}}\n</tool_call>")
    return {"role": "assistant", "content": "\n".join(texts)}
