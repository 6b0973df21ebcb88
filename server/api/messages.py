"""What a chat's messages must hold before the template may see them."""

import re
from collections.abc import Sequence
from typing import Any

from server.errors import InvalidRequest

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Models are tuned with roles of their own; the template says whether it knows one. No role may hold markup."""
_MAX_MESSAGES = 10_000
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content")


def check_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Raises InvalidRequest that names the message's field. The tokenizer's chat_template checks what content holds."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidRequest(f"{len(messages)} messages, at most {_MAX_MESSAGES}", param="messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest(
            f"{where}.role must be a name such as system, user, assistant or tool", param=f"{where}.role"
        )
    if message.get("content") is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    for name in _TEXT_FIELDS:
        if not isinstance(message.get(name), str | None):
            raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    tool_calls = message.get("tool_calls")
    if tool_calls is None:
        return
    if not isinstance(tool_calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    for number, call in enumerate(tool_calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            param = f"{where}.tool_calls[{number}].function.name"
            raise InvalidRequest(f"{param} must be a string", param=param)
        if not isinstance(function.get("arguments", ""), str | dict):
            param = f"{where}.tool_calls[{number}].function.arguments"
            raise InvalidRequest(f"{param} must be a string", param=param)
