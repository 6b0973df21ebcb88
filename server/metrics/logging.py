"""One line an event, as text or JSON, to standard error. Never a prompt, never a key."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

_FIELDS = "event_fields"


def configure_logging(*, log_format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Takes over the root logger. log_format: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = name != "uvicorn.access"
    for chatty in ("httpx", "httpcore", "asyncio", "uvicorn.error", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """`event` is a constant; what varies goes into the fields. Fields that are None are left out."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: {k: v for k, v in fields.items() if v is not None}})


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        parts = [f"{at} {record.levelname:<7} {_one_line(record.getMessage())}"]
        parts += [f"{key}={_plain(value)}" for key, value in getattr(record, _FIELDS, {}).items()]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _one_line(text: str) -> str:
    """A client's text in a message can't forge a second line."""
    return text if "\n" not in text and "\r" not in text else text.replace("\r", "\\r").replace("\n", "\\n")
