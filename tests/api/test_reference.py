"""docs/api.md against the request bodies."""

from pathlib import Path

import pytest

from server.api.schemas import Body, ChatBody, CompletionBody

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_field_is_explained(body: type[Body]) -> None:
    """Guards the page from fields that were added and never explained."""
    assert [name for name in body.model_fields if f"`{name}`" not in PAGE] == []
