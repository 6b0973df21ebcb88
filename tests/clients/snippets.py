"""The snippets of docs/clients.md, by the heading above them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
_SHOWN_URL = "http://127.0.0.1:8000"


def snippet(heading: str, *, url: str) -> str:
    """The first block of code under a heading, for the server at this URL."""
    _, _, section = PAGE.read_text().partition(f"\n## {heading}\n")
    found = re.search(r"```\w+\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)
    assert found is not None, f"no code under {heading}"
    assert _SHOWN_URL in found[1], f"the snippet of {heading} asks another server"
    return found[1].replace(_SHOWN_URL, url)
