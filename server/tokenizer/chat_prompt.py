"""Conversations to token ids, such that nobody's text becomes a control token.

A user may write "<|im_end|>". In the prompt it must stay the ten characters it is, while the template's own
"<|im_end|>" is the control token. Where no message holds such a spelling, the rendered text is simply encoded. Where
one does, it goes through the template as a placeholder, and comes back as text that the tokenizer can't mistake.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.tokenizer.chat_template import ChatTemplate, Message
from server.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """text: the rendered template. token_ids: what the model reads; no BOS is added, templates write their own."""

    text: str
    token_ids: list[int]


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    check: Callable[[str], None] = lambda text: None,
) -> ChatPrompt:
    """Renders and encodes a conversation; the arguments are ChatTemplate.render's. Raises InvalidRequest.

    check: gets the rendered text, and raises where it is not worth encoding.
    """
    guard = _Guard(tokenizer.special_spellings)
    text = template.render(
        guard.hide(messages),
        tools=guard.hide(tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **guard.hide(dict(kwargs or {})),
    )
    shown = guard.reveal(text)
    check(shown)
    if not guard.hidden:
        return ChatPrompt(text, tokenizer.encode(text, add_special_tokens=False))
    return ChatPrompt(shown, tokenizer.encode_guarded(text, guard.hidden))


class _Guard:
    """Replaces control-token spellings by placeholders, deep in a JSON value. hidden: placeholder -> spelling."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self.hidden: dict[str, str] = {}
        self._spellings = spellings
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self._nonce = secrets.token_hex(8)

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._placeholder, value) if self._pattern is not None else value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(entry) for entry in value]
        return value

    def reveal(self, text: str) -> str:
        for placeholder, spelling in self.hidden.items():
            text = text.replace(placeholder, spelling)
        return text

    def _placeholder(self, match: re.Match[str]) -> str:
        placeholder = f"pt{self._nonce}x{self._spellings.index(match[0])}q"
        self.hidden[placeholder] = match[0]
        return placeholder
