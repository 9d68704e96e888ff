"""The next iteration: its peak with an interval, the headroom above it, and whether it fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gpumon.analysis import units
from gpumon.analysis.types import KEPT, Forecast
from gpumon.analysis.units import duration, in_unit, size, unit_for
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, cells, fit
from gpumon.tui.view import View, uncounted
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.analysis.changes import ChangeResult

_ROLE = {"fits": "good", "tight": "warn", "oom-ahead": "bad"}
_SHORT = {
    "batch × 2": "batch ×2",
    "sequence × 2": "length ×2",
    "2 micro-batches, same batch": "2 micro-batches",
    "activation checkpointing": "checkpointing",
    "bf16 autocast": "bf16",
    "fused optimizer": "fused",
}
REGIME_SHOWN_STEPS = 100
_WORD = {"fits": "fits", "tight": "tight", "oom-ahead": "OOM ahead"}


FACTOR_MAX = 100
"""Times the present batch; more says that memory is no limit."""

FAR_STEPS = 1_000
"""From here on two digits of the steps until memory is full are enough, and it is not yet urgent."""


class ForecastData(msgspec.Struct, frozen=True):
    forecast: Forecast | None
    capacity: int | None
    ended: bool
    uncounted: str = ""  # why the device has no peaks
    now: wire.Outlook | None = None  # the agent's, for the batch in forward; not if it fits
    regime: int | None = None  # the step of a recent regime change
    whatif: tuple[ChangeResult, ...] = ()
    left: str = ""  # time to OOM


def outlook(view: View) -> ForecastData:
    d = view.device
    ended = view.rank is not None and view.rank.status == "ended"
    newest = view.rank.steps[-1].step if view.rank is not None and view.rank.steps else None
    now = regime = None
    if d is not None and view.rank is not None and newest is not None:
        said = next((each for each in view.rank.outlooks if each.device == d.device), None)
        if said is not None and said.verdict != wire.FITS and (ended or said.step > newest):
            now = said
        if d.regimes and newest - d.regimes[-1] < REGIME_SHOWN_STEPS:
            regime = d.regimes[-1]
    forecast, capacity = (d.forecast, d.capacity) if d is not None else (None, None)
    left = ""
    if forecast is not None and forecast.steps_to_oom is not None and view.report and view.report.steps_per_s:
        left = duration(forecast.steps_to_oom / view.report.steps_per_s)
    return ForecastData(
        forecast, capacity, ended, uncounted(view), now, regime, d.whatif if d is not None else (), left
    )


class ForecastPanel(Panel):
    NAME = "Next iteration"
    TERMS = ("next peak", "headroom", "fits · tight · OOM ahead", "batch factor")

    def pick(self, view: View) -> ForecastData:
        return outlook(view)

    def draw(self, slice_: ForecastData, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return forecast_lines(slice_, width, height, glyphs, self.title_role)


def forecast_lines(o: ForecastData, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    head = (" Next iteration", title)
    f = o.forecast
    if f is None:
        return [(head,), ((f"   {o.uncounted or 'known after the first steps'}", "dim"),)]
    unit = unit_for(f.high)
    fails_now = o.now is not None and o.now.verdict == wire.OOM_AHEAD  # the batch that is in forward now
    word = wire.OOM_AHEAD if fails_now else f.verdict
    filling = f.growth == KEPT and f.steps_to_oom is not None
    lines: list[Line] = []
    first: list[Span] = [head]
    if o.ended:
        first.append(("  (had it gone on)", "dim"))
    elif word:
        calm = word == wire.FITS and not filling
        mark = glyphs.fits if calm else glyphs.warning
        said = "fits for now" if filling and word == wire.FITS else _WORD[word]
        first.append((f"  {mark} {said}", _ROLE[word] if calm or word != wire.FITS else "warn"))
    lines.append(fit(first, room))
    low, high = in_unit(f.low, unit), in_unit(f.high, unit)
    span = f" ({low}{'–' if glyphs.braille else '-'}{high})"
    needs = f"{in_unit(f.next_peak, unit)} {unit.name}"
    indent, pad = ("   ", 13) if room >= 13 + len(needs) + len(span) else (" ", 10)
    peak: list[Span] = [
        (f"{indent}peak".ljust(pad), "dim"),
        (needs, "strong"),
        ("" if low == high else span, "text"),
    ]
    if room >= 50:
        peak.append((f"  in {f.phase}", "dim"))
    lines.append(fit(peak, room))
    left_over, why = ("n/a", "no matching reading of the driver") if f.headroom is None else (size(f.headroom), "")
    if f.headroom_at_most:
        left_over, why = f"at most {left_over}", "no reading of the driver"
    if why:
        reasons = (f" ({why})", " (driver not read)", "")
        left_over += next(each for each in reasons if not each or pad + cells(left_over + each) <= room)
    lines.append(
        fit(
            [
                (f"{indent}headroom".ljust(pad), "dim"),
                (left_over, _ROLE[word] if word and word != "fits" else "strong"),
            ],
            room,
        )
    )
    if f.max_batch_factor is not None:
        factor = batch_factor(f.max_batch_factor, glyphs)
        lines.append(
            fit(
                [
                    (f"{indent}batch".ljust(pad), "dim"),
                    (f"up to {factor}{' the present one' if room >= 42 else ''}", "text"),
                ],
                room,
            )
        )
    if f.steps_to_oom is not None:
        lines.append(fit(_trend(f, f.steps_to_oom, o.left, indent, pad, room, glyphs), room))
    if o.now is not None:
        lines.append(fit(_now(o.now), room))
    if o.regime is not None and height > len(lines):
        lines.append(fit([(f"{indent}new regime since step {o.regime:,}: learning again", "warn")], room))
    if o.capacity and height > len(lines) + 1 and room >= 30:
        lines.append(((indent, ""), *_gauge(f, o.capacity, room - 2 - len(indent), glyphs)))
    if height > len(lines):
        chance = f" · fails with {100 * f.p_oom:.0f} % probability" if f.p_oom is not None and f.p_oom >= 0.005 else ""
        lines.append(
            fit(
                [(f"{indent}learnt from {units.steps(f.learnt_from)}{chance}", "dim")],
                room,
            )
        )
    if height > len(lines) and (asked := _whatif(o.whatif, room, glyphs)):
        lines.append(fit(asked, room))
    return lines


def batch_factor(factor: float, glyphs: Glyphs) -> str:
    """ "×4.2", "×100 and more"."""
    times = f"{factor:.1f}" if factor < FACTOR_MAX else f"{FACTOR_MAX} and more"
    return f"{'×' if glyphs.braille else 'x'}{times}"


def _trend(f: Forecast, number: int, time: str, indent: str, pad: int, room: int, glyphs: Glyphs) -> list[Span]:
    """Steps to OOM, in the longest text that fits; the interval is more important than the time."""
    steps, apart, about = units.steps(number), "", "about "
    if number >= FAR_STEPS:
        steps, about = units.about(number), ""
    elif f.steps_to_oom_low is not None and f.steps_to_oom_high is not None:
        apart = f" ({f.steps_to_oom_low:,}{'–' if glyphs.braille else '-'}{f.steps_to_oom_high:,})"
    left = f", {time}" if time else ""
    said = [
        ("trend", f"rising: full in {about}{steps}{apart}{left}"),
        ("trend", f"full in {steps}{apart}{left}"),
        ("trend", f"full in {steps}{apart}"),
        ("full in", f"{steps}{apart}"),
        ("trend", f"full in {steps}"),
    ]
    label, text = next((each for each in said if pad + len(each[1]) <= room), said[-1])
    return [(f"{indent}{label}".ljust(pad), "dim"), (text, "bad" if number < FAR_STEPS else "warn")]


def _now(said: wire.Outlook) -> list[Span]:
    batch = units.shapes(said.input_shapes[:1])
    role = _ROLE.get(said.verdict, "text")  # a newer agent may send another verdict
    return [
        (f"   step {said.step:,}", "dim"),
        (f"  {batch} needs {size(said.next_peak)}: {_WORD.get(said.verdict, said.verdict)}", role),
    ]


def _whatif(answers: tuple[ChangeResult, ...], room: int, glyphs: Glyphs) -> list[Span]:
    """The usual what-ifs that fit into a line, each with its peak."""
    spans: list[Span] = [("   what if", "dim")]
    left = room - 10
    for each in answers:
        if each.peak is None:
            continue
        name = _SHORT.get(each.change.name(), each.change.name())
        text = f"  {name if glyphs.braille else name.replace('×', 'x')} {size(round(each.peak.expected))}"
        if len(text) > left:
            continue
        left -= len(text)
        role = {True: "text", None: "warn", False: "bad"}[each.fits] if each.headroom is not None else "text"
        spans.append((text, "warn" if role == "text" and each.full_in is not None else role))
    return spans if len(spans) > 1 else []


def _gauge(f: Forecast, capacity: int, room: int, glyphs: Glyphs) -> Line:
    """The interval on a scale from 0 to the device's total."""
    low, high = (max(0, min(room, round(v * room / capacity))) for v in (f.low, f.high))
    high = min(room, max(high, low + 1))
    full, span, rest = ("━", "█", "┈") if glyphs.braille else ("=", "#", ".")
    return ((full * low, "line:allocated"), (span * (high - low), "warn"), (rest * (room - high), "rule"))
