"""`pageturner chat`: a conversation in the terminal, with any server that speaks the API."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
from rich.console import Console
from rich.prompt import Prompt

from server.errors import StartupError

_HELP = "An empty line or Ctrl-D ends; /new forgets the conversation; Ctrl-C stops an answer."


def run(
    *,
    url: str,
    model: str | None,
    api_key: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    console: Console | None = None,
) -> int:
    """Reads lines and streams answers until the input ends; 1 where the last one got no answer.

    Raises StartupError where no server answers.
    """
    console = console or Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=base_url, headers=headers, timeout=httpx.Timeout(300, connect=5)) as client:
        model = model or _first_model(client, url)
        console.print(f"[bold]{model}[/] at {url}. {_HELP}", highlight=False)
        options: dict[str, Any] = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        options = {key: value for key, value in options.items() if value is not None}
        start = [{"role": "system", "content": system}] if system else []
        messages = list(start)
        failed = False
        while line := _ask(console):
            if line == "/new":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": line})
            answer = _say(console, client, {**options, "messages": messages, "stream": True})
            failed = not answer
            if answer:
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()
    return int(failed)


def _first_model(client: httpx.Client, url: str) -> str:
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise StartupError(f"{url} answers {error.response.status_code}: {_message(error.response)}") from None
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise StartupError(f"no server answers at {url} ({error}); start one with `pageturner serve`") from None


def _ask(console: Console) -> str:
    try:
        line = Prompt.ask("[bold cyan]you[/]", console=console, default="", show_default=False).strip()
        return line.encode("utf-8", "replace").decode()  # what was no UTF-8 came as lone surrogates
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _say(console: Console, client: httpx.Client, body: dict[str, Any]) -> str:
    """Prints the answer as it comes and returns it; Ctrl-C keeps what has come so far."""
    pieces: list[str] = []
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                console.print(f"[red]{response.status_code}:[/] {_message(response)}", highlight=False)
                return ""
            with suppress(KeyboardInterrupt):
                for piece in _content(response.iter_lines()):
                    pieces.append(piece)
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    except httpx.HTTPError as error:
        console.print(f"[red]the connection broke:[/] {error}", highlight=False)
    console.print()
    return "".join(pieces)


def _content(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        data = line.removeprefix("data: ")
        if not line.startswith("data: ") or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            yield f"\n[{event['error']['message']}]"
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                yield text


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:200]
