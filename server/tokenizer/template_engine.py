"""Jinja as chat templates use it, bounded in what it can reach, how long it runs and how much it writes.

The dialect is that of transformers' apply_chat_template: trim_blocks and lstrip_blocks, `break` and `continue`, the
`generation` tag, the `tojson` filter without HTML escapes, raise_exception() and strftime_now().

The bounds are for templates that come with a model: a careless or hostile one fails with an error. They count the
thread's CPU time on every line of Python that the template runs, and the size of what it multiplies and writes. A
template from a request gets a process of its own on top of that: see template_worker.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any

from jinja2 import Environment, Template, TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.errors import InvalidRequest

_MAX_SOURCE_CHARS = 1 << 20
_MAX_INT_BITS = 1 << 12
_MAX_FORMAT_CHARS = 128
_WIDE_FORMAT = re.compile(r"\d{4}|\*")
_EVENTS_PER_CLOCK = 128


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """cpu_s: seconds of CPU for compiling and rendering. max_chars: of the output, and of any product on the way."""

    cpu_s: float = 1.0
    max_chars: int = 16 << 20


class TemplateFailed(Exception):
    """The template said so itself, through raise_exception(), or ran into a limit."""


def render_template(source: str, variables: Mapping[str, Any], *, limits: TemplateLimits, param: str) -> str:
    """Renders `source`. Whatever goes wrong ends as InvalidRequest with this param."""
    if len(source) > _MAX_SOURCE_CHARS:
        raise InvalidRequest(f"the chat template is longer than {_MAX_SOURCE_CHARS} characters", param=param)
    try:
        with _cpu_limit(limits.cpu_s):
            template = compile_template(source, limits)
            chunks, num_chars = [], 0
            for chunk in template.generate(variables):
                num_chars += len(chunk)
                if num_chars > limits.max_chars:
                    raise TemplateFailed(f"it writes more than {limits.max_chars} characters")
                chunks.append(chunk)
    except TemplateFailed as error:
        raise InvalidRequest(f"the chat template refuses this conversation: {error}", param=param) from error
    except TemplateError as error:
        raise InvalidRequest(f"the chat template failed: {_brief(error)}", param=param) from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the chat template failed: {type(error).__name__}: {_brief(error)}", param=param
        ) from error
    except SyntaxError as error:  # nested too deeply for Python's compiler
        raise InvalidRequest("the chat template is too complex", param=param) from error
    return "".join(chunks)


@lru_cache(maxsize=16)
def compile_template(source: str, limits: TemplateLimits) -> Template:
    """The compiled template. Raises jinja2.TemplateSyntaxError and the like."""
    return _BoundedEnvironment(limits).from_string(source)


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:300]


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TemplateFailed from within, once this thread has used so much CPU time.

    A trace function sees every line that runs in the template and in Jinja's filters, empty loops included. It raises
    there. A debugger's or a coverage tool's own trace function is put back afterwards.
    """
    deadline = time.thread_time() + seconds
    events = 0

    def trace(_frame: FrameType, _event: str, _arg: object) -> Callable[..., Any]:
        nonlocal events
        events += 1
        if events % _EVENTS_PER_CLOCK == 0 and time.thread_time() > deadline:
            raise TemplateFailed(f"it needs more than {seconds:g} s")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training: here it is just its content."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Operators whose result can be far larger than their operands are checked first."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
        self._limits = limits
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Jinja's own prints as nothing, and fails only where it is used further."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__!r} is out of bounds")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TemplateFailed("it formats text to a great width")
        if operator == "*":
            self._check_product(left, right)
        if operator == "**" and (
            not isinstance(left, int | float)
            or not isinstance(right, int | float)
            or abs(right) * _bits(left) > _MAX_INT_BITS
        ):
            raise TemplateFailed("it computes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        for sized, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(sized, str | list | tuple | bytes):
                if len(sized) * count > self._limits.max_chars:
                    raise TemplateFailed(f"it makes a text or list of more than {self._limits.max_chars} entries")
            elif isinstance(sized, int) and _bits(sized) > _MAX_INT_BITS:
                raise TemplateFailed("it computes a number that is too large")


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 64


def _raise_exception(message: object) -> None:
    raise TemplateFailed(str(message)[:1000])


def _strftime_now(format_: str) -> str:
    if len(format_) > _MAX_FORMAT_CHARS or any(char.isdigit() for char in format_):
        raise TemplateFailed("strftime_now takes a short format without widths")
    return datetime.now().strftime(format_)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes <, >, & and ' as for HTML, which no model was trained on."""
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateFailed("tojson takes an indent of 0 to 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
