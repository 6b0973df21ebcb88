"""Renders a chat template that came with a request, in a process of its own with limits that the kernel enforces.

A sandbox inside the server can bound what a template reaches, but not everything it may compute: lists that hold one
another many times over compare and print in exponential time, inside one call. So such a template gets a child process
for as long as it takes. Costs the start of a Python process, about 0.1 s.

The child reads {"source", "variables", "param", "cpu_s", "max_chars"} as JSON and answers {"text"} or {"error"}.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.config import bare_environment
from server.errors import InvalidRequest
from server.tokenizer.template_engine import TemplateLimits, render_template

_MAX_MEMORY = 1 << 30
_GRACE_S = 3.0
"""Wall time for the child's start, and for a machine that is busy."""


def render_isolated(source: str, variables: Mapping[str, Any], *, limits: TemplateLimits, param: str) -> str:
    """render_template() in a child process. Blocks: call it from a thread that may wait."""
    job = {
        "source": source,
        "variables": dict(variables),
        "param": param,
        "cpu_s": limits.cpu_s,
        "max_chars": limits.max_chars,
    }
    root = Path(__file__).resolve().parents[2]
    try:
        child = subprocess.run(
            [sys.executable, "-c", "from server.tokenizer.template_worker import main; main()"],
            input=json.dumps(job).encode(),
            capture_output=True,
            timeout=3 * limits.cpu_s + _GRACE_S,
            check=False,
            cwd=root,
            env=bare_environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise InvalidRequest("the chat template takes too long", param=param) from error
    if child.returncode != 0:
        raise InvalidRequest("the chat template needs too much time or memory", param=param)
    answer: dict[str, str] = json.loads(child.stdout)
    if "error" in answer:
        raise InvalidRequest(answer["error"], param=param)
    return answer["text"]


def main() -> None:
    """The child. Ends with a status other than 0 where a limit of the kernel stops it."""
    job = json.load(sys.stdin.buffer)
    limits = TemplateLimits(cpu_s=job["cpu_s"], max_chars=job["max_chars"])
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_s = int(limits.cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    try:
        answer = {"text": render_template(job["source"], job["variables"], limits=limits, param=job["param"])}
    except InvalidRequest as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer))
