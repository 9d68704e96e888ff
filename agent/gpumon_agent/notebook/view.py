"""What `%%gpumon` shows, as HTML and as plain text: texts and figures only, which keep no object alive."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpumon_agent import wire
from gpumon_agent.units import torch_size

NAMES_TOLD_MAX = 4  # of the holders of one row
DATA = "data"  # as the screens call it
_CELL_CHARS_MAX = 160
_DIMENSIONS_MAX = 8


class DeviceFigures(NamedTuple):
    """Bytes of one device's allocator as the cell began, at its peak and as it ended; a peak of None is not known."""

    device: str
    allocated_before: int
    reserved_before: int
    allocated_peak: int | None
    reserved_peak: int | None
    allocated_after: int
    reserved_after: int


class PhasePeak(NamedTuple):
    phase: str
    device: int
    peak: int | None  # bytes allocated
    windows: int  # that were read


class Row(NamedTuple):
    """Storages that are alike and held alike."""

    holders: tuple[str, ...]
    hint: str
    tensors: int
    nbytes: int
    shape: tuple[int, ...] | None  # None: of several shapes
    dtype: str  # "": saved for backward, of any


class Alive(NamedTuple):
    device: str
    """cuda or cpu"""
    nbytes: int
    tensors: int
    rows: tuple[Row, ...]
    more_rows: int
    more_nbytes: int
    everything: bool
    """older tensors are listed too"""
    complete: bool
    """the search for names was not cut"""


class View:
    """Of one cell. `resident`: bytes of host memory before and after; `steps`: of a training in the cell."""

    def __init__(
        self,
        seconds: float,
        *,
        devices: tuple[DeviceFigures, ...] = (),
        phases: tuple[PhasePeak, ...] = (),
        steps: int = 0,
        alive: Alive | None = None,
        resident: tuple[int | None, int | None] = (None, None),
        out_of_memory: str | None = None,
        note: str = "",
    ) -> None:
        self.seconds = seconds
        self.devices = devices
        self.phases = phases
        self.steps = steps
        self.alive = alive
        self.resident = resident
        self.out_of_memory = out_of_memory
        self.note = note

    # ------------------------------------------------------------------------------------------------ what is told

    def _head(self) -> str:
        return f"gpumon: this cell took {_seconds(self.seconds)}"

    def _figures(self) -> list[tuple[str, str, list[tuple[str, int | None]]]]:
        """(device, what, (when, bytes)…)"""
        return [
            (each.device, what, list(zip(("before", "peak", "after"), values, strict=True)))
            for each in self.devices
            for what, values in (
                ("allocated", (each.allocated_before, each.allocated_peak, each.allocated_after)),
                ("reserved", (each.reserved_before, each.reserved_peak, each.reserved_after)),
            )
        ]

    def _resident(self) -> str:
        before, after = self.resident
        return f"Host memory of this process: {_size(before)} → {_size(after)} resident."

    def _phase_title(self) -> str:
        read = max((each.windows for each in self.phases), default=0)
        if not self.steps:
            return "Peak of each phase"
        steps = f"{self.steps:,} step{'s' * (self.steps != 1)}"
        return f"Peak of each phase, {steps}" + (f", {read:,} of them read" if read < self.steps else "")

    def _alive_title(self) -> str:
        alive = self.alive
        assert alive is not None
        what = "Alive as it ran out of memory" if alive.everything else "Stayed alive"
        if not alive.tensors:
            return f"{what}: no tensor on {alive.device.upper()}" + " that this cell made" * (not alive.everything)
        tensors = f"{alive.tensors:,} tensor{'s' * (alive.tensors != 1)}"
        return f"{what}: {_size(alive.nbytes)} in {tensors} on {alive.device.upper()}"

    def _more(self) -> str:
        alive = self.alive
        assert alive is not None
        texts = []
        if alive.more_rows:
            texts.append(f"… and {alive.more_rows:,} more rows with {_size(alive.more_nbytes)}.")
        if not alive.complete:
            texts.append("The search for names ended after 2 s: some holders are not named.")
        return " ".join(texts)

    def __repr__(self) -> str:
        lines = [self._head()]
        if self.out_of_memory is not None:
            lines.append(f"Out of memory: {_line(self.out_of_memory)}")
        for device, what, values in self._figures():
            texts = ", ".join(f"{when} {_exact(nbytes)}" for when, nbytes in values)
            lines.append(f"{device} {what}: {texts}")
        if not self.devices and self.alive is not None:
            lines.append(self._resident())
        if self.phases:
            lines.append(f"{self._phase_title()}:")
            lines += [f"  {_phase(each, self.phases)}: {_exact(each.peak)}" for each in self.phases]
        if self.alive is not None:
            lines.append(self._alive_title())
            for row in self.alive.rows:
                lines.append(f"  {_exact(row.nbytes)}  {_kind(row)}  {_names(row.holders)}")
                if row.hint:
                    lines.append(f"      free it: {_line(row.hint)}")
            lines.append(self._more())
        lines.append(self.note)
        return "\n".join(line for line in lines if line)

    def _repr_html_(self) -> str:
        parts = [f"<div class='head'>{_text(self._head())}</div>"]
        if self.out_of_memory is not None:
            parts.append(f"<p class='oom'><b>Out of memory.</b> {_text(_line(self.out_of_memory, 400))}</p>")
        if self.devices:
            parts.append(self._figure_table())
        elif self.alive is not None:
            parts.append(f"<p>{_text(self._resident())}</p>")
        if self.phases:
            most = max(each.peak or 0 for each in self.phases)
            rows = [
                (_text(_phase(each, self.phases)), _bar(each.peak, most, "peak"), *_bytes(each.peak))
                for each in self.phases
            ]
            parts.append(_table(self._phase_title(), ("phase", "", "peak", "bytes"), rows, right=(2, 3)))
        if self.alive is not None:
            parts.append(self._alive_table())
        if self.note:
            parts.append(f"<p>{_text(self.note)}</p>")
        if self.alive is not None:
            parts.append(f"<details><summary>What the figures mean</summary>{self._key()}</details>")
        return f"<div class='gpumon'><style>{_STYLE}</style>{''.join(parts)}</div>"

    def _figure_table(self) -> str:
        most = max(value or 0 for _, _, values in self._figures() for _, value in values)
        rows = []
        for device, what, values in self._figures():
            for at, (when, value) in enumerate(values):
                first = f"{device} {what}" if at == 0 else ""
                rows.append((_text(first), when, _bar(value, most, when), *_bytes(value)))
        return _table("", ("memory", "", "", "size", "bytes"), rows, right=(3, 4))

    def _alive_table(self) -> str:
        alive = self.alive
        assert alive is not None
        most = max((row.nbytes for row in alive.rows), default=0)
        rows = []
        for row in alive.rows:
            held = f"<code>{_text(_names(row.holders))}</code>"
            if row.hint:
                held += f"<div class='hint'>free it: {_marked(_line(row.hint))}</div>"
            rows.append((held, _text(_kind(row)), _bar(row.nbytes, most, "after"), *_bytes(row.nbytes)))
        more = f"<p>{_text(self._more())}</p>" if self._more() else ""
        if not rows:
            return f"<p>{_text(self._alive_title())}.</p>{more}"
        return _table(self._alive_title(), ("held by", "tensors", "", "size", "bytes"), rows, right=(3, 4)) + more

    def _key(self) -> str:
        lines = []
        if self.devices:
            lines += [
                ("allocated", "bytes of the blocks that tensors use, multiples of 512: torch.cuda.memory_allocated()"),
                ("reserved", "bytes that PyTorch's allocator has taken from the device, used or cached"),
                ("before, peak, after", "as the cell began, the highest within it, as it ended"),
            ]
        if self.phases:
            lines.append(
                ("phase", "the highest allocated bytes within each; load: before the first, data: between others")
            )
        lines += [
            ("held by", "the variables that keep the tensors alive; several names: it is freed when all let go"),
            ("Out[7], _7, _", "IPython's: values of cells that it has shown"),
            ("the graph of x", "what autograd saved for backward: freed by x.backward(), or with x"),
            ("size", "of the whole storage, of which the tensor may be a view; in units of 1,024"),
        ]
        return "<dl>" + "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in lines) + "</dl>"


# -------------------------------------------------------------------------------------------------------------- texts


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else torch_size(nbytes)


def _exact(nbytes: int | None) -> str:
    if nbytes is None:
        return "unknown"
    return f"{torch_size(nbytes)} ({nbytes:,} bytes)" if nbytes >= 1024 else f"{nbytes:,} bytes"


def _phase(each: PhasePeak, phases: Iterable[PhasePeak]) -> str:
    several = len({other.device for other in phases}) > 1
    name = DATA if each.phase == wire.BETWEEN else each.phase
    return _line(f"{name} on device {each.device}" if several else name)


def _names(holders: Sequence[str]) -> str:
    told = [_line(each) for each in holders[:NAMES_TOLD_MAX]]
    left = len(holders) - len(told)
    return ", ".join(told) + (f" and {left} more" if left else "")


def _kind(row: Row) -> str:
    if not row.dtype:
        return f"{row.tensors:,} saved for backward"
    shape = "of several shapes" if row.shape is None else "×".join(map(str, row.shape[:_DIMENSIONS_MAX])) or "scalar"
    return f"{row.tensors:,} × {row.dtype} {shape}" if row.tensors > 1 else f"{row.dtype} {shape}"


def _line(text: str, limit: int = _CELL_CHARS_MAX) -> str:
    return wire.clean(" ".join(text.split()), limit)


# --------------------------------------------------------------------------------------------------------------- HTML


def _text(text: str) -> str:
    return html.escape(text)


def _marked(text: str) -> str:
    """`code` in backquotes."""
    return "".join(f"<code>{_text(part)}</code>" if at % 2 else _text(part) for at, part in enumerate(text.split("`")))


def _bytes(nbytes: int | None) -> tuple[str, str]:
    return ("unknown", "") if nbytes is None else (_text(torch_size(nbytes)), f"{nbytes:,}")


def _bar(nbytes: int | None, most: int, kind: str) -> str:
    share = 100 * (nbytes or 0) / most if most else 0.0
    return f"<div class='bar'><div class='{kind}' style='width:{share:.1f}%'></div></div>"


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int]) -> str:
    """`rows` are markup; texts of the first column may take several lines. `right`: columns of numbers."""

    def cells(name: str, texts: Sequence[str]) -> str:
        kinds = ["n" if at in right else "" if at else "w" for at in range(len(texts))]
        return "".join(f"<{name} class='{kind}'>{text}</{name}>" for kind, text in zip(kinds, texts, strict=True))

    caption = f"<caption>{_text(title)}</caption>" if title else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{caption}<tr>{cells('th', heads)}</tr>{body}</table>"


_STYLE = """
.gpumon{color:var(--jp-content-font-color1,inherit);font:13px/1.45 var(--jp-content-font-family,system-ui,sans-serif);
max-width:64em;border-left:3px solid #4a90d9;padding:.2em 0 .2em .9em}
.gpumon .head{font-weight:600}
.gpumon p{margin:.4em 0}
.gpumon table{border-collapse:collapse;margin:.5em 0!important;color:inherit;background:none;border:0;
table-layout:auto}
.gpumon caption{caption-side:top;text-align:left;font-weight:600;padding:.2em 0;color:inherit}
.gpumon tr,.gpumon tr:nth-child(n):nth-child(n){background:none!important}
.gpumon th,.gpumon td{text-align:left!important;vertical-align:top;padding:.15em 1em .15em 0!important;border:0;
border-bottom:1px solid rgba(128,128,128,.25);color:inherit;background:none;white-space:nowrap}
.gpumon th{font-weight:400!important;opacity:.7}
.gpumon .n{text-align:right!important;font-variant-numeric:tabular-nums}
.gpumon .w{min-width:10em;max-width:30em;white-space:normal;overflow-wrap:anywhere}
.gpumon code{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:.95em;background:none!important;
color:inherit;padding:0!important}
.gpumon .hint{opacity:.8;font-size:.92em}
.gpumon .oom{border-left:3px solid #d9534f;padding-left:.6em}
.gpumon .bar{width:7em;height:.7em;margin-top:.35em;background:rgba(128,128,128,.18)}
.gpumon .bar div{height:100%}
.gpumon .before{background:#8c8c8c}.gpumon .peak{background:#d9534f}.gpumon .after{background:#4a90d9}
.gpumon dl{display:grid;grid-template-columns:max-content 1fr;gap:.1em 1em;margin:.4em 0}
.gpumon dt{opacity:.8;font-weight:400}.gpumon dd{margin:0}
.gpumon summary{cursor:pointer;opacity:.7}
"""
