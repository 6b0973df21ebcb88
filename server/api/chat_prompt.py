"""Messages -> the prompt's token ids, for chat completions and /tokenize."""

import asyncio
from collections.abc import Sequence
from typing import Any

from server.api.messages import check_messages
from server.api.schemas import ChatBody, ChatTemplateFields
from server.api.service import ENCODE_IN_THREAD_CHARS, RawPrompt, Service
from server.errors import InvalidRequest, UnsupportedFeature
from server.frontend.tools import begins_in_reasoning, format_of_template, with_tool_instructions
from server.tokenizer import ChatPrompt, ChatTemplate, encode_chat, plain_content

_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Have fields of their own, so chat_template_kwargs can't set them."""
_NO_THOUGHT = "\n</think>\n\n"


async def read_chat_prompt(
    body: ChatTemplateFields, service: Service, *, tools: Sequence[dict[str, Any]] = (), may_think: bool = True
) -> RawPrompt:
    """tools: those that the model shall know of, OpenAI's tool objects. Raises InvalidRequest.

    may_think: False where a grammar leaves no room for it; the prompt then says so, as far as the template can.
    """
    check_messages(body.messages)
    template = chat_template_of(body, service)
    kwargs = _template_kwargs(body, template, may_think=may_think)
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1]["role"] != "assistant":
        raise InvalidRequest("continue_final_message needs a last message by the assistant", param="messages")
    messages = body.messages
    if tools and not _teaches_tools(template, service):
        messages, tools = with_tool_instructions(_with_plain_content(messages), tools), ()

    def check_length(text: str) -> None:
        is_cut = isinstance(body, ChatBody) and body.truncate_prompt_tokens is not None
        if service.client.state.ready is not None and not is_cut:
            service.refuse_too_long(text, param="messages")

    def render() -> ChatPrompt:
        return encode_chat(
            service.tokenizer,
            template,
            messages,
            tools=tools or None,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            kwargs=kwargs,
            check=check_length,
        )

    if body.chat_template is not None:
        prompt = await asyncio.get_running_loop().run_in_executor(service.template_threads, render)
    else:
        prompt = await asyncio.to_thread(render) if _is_long(messages, tools, kwargs) else render()
    token_ids = prompt.token_ids
    bos = service.tokenizer.bos_token_id
    if body.add_special_tokens and bos is not None and token_ids[:1] != [bos]:
        token_ids = [bos, *token_ids]
    text = prompt.text
    if not may_think and begins_in_reasoning(text):
        text += _NO_THOUGHT
        token_ids = [*token_ids, *service.tokenizer.encode(_NO_THOUGHT, add_special_tokens=False)]
    return RawPrompt(token_ids=token_ids, text=text, param="messages")


def chat_template_of(body: ChatTemplateFields, service: Service) -> ChatTemplate:
    template = service.chat_template
    if body.chat_template is not None and template is not None:
        return template.from_request(body.chat_template)
    if body.chat_template is not None:
        return ChatTemplate(body.chat_template, isolated=True)
    if template is None:
        raise InvalidRequest("This model has no chat template; send one as chat_template", param="messages")
    return template


def _teaches_tools(template: ChatTemplate, service: Service) -> bool:
    """Whether the template tells the model of tools, in a way that we, or the operator, know."""
    if service.tool_format is not None and "tools" in template.tool_source:
        return True
    return format_of_template(template.tool_source) is not None


def _with_plain_content(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "content": plain_content(message.get("content"), f"messages[{index}].content")}
        for index, message in enumerate(messages)
    ]


def _template_kwargs(body: ChatTemplateFields, template: ChatTemplate, *, may_think: bool) -> dict[str, Any]:
    """The client's own; where they leave it open, also how much to think, under the template's name for that."""
    kwargs = body.chat_template_kwargs or {}
    if taken := _FIELDS & kwargs.keys():
        raise InvalidRequest(f"chat_template_kwargs can't set {', '.join(sorted(taken))}", param="chat_template_kwargs")
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        return {**_thinking(body.reasoning_effort, template), **kwargs}
    if not may_think and "enable_thinking" in template.source:
        return {"enable_thinking": False, **kwargs}
    return kwargs


def _thinking(effort: str, template: ChatTemplate) -> dict[str, Any]:
    """What the template's author calls it. A model that can't be told is no model with reasoning_effort."""
    if "reasoning_effort" in template.source:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template.source:
        return {"enable_thinking": effort not in ("none", "minimal")}
    if effort == "none":
        return {}
    raise UnsupportedFeature("reasoning_effort is not supported by this model", param="reasoning_effort")


def _is_long(*values: Any) -> bool:
    """Whether JSON values hold long texts or many things: a template may write all of it."""
    left = ENCODE_IN_THREAD_CHARS
    unseen = list(values)
    while unseen and left > 0:
        value = unseen.pop()
        left -= len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            unseen.extend(value.values())
        elif isinstance(value, list | tuple):
            unseen.extend(value)
    return left <= 0
