"""What the benchmarks refuse, each in one line and before any work."""

import pytest

from server import cli
from server.bench import kernels, kv_cache, serve

SERVE = [
    ("--clients 0", "0 is out of range"),
    ("--clients -3", "-3 is out of range"),
    ("--clients 1.5", "no whole number"),
    ("--clients 1,,2", "no whole number"),
    ("--clients 8,8", "listed twice"),
    ("--clients 100000000", "out of range"),
    ("--rate 0", "0 is out of range"),
    ("--rate -1", "-1 is out of range"),
    ("--rate nan", "nan is out of range"),
    ("--rate inf", "inf is out of range"),
    ("--rate 1 --clients 2", "not allowed with"),
    ("--requests 0", "0 is out of range"),
    ("--requests 3", "can't keep 32 clients busy"),
    ("--warmup -1", "-1 is out of range"),
    ("--prompt-words 0", "0 is out of range"),
    ("--shared-words 129", "a prompt has only 128"),
    ("--max-tokens 0", "0 is out of range"),
    ("--temperature -1", "-1 is out of range"),
    ("--temperature nan", "nan is out of range"),
    ("--goodput ttft", "write ttft=MS"),
    ("--goodput ttft=1,ttft=2", "write ttft=MS"),
    ("--goodput itl=5", "write ttft=MS"),
    ("--goodput tpot=-5", "-5 is out of range"),
    ("--timeout 0", "0 is out of range"),
    ("--timeout inf", "inf is out of range"),
    ("--url https://a", "want http://HOST:PORT"),
    ("--url http://a:99999", "host or port"),
    ("--url http://a:0", "port 0"),
    ("--url http://a..b", "host or port"),
    ("--url http://u:p@a", "without a user"),
    ("--api-key \u00e9", "no header"),
    ("--model=", "--model is empty"),
    ("--json {tmp}/none/x.json", "there is no folder"),
    ("--json {tmp}", "is a folder"),
    ("--nope", "unrecognized"),
]
KERNELS = [("--device tpu", "give cpu, cuda"), ("--device cuda:99", "GPUs"), ("--backend x", "choose from")]
KV_CACHE = [
    ("--tokens 16", "16 is out of range"),
    ("--tokens 9999999", "give at most 8191"),
    ("--dtype int3", "choose from"),
    ("--plots {tmp}/none/x", "there is no folder"),
    ("--plots {tmp}/file", "is a file"),
]


@pytest.mark.parametrize(
    ("main", "flags", "message"),
    [
        (main, *row)
        for main, rows in ((serve.main, SERVE), (kernels.main, KERNELS), (kv_cache.main, KV_CACHE))
        for row in rows
    ],
)
def test_nonsense_is_refused_in_one_line(main, flags, message, tmp_path, capsys):
    """A run of minutes over 0 clients, a traceback, or a result that can't be written when it is there."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(flags.format(tmp=tmp_path).split(" "))
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_makes_sense_is_taken(tmp_path):
    """A check so strict that a documented command is refused."""
    line = f"--clients 1,8,32 --requests 64 --shared-words 128 --goodput ttft=500,e2el=9e3 --json {tmp_path}/a.json"
    args = serve.parse([*line.split(), "--url", "[::1]:8000/v1/", "--timeout", "0.5", "--warmup", "0"])
    assert args.clients == [1, 8, 32]
    assert args.goodput == {"ttft": 500, "e2el": 9000}
    assert serve.parse(["--rate", "0.5,2"]).rate == [0.5, 2]


@pytest.mark.parametrize("file", ["old.json", "/dev/stdout"])
def test_results_may_replace_a_file_or_go_down_a_pipe(file, tmp_path):
    """Looking whether a file can be written empties it, or refuses a device."""
    old = tmp_path / "old.json"
    old.write_text("kept until the end")
    assert serve.parse(["--json", str(tmp_path / file)]).json == tmp_path / file
    assert old.read_text() == "kept until the end"


@pytest.mark.parametrize("words", [["bench", "--help"], ["bench", "-h"]])
def test_help_in_the_first_place(words, capsys):
    """The command line's own parser takes the flag for one of its own."""
    assert cli.main(words) == 0
    assert "kv-cache" in capsys.readouterr().out
