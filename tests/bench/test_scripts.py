import json

import pytest

from benchmarks import compare
from benchmarks.micro import host

RESULT = {
    "title": "T",
    "environment": {"cpu": "x", "cores": 2, "python": "3.11", "commit": "aaa"},
    "ceilings": {"read_gb_s": 30.0},
    "config": {"clients": 8},
    "metrics": {"8 clients": {"output_tokens_per_s": 100.0, "failures": {}}},
    "raw": None,
}


def compared(tmp_path, capsys, **changes) -> tuple[int, str]:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(RESULT))
    after.write_text(json.dumps(RESULT | changes))
    code = compare.main([str(before), str(after)])
    return code, capsys.readouterr().out


def test_compare_shows_the_ratio(tmp_path, capsys):
    """Before and after are swapped: a regression looks like a gain."""
    code, out = compared(tmp_path, capsys, metrics={"8 clients": {"output_tokens_per_s": 150.0}})
    assert code == 0
    assert "1.500" in out
    assert "Careful" not in out


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": RESULT["environment"] | {"cpu": "y"}},
        {"config": {"clients": 9}},
        {"ceilings": {"read_gb_s": 20.0}},
    ],
)
def test_compare_warns_of_apples_and_pears(tmp_path, capsys, changes):
    """Two machines, or two workloads, are compared and nobody is told."""
    assert "Careful" in compared(tmp_path, capsys, **changes)[1]


def test_compare_refuses_another_benchmark(tmp_path, capsys):
    """A table of nothing instead of an error."""
    assert compared(tmp_path, capsys, title="U")[0] == 2


@pytest.mark.parametrize("content", [None, "", "[]", '{"title": "T"}'])
def test_compare_reads_results_only(tmp_path, capsys, content):
    """A traceback for a file that isn't there or is no result."""
    file = tmp_path / "a.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        compare.main([str(file), str(file)])
    assert ended.value.code == 2
    assert "a.json" in capsys.readouterr().err


def test_the_stub_engine_steps():
    """The host benchmark measures an engine that has run out of work, or one that no longer starts."""
    engine = host.engine_of(3, prompt_len=40)
    host.step(engine)
    batch = engine.schedule()
    assert [len(item.token_ids) for item in batch.items] == [1, 1, 1]
    assert len(host.StubRunner().collect(batch).rows) == 3


def test_the_line_through_known_points():
    """A swapped slope and intercept: a fixed cost is reported as one of every request."""
    assert host.least_squares([(0, 5.0), (10, 25.0), (20, 45.0)]) == pytest.approx((5.0, 2.0))


def test_reference_speed_scales_durations_only():
    """A ratio that is divided by the machine's speed."""
    assert host.Figure("a", 100.0, "us", 1).at_reference(2 * host.REFERENCE_LOOP_NS) == pytest.approx(50.0)
    assert host.Figure("a", 1.2, "x", 1).at_reference(2 * host.REFERENCE_LOOP_NS) == pytest.approx(1.2)
