"""Tool calls in a model's text: each family's format, whole and in pieces."""

import json
import random
from itertools import count, pairwise

import pytest

from server.frontend.tools import (
    HERMES,
    LLAMA3,
    MISTRAL,
    AnswerParser,
    ParsedDelta,
    ReasoningSplitter,
    ToolFormat,
    ToolParser,
    format_of_template,
)

Calls = list[tuple[str, str]]
NAMES = ("weather", "time_of.day-2")


def make_parser(format_: ToolFormat, *, parallel: bool = True, thinking: bool = False) -> AnswerParser:
    ids = count()
    tools = ToolParser(format_, tool_names=NAMES, parallel=parallel, new_id=lambda: f"id{next(ids)}")
    return AnswerParser(reasoning=ReasoningSplitter() if thinking else None, tools=tools)


def add_up(deltas: list[ParsedDelta]) -> tuple[str, str, Calls]:
    """What a client puts together from the deltas; checks that each call is announced once, before its arguments."""
    calls: Calls = []
    ids = []
    for delta in deltas:
        for part in delta.tool_calls:
            if part.name is not None:
                assert part.index == len(calls)
                assert part.arguments == ""
                calls.append((part.name, ""))
                ids.append(part.id)
            else:
                assert part.index == len(calls) - 1
                assert part.id is None
                calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    assert ids == [f"id{index}" for index in range(len(calls))]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


def parse(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, Calls]:
    return add_up([*(parser.push(piece) for piece in pieces), parser.finish()])


def one(arguments: str, name: str = "weather", key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


CITY = '{"city": "Séoul \\"}]</tool_call>", "days": [1, {"a": null}]}'
CASES: list[tuple[str, ToolFormat, str, str, Calls]] = [
    ("plain", HERMES, "Hello there.\n", "Hello there.\n", []),
    ("hermes", HERMES, f"<tool_call>\n{one(CITY)}\n</tool_call>", "", [("weather", CITY)]),
    ("hermes, text in front", HERMES, f"Sure.\n<tool_call>{one('{}')}</tool_call>", "Sure.", [("weather", "{}")]),
    (
        "hermes, two calls",
        HERMES,
        f"<tool_call>\n{one('{}')}\n</tool_call>\n<tool_call>\n{one(CITY, 'time_of.day-2')}\n</tool_call>",
        "",
        [("weather", "{}"), ("time_of.day-2", CITY)],
    ),
    ("hermes, text behind", HERMES, f"<tool_call>{one('{}')}</tool_call>\n\nDone.", "Done.", [("weather", "{}")]),
    (
        "hermes, a list",
        HERMES,
        f"<tool_call>[{one('{}')}, {one('{}')}]</tool_call>",
        "",
        [("weather", "{}"), ("weather", "{}")],
    ),
    ("hermes, not closed", HERMES, f"<tool_call>\n{one('{}')}", "", [("weather", "{}")]),
    (
        "hermes, cut in the arguments",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"a": "b',
        "",
        [("weather", '{"a": "b')],
    ),
    ("hermes, cut in the name", HERMES, 'A <tool_call>{"name": "wea', 'A <tool_call>{"name": "wea', []),
    ("hermes, no JSON", HERMES, "<tool_call>nonsense</tool_call> b", "<tool_call>nonsense</tool_call> b", []),
    ("hermes, no name", HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes, half a marker", HERMES, "a < b <tool", "a < b <tool", []),
    ("arguments first", HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("no arguments", HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("null arguments", HERMES, f"<tool_call>{one('null')}</tool_call>", "", [("weather", "{}")]),
    (
        "arguments as text",
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "more keys",
        HERMES,
        '<tool_call>{"id": 7, "name": "f", "arguments": {}, "x": [1]}</tool_call>',
        "",
        [("f", "{}")],
    ),
    ("llama", LLAMA3, one(CITY, key="parameters"), "", [("weather", CITY)]),
    ("llama, marked", LLAMA3, f"<|python_tag|>{one('{}', 'other', 'parameters')}", "", [("other", "{}")]),
    ("llama, two calls", LLAMA3, f"{one('{}')}; {one('{}')}", "", [("weather", "{}"), ("weather", "{}")]),
    ("llama, plain", LLAMA3, " Hello {you}.", " Hello {you}.", []),
    ("llama, other JSON", LLAMA3, '{"answer": {"name": "weather"}} ok', '{"answer": {"name": "weather"}} ok', []),
    ("llama, unknown tool", LLAMA3, '\n{"name": "Bob", "age": 5}', '\n{"name": "Bob", "age": 5}', []),
    ("mistral", MISTRAL, f"[TOOL_CALLS] [{one(CITY)}, {one('{}')}]", "", [("weather", CITY), ("weather", "{}")]),
    ("mistral, text in front", MISTRAL, f"Let me see. [TOOL_CALLS][{one('{}')}]", "Let me see.", [("weather", "{}")]),
    ("mistral, named", MISTRAL, f"[TOOL_CALLS]weather[ARGS]{CITY}", "", [("weather", CITY)]),
    (
        "mistral, named twice",
        MISTRAL,
        f"[TOOL_CALLS]weather{CITY}[TOOL_CALLS]time_of.day-2[ARGS]{{}}",
        "",
        [("weather", CITY), ("time_of.day-2", "{}")],
    ),
    ("mistral, plain list", MISTRAL, "[1, 2] and [TOOL", "[1, 2] and [TOOL", []),
]
IDS = [case[0] for case in CASES]


@pytest.mark.parametrize(("_name", "format_", "text", "content", "calls"), CASES, ids=IDS)
def test_whole(_name: str, format_: ToolFormat, text: str, content: str, calls: Calls) -> None:
    """Guards each format, and text that only looks like a call."""
    parser = make_parser(format_)
    assert parse(parser, [text]) == (content, "", calls)
    assert parser.num_calls == len(calls)


@pytest.mark.parametrize(("_name", "format_", "text", "content", "calls"), CASES, ids=IDS)
def test_in_pieces(_name: str, format_: ToolFormat, text: str, content: str, calls: Calls) -> None:
    """Guards streamed == whole: character by character, and at random cuts."""
    assert parse(make_parser(format_), list(text)) == (content, "", calls)
    rng = random.Random(text)
    for _ in range(20):
        edges = [0, *sorted(rng.randint(0, len(text)) for _ in range(4)), len(text)]
        pieces = [text[begin:end] for begin, end in pairwise(edges)]
        assert parse(make_parser(format_), pieces) == (content, "", calls)


def test_random_text_in_pieces() -> None:
    """Guards the same for texts that nobody thought of: fragments of all formats in any order; nothing crashes."""
    fragments = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[ARGS]",
        "weather",
        '{"name": "weather"',
    ]
    fragments += [
        ', "arguments": ',
        '"parameters": {"a": "\\"',
        "}",
        "{",
        "]",
        "[",
        '"',
        "\\",
        " ",
        "\n",
        ";",
        "x",
        "5",
    ]
    rng = random.Random(11)
    for round_ in range(1500):
        text = "".join(rng.choice(fragments) for _ in range(rng.randint(1, 12)))
        format_ = (HERMES, LLAMA3, MISTRAL)[round_ % 3]
        whole = parse(make_parser(format_, parallel=round_ % 2 == 0), [text])
        assert parse(make_parser(format_, parallel=round_ % 2 == 0), list(text)) == whole, text


def test_name_comes_before_the_arguments_are_complete() -> None:
    """Guards streaming: a client sees the name at once, and the arguments as they are written."""
    parser = make_parser(HERMES)
    assert [part.name for part in parser.push('<tool_call>{"name": "weather"').tool_calls] == ["weather"]
    assert parser.push(', "arguments": {"city": "Se').tool_calls[0].arguments == '{"city": "Se'
    assert parser.push('oul"').tool_calls[0].arguments == 'oul"'


def test_not_parallel() -> None:
    """Guards parallel_tool_calls = false: the first call only."""
    text = f"<tool_call>{one(CITY)}</tool_call><tool_call>{one('{}')}</tool_call>"
    assert parse(make_parser(HERMES, parallel=False), list(text)) == ("", "", [("weather", CITY)])


def test_long_arguments() -> None:
    """Guards against time that grows with the square of the arguments: each character is sent once."""
    arguments = json.dumps({"text": "x" * 200_000})
    deltas = [make_parser(HERMES).push(f"<tool_call>{one(arguments)}</tool_call>")]
    assert add_up(deltas)[2] == [("weather", arguments)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("... [TOOL_CALLS] ...", MISTRAL),
        ("<|start_header_id|> <|python_tag|> <|eot_id|>", LLAMA3),
        ('<|eot_id|> {"name": function name, "parameters": dictionary}', LLAMA3),
        ("<|im_start|>{{ message.content }}<|im_end|>", None),
    ],
)
def test_format_of_template(source: str, expected: ToolFormat | None) -> None:
    """Guards the choice of a format by what the chat template teaches the model."""
    assert format_of_template(source) is expected


def test_ids() -> None:
    """Guards call ids: unique, and of nine letters and digits where Mistral's template insists on it."""
    assert len({HERMES.new_id() for _ in range(50)}) == 50
    assert HERMES.new_id().startswith("call_")
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()


# -------------------------------------------------------------------------------------------------------- reasoning

REASONING = [
    ("<think>\nHm, 2+2.\n</think>\n\nFour.", False, "Hm, 2+2.", "Four."),
    ("\n<think>a < b</think>c", False, "a < b", "c"),
    ("Hm.\n</think>\nFour.\n", True, "Hm.", "Four.\n"),
    ("no thinking <think>here</think>", False, "", "no thinking <think>here</think>"),
    ("<think>never ends\n", False, "never ends", ""),
    ("<think></think>", False, "", ""),
    ("<thi", False, "", "<thi"),
    ("  hello", False, "", "  hello"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), REASONING)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str) -> None:
    """Guards the split of thinking from answer, whole and character by character."""
    for pieces in ([text], list(text)):
        parser = AnswerParser(reasoning=ReasoningSplitter(inside=inside))
        assert parse(parser, pieces) == (content, reasoning, [])


def test_reasoning_before_a_call() -> None:
    """Guards the two parsers in a row: a call inside the thinking is none."""
    text = f"<think>I could <tool_call>{one('{}')}</tool_call></think>\n<tool_call>{one(CITY)}</tool_call>"
    expected = ("", f"I could <tool_call>{one('{}')}</tool_call>", [("weather", CITY)])
    for pieces in ([text], list(text)):
        assert parse(make_parser(HERMES, thinking=True), pieces) == expected


def test_numbers_of_more_digits_than_python_reads() -> None:
    """Guards a stream from a model that writes digits without end where arguments belong."""
    parser = ToolParser(HERMES)
    delta = parser.push('<tool_call>{"name": "f", "arguments": ' + "1" * 5000 + "}</tool_call>")
    assert "".join(call.arguments for call in delta.tool_calls) == "{}"
