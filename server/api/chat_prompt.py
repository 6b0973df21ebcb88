"""Messages -> the prompt's token ids, for chat completions and /tokenize."""

import asyncio
from typing import Any

from server.api.messages import check_messages
from server.api.schemas import ChatTemplateFields
from server.api.service import ENCODE_IN_THREAD_CHARS, RawPrompt, Service
from server.errors import InvalidRequest
from server.tokenizer import ChatTemplate, encode_chat

_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Have fields of their own, so chat_template_kwargs can't set them."""


async def read_chat_prompt(
    body: ChatTemplateFields, service: Service, *, tools: list[dict[str, Any]] | None = None
) -> RawPrompt:
    """tools: as the template shall see them; None where the model must not know of any. Raises InvalidRequest."""
    check_messages(body.messages)
    template = _template(body, service)
    kwargs = body.chat_template_kwargs or {}
    if taken := _FIELDS & kwargs.keys():
        raise InvalidRequest(f"chat_template_kwargs can't set {', '.join(sorted(taken))}", param="chat_template_kwargs")
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1]["role"] != "assistant":
        raise InvalidRequest("continue_final_message needs a last message by the assistant", param="messages")

    def render() -> list[int]:
        return encode_chat(
            service.tokenizer,
            template,
            body.messages,
            tools=tools,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            kwargs=kwargs,
        ).token_ids

    num_chars = sum(_num_chars(message.get("content")) for message in body.messages)
    if body.chat_template is not None or num_chars >= ENCODE_IN_THREAD_CHARS:
        token_ids = await asyncio.to_thread(render)
    else:
        token_ids = render()
    bos = service.tokenizer.bos_token_id
    if body.add_special_tokens and bos is not None and token_ids[:1] != [bos]:
        token_ids.insert(0, bos)
    return RawPrompt(token_ids=token_ids, text=None, param="messages")


def _template(body: ChatTemplateFields, service: Service) -> ChatTemplate:
    template = service.chat_template
    if body.chat_template is not None:
        return (
            ChatTemplate(body.chat_template, isolated=True)
            if template is None
            else template.from_request(body.chat_template)
        )
    if template is None:
        raise InvalidRequest("This model has no chat template; send one as chat_template", param="messages")
    return template


def _num_chars(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(
            len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return 0
