"""Log lines: one an event, parseable, unforgeable."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from server.metrics.logging import configure_logging, log_event


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level


def logged(log_format: str, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    configure_logging(log_format=log_format, level=level, stream=stream)
    return logging.getLogger("pageturner.test"), stream


def test_json_lines() -> None:
    """Guards log collectors: every line is one JSON object, exceptions included."""
    logger, stream = logged("json")
    log_event(logger, "request", status=200, path="/x\n{}", skipped=None, odd=object)
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["status"], first["path"]) == ("request", 200, "/x\n{}")
    assert "skipped" not in first
    assert "boom" in second["exception"]


@pytest.mark.parametrize("text", ["a\nb", "a\r\nINFO forged", "with space", ""])
def test_text_lines_cannot_be_forged(text: str) -> None:
    """Guards the log from values that contain a line break."""
    logger, stream = logged("text")
    log_event(logger, "request", path=text)
    logger.info("plain %s", text)
    assert len(stream.getvalue().splitlines()) == 2


def test_level() -> None:
    """Guards --log-level, and uvicorn's own access lines staying off."""
    logger, stream = logged("text", "warning")
    log_event(logger, "request")
    logging.getLogger("uvicorn.access").warning("GET /")
    assert stream.getvalue() == ""
    logger.warning("seen")
    assert "seen" in stream.getvalue()
