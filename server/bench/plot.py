"""Line charts as SVG text: enough for a benchmark's curve, without a plotting library in the product."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 48, 62
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")
FONT = 'font-family="sans-serif" font-size="13"'
NUM_TICKS = 5


class _Axis:
    """Maps a range of values to a range of pixels. Written by: nobody."""

    def __init__(self, low: float, high: float, *, begin: float, end: float, log: bool) -> None:
        self._log = log
        self._low, self._high = (math.log10(low), math.log10(high)) if log else (low, high)
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        value = math.log10(value) if self._log else value
        span = (self._high - self._low) or 1.0
        return self._begin + (value - self._low) / span * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Round values: powers of ten (with their doubles and fives on a short axis), or multiples of a round step."""
        if self._log:
            factors = (1.0, 2.0, 5.0) if self._high - self._low < NUM_TICKS / 2 else (1.0,)
            exponents = range(math.floor(self._low), math.floor(self._high + 1e-9) + 1)
            values = [factor * 10.0**e for e in exponents for factor in factors]
            return [v for v in values if self._low - 1e-9 <= math.log10(v) <= self._high + 1e-9]
        step = nice_step((self._high - self._low) / NUM_TICKS)
        first = math.ceil(self._low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self._high / step + 1e-9) + 1)]


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below raw."""
    if raw <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= raw * (1 - 1e-9))


def line_chart(
    series: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """An SVG document with one line a series; a legend where there are several. Log axes need positive values."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    if not xs:
        raise ValueError("a chart needs at least one point")
    x_axis = _Axis(min(xs) if log_x else 0, max(xs), begin=LEFT, end=WIDTH - RIGHT, log=log_x)
    y_low = 10.0 ** math.floor(math.log10(min(ys))) if log_y else 0.0
    y_high = 10.0 ** math.ceil(math.log10(max(ys))) if log_y else max(ys) * 1.05 or 1.0
    y_axis = _Axis(y_low, y_high, begin=HEIGHT - BOTTOM, end=TOP, log=log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 24, title, anchor="middle", extra=' font-size="16"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_label, anchor="middle"),
        _text(
            20, (TOP + HEIGHT - BOTTOM) / 2, y_label, anchor="middle", extra=_turned(20, (TOP + HEIGHT - BOTTOM) / 2)
        ),
        *_grid(x_axis, y_axis),
    ]
    for i, (name, points) in enumerate(series.items()):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(series) > 1:
            y = TOP + 14 + 18 * i
            parts.append(
                f'<line x1="{LEFT + 12}" x2="{LEFT + 36}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="3"/>'
            )
            parts.append(_text(LEFT + 42, y + 4, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e5e5e5"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{value:g}", anchor="middle"))
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _turned(x: float, y: float) -> str:
    return f' transform="rotate(-90 {x:.1f} {y:.1f})"'
