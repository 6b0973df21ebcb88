"""The legacy prompt field: a text, token ids, or a list of either."""

from typing import Any

from server.api.service import RawPrompt, Service
from server.errors import InvalidRequest


async def read_prompts(
    prompt: Any, *, service: Service, add_special_tokens: bool, may_exceed: bool = False
) -> list[RawPrompt]:
    """One RawPrompt a prompt, in order. may_exceed: the context, since they will be truncated.

    Raises InvalidRequest for every other shape.
    """
    return [
        RawPrompt(token_ids=item, text=None, param="prompt")
        if isinstance(item, list)
        else RawPrompt(
            token_ids=await service.encode(
                item, add_special_tokens=add_special_tokens, param="prompt", may_exceed=may_exceed
            ),
            text=item,
            param="prompt",
        )
        for item in split_prompts(prompt, max_prompts=service.limits.max_batch_prompts)
    ]


def split_prompts(prompt: Any, *, max_prompts: int) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise _wrong_shape()
    if not prompt:
        raise InvalidRequest("prompt is empty", param="prompt")
    if _is_token_ids(prompt):
        return [prompt]
    if len(prompt) > max_prompts:
        raise InvalidRequest(f"{len(prompt)} prompts, at most {max_prompts} in one request", param="prompt")
    if all(isinstance(item, str) for item in prompt) or all(isinstance(i, list) and _is_token_ids(i) for i in prompt):
        return prompt
    raise _wrong_shape()


def _is_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)  # not isinstance: true is no token id


def _wrong_shape() -> InvalidRequest:
    return InvalidRequest(
        "prompt must be a string, token ids, a list of strings or a list of token-id lists", param="prompt"
    )
