"""The first line: script, process, step and state."""

from __future__ import annotations

import msgspec

from gpumon.analysis.own_cost import own_cost
from gpumon.analysis.units import pace
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, fit, spread
from gpumon.tui.view import View, device_of, newest_step
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire


class Heading(msgspec.Struct, frozen=True):
    name: str
    who: str
    step: int | None
    phase: str | None
    speed: str
    state: str  # live | silent | ended | finished | paused | waiting | replay | past
    torch: str | None
    device: str | None
    costs: str = ""  # what gpumon costs
    loop: str = ""  # where the library's training loop is
    lost_links: tuple[str, ...] = ()  # to other machines: a sentence each


def heading(view: View) -> Heading:
    rank = view.rank
    if rank is None:
        return Heading("gpumon", "", None, None, "", "waiting", None, None)
    hello = rank.hello
    who = f"pid {hello.pid}"
    if hello.rank is not None and (hello.world_size or 1) > 1:
        who += f" · rank {hello.rank} of {hello.world_size}"
        heard = len({each.hello.rank for each in view.frame.ranks if each.hello.rank is not None})
        if heard < (hello.world_size or 1):
            who += f", {heard} heard"
    state = str(rank.status)
    if rank.goodbye is not None and rank.goodbye.reason == "finished":
        state = "finished"
    if view.paused and rank.status != "ended":
        state = "paused"
    elif view.frame.replaying and state == "live":
        state = "replay"
    if rank.lost_link is not None:
        state = "silent"
    step, cost = newest_step(rank), own_cost(rank.heartbeat)
    if view.now is not None and view.position is not None:
        state, step, cost = "past", view.position.step, None  # what gpumon costs is known for now only
    device = device_of(view)
    return Heading(
        name=hello.name,
        who=who,
        step=step,
        phase=rank.heartbeat.phase if rank.heartbeat and rank.status != "ended" else None,
        speed=pace(view.report.steps_per_s) if view.report and view.report.steps_per_s and not rank.goodbye else "",
        state=state,
        torch=hello.torch,
        device=device.name if device else None,
        costs=cost.text if cost is not None and cost.says_something else "",
        loop="" if rank.progress is None or rank.goodbye is not None else loop_text(rank.progress),
        lost_links=tuple(dict.fromkeys(each.lost_link_said for each in view.frame.ranks if each.lost_link_said)),
    )


def loop_text(at: wire.Progress) -> str:
    """ "epoch 2 · train · batch 31/200", of which what is known."""
    parts = [] if at.epoch is None else [f"epoch {at.epoch:,}"]
    if at.stage:
        parts.append(at.stage)
    if at.batch is not None:
        parts.append(f"batch {at.batch:,}" + (f"/{at.batches:,}" if at.batches is not None else ""))
    return " · ".join(parts)


_STATES = {
    "live": ("live", "good", "live"),
    "silent": ("silent", "bad", "silent"),
    "ended": ("ended", "warn", "ended"),
    "finished": ("ended", "good", "finished"),
    "paused": ("paused", "warn", "paused"),
    "replay": ("now", "title", "replay"),
    "past": ("paused", "warn", "past step"),
    "waiting": ("silent", "dim", "waiting"),
}


class Header(Panel):
    """Script, process, step, pace, state, and what gpumon costs."""

    TERMS = ("step", "it/s", "costs")
    can_focus = False

    def pick(self, view: View) -> Heading:
        return heading(view)

    def draw(self, slice_: Heading, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return header_lines(slice_, width, glyphs)


def header_lines(head: Heading, width: int, glyphs: Glyphs) -> list[Line]:
    glyph, role, word = _STATES[head.state]
    start: list[Span] = [(" ", ""), (head.name, "strong")]
    if head.who:
        start.append((f" · {head.who}", "dim"))
    if head.step is not None:
        start += [(" · step ", "dim"), (f"{head.step:,}", "strong")]
    if head.speed:
        start.append((f" · {head.speed}", "dim"))
    state: list[Span] = [(f"{getattr(glyphs, glyph)} {word}", role)]
    short_torch = head.torch.split("+")[0] if head.torch else None
    torch = f"torch {short_torch}" if short_torch else ""
    about = " · ".join(part for part in (torch, head.device) if part)
    if head.lost_links:
        more = f" (and {len(head.lost_links) - 1} more)" if len(head.lost_links) > 1 else ""
        state = [(f"{glyphs.warning} {head.lost_links[0]}{more}", "bad")]
    ends: list[Line] = [(*state, (f"  {about} ", "dim")), (*state, (f"  {torch} ", "dim")), (*state, (" ", ""))]
    if not short_torch:
        ends = ends[::2]
    short: Line = (*state, (f"  {head.costs} ", "dim"))
    if head.costs:  # torch and device do not change: they go first
        costs = (*state, (f"  gpumon {head.costs}", "dim"))
        ends = [
            *((*costs, (f" · {text} ", "dim")) for text in dict.fromkeys((about, torch)) if text),
            (*costs, (" ", "")),
            short,
            *ends,
        ]
    candidates = [(start, end) for end in ends]
    if head.loop:  # shown if nothing is lost for it but torch and device
        told: list[Span] = [*start, (f" · {head.loop}", "dim")]
        whole = ends[: ends.index(short)] if head.costs else ends
        candidates = [*((told, end) for end in whole), *candidates]
    for begins, end in candidates:
        line = spread(begins, end, width)
        if len(line) > len(begins):
            break
    else:
        line = fit([(" ", ""), *state, (" ", ""), (head.name, "strong")], width)
    return [line]
