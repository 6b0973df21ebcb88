import json
import xml.etree.ElementTree as ET

import pytest

from server.bench import kv_cache, kv_lesson, plot

SVG = "{http://www.w3.org/2000/svg}"


def test_totals_are_sums_of_the_line():
    """The cost of an answer without a cache is taken at its last length only, or counted from zero."""
    points = [(16, 1.0), (32, 2.0), (64, 4.0)]
    assert kv_lesson.interpolate(points, 16) == pytest.approx(1.0)
    assert kv_lesson.interpolate(points, 24) == pytest.approx(1.5)
    assert kv_lesson.interpolate(points, 64) == pytest.approx(4.0)
    assert kv_lesson.total_without(points, 16) == 0
    assert kv_lesson.total_without(points, 18) == pytest.approx(1.0 + 1.0625)


@pytest.mark.parametrize(("longest", "expected"), [(17, [16, 17]), (64, [16, 32, 64]), (100, [16, 32, 64, 100])])
def test_measured_lengths_reach_the_end(longest, expected):
    """Interpolation beyond the last measured length."""
    assert kv_lesson.lengths_up_to(longest) == expected


def test_the_typical_token_is_not_the_prompt():
    """The first entry is the prompt's step; one slow token must not stand for its neighborhood."""
    durations = [9.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    assert kv_lesson.typical(durations, 0) == pytest.approx(1.0)
    assert kv_lesson.typical(durations, 3) == pytest.approx(1.0)
    assert kv_lesson.typical(durations, 99) == pytest.approx(1.0)


@pytest.mark.parametrize("log", [False, True])
def test_charts_are_well_formed_and_inside(log):
    """A curve that leaves the picture, or a label that breaks the document."""
    series = {"a <b> & c": [(1, 0.5), (10, 20.0), (100, 3.0)], "d": [(2, 1.0), (50, 7.0)]}
    text = plot.line_chart(series, title="T & U", x_label="x", y_label="y", log_x=log, log_y=log)
    root = ET.fromstring(text)
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == 2
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert plot.LEFT <= x <= plot.WIDTH - plot.RIGHT
            assert plot.TOP <= y <= plot.HEIGHT - plot.BOTTOM
    labels = [element.text for element in root.findall(f"{SVG}text")]
    assert {"T & U", "a <b> & c", "d"} <= set(labels)
    higher = plot.line_chart({"a": [(1, 1.0), (2, 5.0)]}, title="", x_label="", y_label="")
    first, second = ET.fromstring(higher).find(f"{SVG}polyline").attrib["points"].split()
    assert float(first.split(",")[1]) > float(second.split(",")[1])


@pytest.mark.parametrize(("raw", "step"), [(0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (120.0, 200.0)])
def test_ticks_are_round(raw, step):
    """Axes labeled 0.333, 0.667."""
    assert plot.nice_step(raw) == pytest.approx(step)


def test_the_lesson_with_the_real_model(tmp_path, capsys):
    """The engine's construction changed, and the one benchmark that builds it by hand was forgotten."""
    file = tmp_path / "kv.json"
    assert kv_cache.main(["--tokens", "40", "--plots", str(tmp_path), "--json", str(file)]) == 0
    raw = json.loads(file.read_text())["raw"]
    assert len(raw["with_cache_s"]) == 40 - kv_lesson.PROMPT_LEN
    assert [length for length, _ in raw["without_cache_s"]] == [16, 32, 40]
    assert "with a KV cache and without" in capsys.readouterr().out
    assert ET.parse(tmp_path / "kv-cache-time.svg").getroot().findall(f"{SVG}polyline")


def test_a_short_log_axis_has_ticks():
    """A logarithmic axis from 16 to 512 with a single label."""
    text = plot.line_chart({"a": [(16, 1.0), (512, 2.0)]}, title="", x_label="", y_label="", log_x=True)
    labels = {element.text for element in ET.fromstring(text).findall(f"{SVG}text")}
    assert {"20", "50", "100", "200", "500"} <= labels


def test_everything_without_a_model(tmp_path, capsys):
    """A part of the benchmark that nobody runs until a release."""
    folder = tmp_path / "plots"
    assert kv_cache.main(["--no-model", "--plots", str(folder), "--json", str(tmp_path / "kv.json")]) == 0
    out = capsys.readouterr().out
    assert "22.5 KiB a token" in out
    assert "2,048 reserved" in out
    assert (folder / "kv-cache-waste.svg").exists()


def test_a_missing_model_is_said(capsys):
    """A traceback for a typing error."""
    assert kv_cache.main(["--no-model", "--model", "/nowhere/at-all"]) == 2
    assert "/nowhere/at-all" in capsys.readouterr().err
