import subprocess
import sys

import pytest

from tests.clients.snippets import snippet

COMMANDS = {
    "openai, Python": [sys.executable, "-c"],
    "anthropic, Python": [sys.executable, "-c"],
    "curl": ["bash", "-ec"],
}


@pytest.mark.parametrize("heading", COMMANDS)
def test_a_snippet_runs_as_it_stands(server, heading):
    """A visitor copies a snippet from docs/clients.md and gets an error."""
    command = [*COMMANDS[heading], snippet(heading, url=server.url)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout, done.stdout  # curl ends well where the server refused
