"""Growth per step: every figure in words; allocated and live blocks at the end of the step as a plot."""

from __future__ import annotations

import msgspec

from gpumon.analysis import units
from gpumon.analysis.growth_series import LASTING
from gpumon.analysis.types import KEPT, Growth
from gpumon.analysis.units import size
from gpumon.tui.plot import Curve, columns, plot
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import EMPTY, Line, Span, fit, right, spread
from gpumon.tui.view import View, device_name, device_of
from gpumon.tui.widgets.panel import Panel

ALLOCATED, BLOCKS = "allocated", "blocks"
COUNTED = (BLOCKS,)
"""Figures without bytes."""

_WORDS = {"slack": "cached", BLOCKS: "live blocks", "rss": "RSS"}
_BLOCKS_REACH = 0.9  # of the plot's height, so that neither curve hides the other
LEAST_ROWS = 4
SOON, LATER = 1_000, 10_000
"""Steps to OOM: urgent below the first, hardly relevant above the second."""

LOW, TALL = 20, 32
MOST = 5


class Grown(msgspec.Struct, frozen=True):
    """The panel's data: the device's figures, then the host's."""

    device: str
    figures: tuple[Growth, ...]
    steps_to_oom: int | None = None  # the forecast's, by growth from step to step


def grown(view: View) -> Grown:
    here = view.device.growth if view.device is not None else ()
    host = view.report.host_growth if view.report is not None else ()
    forecast = view.device.forecast if view.device is not None else None
    full = forecast.steps_to_oom if forecast is not None and forecast.growth == KEPT else None
    return Grown(device_name(device_of(view)), (*here, *host), full)


class GrowthPlot(Panel):
    NAME = "Growth"
    TERMS = ("growth", "allocated", "live blocks", "unexplained", "cached", "RSS", "pinned", "step")

    def pick(self, view: View) -> Grown:
        picked = grown(view)
        if LOW <= self.app.size.height < TALL:  # without room for a plot, use no empty lines either
            self.styles.height = height_without_plot(picked)
        else:
            self.styles.height = None
        return picked

    def draw(self, slice_: Grown, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return growth_lines(slice_, width, height, glyphs, self.title_role)

    def sums(self) -> list[str]:
        slice_: Grown | None = self._slice
        return [_sum(figure) for figure in slice_.figures] if slice_ is not None else []


def height_without_plot(g: Grown) -> int:
    growing = sum(figure.growing for figure in g.figures)
    return 1 + min(MOST, max(1, growing + (growing < len(g.figures))))


def growth_lines(g: Grown, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    head: list[Span] = [(" Growth", title), (f"  {g.device}", "dim")]
    if not g.figures:
        return [fit(head, room), ((" known after the first steps", "dim"),)]
    growing = [figure for figure in g.figures if figure.growing]
    steady = [_word(figure) for figure in g.figures if not figure.growing and not _is_worker(figure)]
    workers = sum(1 for figure in g.figures if not figure.growing and _is_worker(figure))
    if workers:
        steady.append(f"{workers} worker{'s' * (workers > 1)}")
    lines: list[Line] = [
        _fact(figure, g.steps_to_oom if figure.figure in LASTING else None, room, glyphs) for figure in growing
    ]
    if steady:
        said = f"{'nothing grows' if not growing else 'steady'}: {', '.join(steady)}"
        lines.append(fit([(f" {glyphs.gone} " if not growing else "   ", "good"), (said, "dim")], room))
    shown = [f for name in (ALLOCATED, BLOCKS) for f in g.figures if f.figure == name and len(f.points) > 1]
    rows = height - len(lines) - 3
    if not shown or rows < LEAST_ROWS:
        return [fit(head, room), *lines][:height]
    return [fit(head, room), *lines, *_plot(shown, room, rows, glyphs)]


def _is_worker(figure: Growth) -> bool:
    return figure.figure.startswith("worker ")


def _word(figure: Growth) -> str:
    return _WORDS.get(figure.figure, figure.figure)


def _text(figure: Growth, value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "n/a"
    if figure.figure in COUNTED:
        return f"{value:+,.1f}" if sign else f"{value:,.1f}".removesuffix(".0")
    return size(round(value), sign=sign)


def _fact(figure: Growth, left_over: int | None, room: int, glyphs: Glyphs) -> Line:
    line: list[Span] = [
        (f" {glyphs.warning} ", "warn"),
        (_word(figure), "warn"),
        (f"  {_text(figure, figure.per_step, sign=True)}/step", "strong"),
    ]
    if figure.low is not None and figure.high is not None:
        low, high = _text(figure, figure.low), _text(figure, figure.high)
        line.append(("" if low == high else f" ({low} to {high})", "dim"))
    if figure.since is not None:
        line.append((f" since {figure.since:,}", "dim"))
    if figure.so_far is not None:
        line.append((f" · {_text(figure, figure.so_far)} so far", "text"))
    if left_over is not None:
        role = "bad" if left_over < SOON else "warn" if left_over < LATER else "dim"
        line.append((f" · out of memory in about {units.steps(left_over)}", role))
    return fit(line, room)


def _plot(figures: list[Growth], room: int, rows: int, glyphs: Glyphs) -> list[Line]:
    main = figures[0]
    values = [value for _, value in main.points]
    low, high = min(values), max(values)
    reach = max(high - low, 1)
    counted = main.figure in COUNTED
    bottom = f"{low:,}" if counted else size(low)
    top = "" if high == low else f"+{high - low:,}" if counted else size(high - low, sign=True)
    axis = max(8, len(bottom) + 2, len(top) + 2)
    width = room - axis - 1
    if width < 8:
        return []
    dots = 2 * width if glyphs.braille else width

    def column(points: tuple[tuple[int, int], ...], least: int, times: float) -> tuple[int | None, ...]:
        floor = reach // 20 + 1  # so that the lowest value is visible
        made = _stretched([round((value - least) * times) + floor for _, value in points], dots)
        return tuple(made if glyphs.braille else [v for v in made for _ in range(2)])

    curves = [Curve("line:allocated", column(main.points, low, 1.0), area=True, sign="#")]
    legend: list[Span] = [(glyphs.lines["allocated"], "line:allocated"), (f" {_word(main)}", "dim")]
    if len(figures) > 1:
        counts = [value for _, value in figures[1].points]
        least, most = min(counts), max(counts)
        if most > least:
            times = _BLOCKS_REACH * reach / (most - least)
            curves.append(Curve("line:reserved", column(figures[1].points, least, times), sign="-"))
            legend.append((f"  {glyphs.lines['reserved']}", "line:reserved"))
        range_text = f"{least:,} to {most:,}" if most > least else f"{least:,}"
        legend.append((f"{' ' if most > least else '   '}{_word(figures[1])} {range_text}", "dim"))
    drawn = plot(curves, round(reach * 1.05) + 1, width, rows, braille=glyphs.braille, ceiling=None)
    edge, bare = ("┤", "│") if glyphs.braille else ("|", "|")
    lines: list[Line] = [EMPTY]
    for i, row in enumerate(drawn):
        text = top if i == 0 else bottom if i == (rows - 1 if top else rows // 2) else ""
        lines.append(((right(text, axis - 1), "dim"), (edge if text else bare, "rule"), *row))
    first, last = main.points[0][0], main.points[-1][0]
    foot: list[Span] = [(f"{' ' * axis}{first:,}   ", "dim"), *legend, (", at the end of the step", "dim")]
    lines.append(spread(foot, [(f"{last:,} ", "dim")], room))
    return lines


def _stretched(values: list[int], dots: int) -> list[int | None]:
    """Stretched to the whole width; columns show their maximum."""
    if len(values) > dots:
        return columns([(at, at, value) for at, value in enumerate(values)], 0, len(values) - 1, dots)
    return [values[dot * len(values) // dots] for dot in range(dots)]


def _sum(figure: Growth) -> str:
    unit = "" if figure.figure in COUNTED else " B"
    if not figure.growing or figure.per_step is None:
        return f"{_word(figure)}: does not grow"
    said = f"{_word(figure)}: {figure.per_step:+,.1f}{unit} a step"
    if figure.low is not None and figure.high is not None:
        said += f", between {figure.low:,.1f} and {figure.high:,.1f} with 95 % confidence"
    if figure.so_far is not None and figure.since is not None:
        said += f"; {figure.so_far:,}{unit} more than before step {figure.since:,}"
    return said
