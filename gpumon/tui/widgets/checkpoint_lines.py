"""Checkpoints that still have tensors on the device, one per line."""

from __future__ import annotations

from gpumon.analysis.census import alive
from gpumon.analysis.units import size
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, fit
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

MOST = 3
LOW = 20
"""Hidden on a lower screen; the Overview has the finding."""


class CheckpointsData(Panel):
    """Hidden if nothing of a checkpoint is alive."""

    NAME = "Checkpoints still alive"
    TERMS = ("checkpoints", "held by")

    def pick(self, view: View) -> tuple[wire.Checkpoint, ...]:
        picked = alive(view.rank.checkpoints, view.index) if view.rank is not None else ()
        self.display = bool(picked) and self.app.size.height >= LOW
        if picked:
            self.styles.height = 1 + min(MOST, len(picked))
        return picked

    def draw(self, slice_: tuple[wire.Checkpoint, ...], width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return checkpoint_lines(slice_, width, glyphs, self.title_role)

    def sums(self) -> list[str]:
        return [
            f"{each.source}{f' at {each.where}' if each.where else ''}, step {each.step:,}: {each.loaded:,} B loaded, "
            f"{each.alive:,} B in {each.tensors:,} tensors alive at step {each.looked_step:,}"
            for each in self._slice or ()
        ]


def checkpoint_lines(found: tuple[wire.Checkpoint, ...], room: int, glyphs: Glyphs, title: str) -> list[Line]:
    total = sum(each.alive for each in found)
    lines: list[Line] = [fit([(" Checkpoints", title), (f"  {size(total)} still alive", "dim")], room)]
    for each in found[:MOST]:
        holder = f" by {each.holders[0].text}" if each.holders else ""
        where = f" at {each.where}" if each.where else ""
        name = f" {each.file}" if each.file else ""
        used = "" if each.used_step is not None else ", no load_state_dict since"
        line: list[Span] = [
            (f" {glyphs.warning if each.used_step is not None else glyphs.info} ", "warn"),
            (size(each.alive), "strong"),
            (f" of {size(each.loaded)} held", "text"),
            (holder, "key"),
            (f" since {each.source}{name}{where}, step {each.step:,}{used}", "dim"),
        ]
        lines.append(fit(line, room))
    return lines
