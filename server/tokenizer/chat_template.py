"""Conversations to prompts, through the model's own template."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

from server.errors import InvalidRequest
from server.tokenizer.template_engine import TemplateLimits, render_template
from server.tokenizer.template_worker import render_isolated
from server.weights.locate import ModelFiles

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_RESERVED = frozenset(
    {"messages", "tools", "chat_template", "conversation", "tokenize", "raise_exception", "strftime_now"}
)

Message = Mapping[str, Any]


class ChatTemplate:
    """A Jinja chat template. Written by: nobody after construction.

    source: the template. special_tokens: bos_token, eos_token and the like, which templates name as variables.
    tool_source: used instead where a request has tools; some models have two. isolated: the source is a stranger's, so
    it is rendered in a process of its own (render() then blocks for about 0.1 s).
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        isolated: bool = False,
        limits: TemplateLimits | None = None,
    ) -> None:
        self.source = source
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens or {})
        self._isolated = isolated
        self._limits = limits or TemplateLimits()

    @classmethod
    def of_model(cls, files: ModelFiles, special_tokens: Mapping[str, str]) -> Self | None:
        """The model's own, or None: a base model has none."""
        if files.chat_template is None:
            return None
        return cls(files.chat_template, special_tokens=special_tokens, tool_source=files.chat_templates.get("tool_use"))

    def from_request(self, source: str) -> "ChatTemplate":
        """A template that a client sent, with this one's special tokens."""
        return ChatTemplate(source, special_tokens=self._special_tokens, isolated=True, limits=self._limits)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text, control tokens spelled out.

        messages: as OpenAI has them; content may be a string, a list of text parts (joined by newlines) or null.
        continue_final_message: the prompt ends inside the last message, which the model goes on with. kwargs: more
        variables for the template (the request's chat_template_kwargs). Raises InvalidRequest.
        """
        param = "chat_template" if self._isolated else "messages"
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if reserved := _RESERVED & kwargs.keys():
            raise InvalidRequest(f"can't set {', '.join(sorted(reserved))}", param="chat_template_kwargs")
        source = self.tool_source if tools else self.source
        plain = plain_messages(messages, keep_developer="developer" in source)
        mark = f"end{secrets.token_hex(8)}"
        if continue_final_message:
            plain[-1]["content"] += mark
        variables = {
            **self._special_tokens,
            "messages": plain,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **kwargs,
        }
        render = render_isolated if self._isolated else render_template
        text = render(source, variables, limits=self._limits, param=param)
        if not continue_final_message:
            return text
        head, found, _ = text.rpartition(mark)
        if not found:
            raise InvalidRequest("the chat template leaves out the final message", param="continue_final_message")
        return head


def plain_messages(messages: Sequence[Message], *, keep_developer: bool = False) -> list[dict[str, Any]]:
    """Messages as templates expect them: content a string, tool-call arguments an object.

    keep_developer: the template knows the role "developer"; else it becomes "system", its older name.
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest("a message must be an object with a role", param=where)
        copy = dict(message)
        copy["content"] = plain_content(message.get("content"), f"{where}.content")
        if copy["role"] == "developer" and not keep_developer:
            copy["role"] = "system"
        if isinstance(message.get("tool_calls"), list):
            copy["tool_calls"] = [_plain_tool_call(call) for call in message["tool_calls"]]
        elif "tool_calls" in message:
            del copy["tool_calls"]
        plain.append(copy)
    return plain


def plain_content(content: Any, where: str) -> str:
    """A message's content as text, its parts joined by newlines. Raises InvalidRequest for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("content must be a string, a list of parts or null", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get(_TEXT_PARTS[kind]), str):
            texts.append(part[_TEXT_PARTS[kind]])
        elif isinstance(kind, str) and kind not in _TEXT_PARTS:
            raise InvalidRequest(f"content of type {kind!r} is not supported: text is", param=f"{where}[{index}]")
        else:
            raise InvalidRequest('a part must be {"type": "text", "text": "..."}', param=f"{where}[{index}]")
    return "\n".join(texts)


def _plain_tool_call(call: Any) -> Any:
    """The API has arguments as JSON text; templates write them with tojson, so they need the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):  # also numbers of more digits than Python reads
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call
