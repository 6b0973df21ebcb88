"""docs/api.md and the official clients against the request bodies."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anthropic.resources.beta.messages import Messages as BetaMessages
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from server.api.anthropic_input import CountTokensBody, MessagesBody
from server.api.responses_input import ResponsesBody
from server.api.schemas import Body, ChatBody, CompletionBody

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
OF_THE_CALL = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "betas"}


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_field_is_explained(body: type[Body]) -> None:
    """Guards the page from fields that were added and never explained."""
    assert [name for name in body.model_fields if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize(
    ("call", "body"),
    [
        (Completions.create, CompletionBody),
        (ChatCompletions.create, ChatBody),
        (Responses.create, ResponsesBody),
        (Messages.create, MessagesBody),
        (BetaMessages.create, MessagesBody),
        (Messages.count_tokens, CountTokensBody),
    ],
    ids=["completions", "chat", "responses", "messages", "beta messages", "count_tokens"],
)
def test_every_parameter_of_the_clients_is_known(call: Callable[..., Any], body: type[Body]) -> None:
    """Regression: parameters of the official clients (output_format, moderation) that were dropped in silence."""
    known = body.model_fields.keys() | body.unsupported.keys() | OF_THE_CALL
    assert sorted(inspect.signature(call).parameters.keys() - known) == []
