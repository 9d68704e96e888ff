"""The allocator's map as text: figures, rows of cells per pool, the selected segment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gpumon.analysis import blocks
from gpumon.analysis.blocks import ALLOCATED, SPLIT, UNUSED, WAITING, AllocatorMap, Cell, Pool, Totals, Verdict, verdict
from gpumon.analysis.units import duration, percent, size
from gpumon.session.frame import RankFrame, SegmentsRecord
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import EMPTY, Line, Span, cells, fit, flow, spread, width, words
from gpumon_agent import wire

FOOT = 3
MARGIN = 3  # cells left of a row
FULL = 15 / 16  # a cell is drawn full from this share on, and free below the rest

_KINDS = (
    # kind, word, role, sign, sign without Unicode
    (ALLOCATED, "allocated", "line:allocated", "█", "#"),
    (WAITING, "waiting", "line:temporaries", "▞", "w"),
    (SPLIT, "inactive split", "line:reserved", "░", "-"),
    (UNUSED, "unused", "line:slack", "·", "."),
)
_HARM = {
    "none": ("fits", "good"), "gaps": ("warning", "bad"), "full": ("warning", "warn"), "unknown": ("silent", "dim"),
}  # fmt: skip
_PARTLY = {ALLOCATED: ("▓", "%"), SPLIT: ("▒", "+")}


@dataclass(frozen=True, slots=True)
class Map:
    """The panel's data. `why_not`: why the agent takes no requests; None: it does."""

    device: str
    record: SegmentsRecord | None = None
    found: AllocatorMap | None = None
    oom: wire.Oom | None = None  # the OOM at which the record was made
    unix_ns: int = 0
    why_not: str | None = None
    on_gpu: bool = True
    free: int | None = None  # of the device, by the driver; else `free_at_most`
    free_at_most: bool = False
    key: str = "b"

    @property
    def verdict(self) -> Verdict | None:
        if self.found is None:
            return None
        failed = self.oom.requested if self.oom is not None else None
        free, at_most = (self.oom.free, False) if self.oom is not None else (self.free, self.free_at_most)
        return verdict(self.found, free, at_most=at_most, failed=failed)


def oom_of(rank: RankFrame, record: SegmentsRecord) -> wire.Oom | None:
    """The OOM at which the allocator was read, if any."""
    oom = rank.oom
    at_one = record.reason == "oom" and oom is not None and (oom.device, oom.step) == (record.device, record.step)
    return oom if at_one else None


def map_lines(m: Map, chosen: tuple[int, int], room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    """`chosen`: index of the pool, index of the segment in it."""
    head: list[Span] = [(" Blocks", title), (f"  {m.device}", "dim")]
    if m.record is None or m.found is None or not m.found.pools:
        return [fit(head, room), EMPTY, *_nothing(m, room)]
    tall = height >= 12
    top = _facts(m, m.record, room, glyphs)
    top = [*top, EMPTY] if tall else top[: max(1, height // 4)]
    foot = FOOT if height >= 9 else 0
    left_over = height - 1 - len(top) - foot
    pools, rest = _that_fit(m.found.pools, left_over)
    per_row = max(1, room - MARGIN - 1)
    rows = max(1, left_over - len(pools) - bool(rest))
    each = blocks.cell_bytes(AllocatorMap(m.found.totals, pools), per_row, max(rows, len(pools)))
    lines = [spread(head, [(f"a cell is {size(each)} ", "dim")], room), *top]
    for number, pool in enumerate(pools):
        here = chosen[1] if number == chosen[0] else None
        lines.append(fit(_heading(pool, number == chosen[0], room, glyphs), room))
        lines += _rows(pool, each, per_row, here, glyphs)
    if rest:
        together = blocks.sum_of(pool.totals for pool in rest)
        lines.append(fit([(f"   {len(rest)} more pools: {size(together.reserved)} reserved", "dim")], room))
    lines = lines[: height - foot]
    if foot and chosen[0] < len(m.found.pools):
        lines += [EMPTY] * (height - foot - len(lines))
        lines += _foot(m.found.pools[chosen[0]], chosen[1], room)
    return lines


def _that_fit(pools: tuple[Pool, ...], rows: int) -> tuple[tuple[Pool, ...], tuple[Pool, ...]]:
    """The pools with room for a heading and a row; the others."""
    if 2 * len(pools) <= rows:
        return pools, ()
    count = max(1, (rows - 1) // 2)
    return pools[:count], pools[count:]


def _facts(m: Map, record: SegmentsRecord, room: int, glyphs: Glyphs) -> list[Line]:
    assert m.found is not None
    t = m.found.totals
    clock = datetime.fromtimestamp(m.unix_ns / 1e9).strftime("%H:%M:%S")
    waited = f"; training waited {duration(record.spent_ns / 1e9)}" if record.spent_ns is not None else ""
    read = f" read {clock}, step {record.step:,}, as {record.phase} began{waited}"
    if record.reason == "oom":
        read = f" read {clock}, step {record.step:,}, in {record.phase}, when an allocation failed"
    lines = [*_verdict(m, room, glyphs), fit([(read, "dim")], room)]
    items: list[Line] = []
    for kind, word, role, sign, plain in _KINDS:
        value = _of(t, kind)
        if value or kind in (ALLOCATED, SPLIT):
            items.append(((f"{sign if glyphs.braille else plain} ", role), (f"{word} ", "dim"), (size(value), "text")))
    items.append((("reserved ", "dim"), (size(t.reserved), "strong")))
    items.append((("segments ", "dim"), (f"{t.segments:,}", "text"), ("  blocks ", "dim"), (f"{t.blocks:,}", "text")))
    items.append((("largest free block ", "dim"), (size(t.largest_free), "strong")))
    items.append((("fragmentation ", "dim"), (percent(t.fragmentation), "strong")))
    items.append(_mixed(glyphs))
    return [*lines, *(fit(((" ", ""), *line), room) for line in flow(items, room - 2, gap=3))]


def _verdict(m: Map, room: int, glyphs: Glyphs) -> list[Line]:
    """Whether fragmentation is harmful, in at most two rows."""
    said = m.verdict
    if said is None:
        return []
    sign, role = _HARM[said.harm]
    lead = f" {getattr(glyphs, sign)} "
    rows = words(said.text, role, max(10, room - len(lead) - 1))[:2]
    return [fit(((lead if not at else " " * len(lead), role), *row), room) for at, row in enumerate(rows)]


def _mixed(glyphs: Glyphs) -> Line:
    """The signs of cells with more than one state. Whose a block is, its record does not say: colours are states."""
    at = 0 if glyphs.braille else 1
    text = f"{_PARTLY[ALLOCATED][at]} {_PARTLY[SPLIT][at]} "
    return ((text, "text"), ("mixed: mostly allocated, mostly inactive split", "dim"))


def _of(t: Totals, kind: int) -> int:
    return (t.allocated, t.waiting, t.inactive_split, t.unused)[kind]


def _heading(pool: Pool, here: bool, room: int, glyphs: Glyphs) -> list[Span]:
    t = pool.totals
    parts = [f"{t.segments:,} segment{'s' * (t.segments > 1)}", size(t.reserved)]
    parts += [f"{word} {size(value)}" for kind, word, *_ in _KINDS if (value := _of(t, kind)) and kind != ALLOCATED]
    if t.largest_free:
        parts.append(f"largest free block {size(t.largest_free)}")
    between = " · " if glyphs.braille else ", "
    start: list[Span] = [(f" {glyphs.now if here else ' '} ", "key"), (f"{pool.name}  ", "strong" if here else "text")]
    while len(parts) > 1 and width(start) + cells(between.join(parts)) > room:
        parts.pop()
    return [*start, (between.join(parts), "dim")]


def _rows(pool: Pool, each: int, per_row: int, chosen: int | None, glyphs: Glyphs) -> list[Line]:
    made = blocks.cells(pool, each)
    begin, end = blocks.where(pool, chosen, each) if chosen is not None else (0, 0)
    lines: list[Line] = []
    for start in range(0, len(made), per_row):
        spans: list[Span] = [(" " * MARGIN, "")]
        text, role = "", ""
        for at in range(start, min(start + per_row, len(made))):
            sign, this = mark(made[at], glyphs)
            if begin <= at < end:
                this = "strong"
            if this != role and text:
                spans.append((text, role))
                text = ""
            role = this
            text += sign
        lines.append((*spans, (text, role)))
    return lines


def mark(cell: Cell, glyphs: Glyphs) -> tuple[str, str]:
    """Sign and role of a cell, by the kind of most of its bytes."""
    kind = max(range(4), key=cell.__getitem__)
    _, _, role, sign, plain = _KINDS[kind]
    allocated = cell[ALLOCATED] / (sum(cell) or 1)
    if kind in _PARTLY and 1 - FULL < allocated < FULL:
        sign, plain = _PARTLY[kind]
    return (sign if glyphs.braille else plain), role


def _foot(pool: Pool, at: int, room: int) -> list[Line]:
    segment = pool.segments[min(at, len(pool.segments) - 1)]
    t = segment.totals
    first = f" segment {at + 1:,} of {len(pool.segments):,}"
    about = (
        f"  {size(segment.bytes)} at {segment.address:#x}, {pool.name}{', expandable' if segment.expandable else ''}"
    )
    what = ", ".join(f"{word} {size(value)}" for kind, word, *_ in _KINDS if (value := _of(t, kind)))
    free = f", largest free block {size(t.largest_free)}" if t.largest_free and not t.unused else ""
    second = f"   {t.blocks:,} block{'s' * (t.blocks != 1)}: {what}{free}"
    return [EMPTY, fit([(first, "strong"), (about, "dim")], room), fit([(second, "text")], room)]


def _nothing(m: Map, room: int) -> list[Line]:
    if not m.on_gpu:
        text = "No segments: the CPU has no caching allocator. On a GPU this is the map of PyTorch's allocator."
    elif m.why_not is not None:
        text = f"There is no map of the allocator, and none can be requested: {m.why_not}."
    else:
        text = (
            "Not read yet; asked for as this screen was opened. The agent reads the allocator's blocks once, between "
            f"two phases, and the training waits about a microsecond for each block. {m.key} asks again. At an "
            "out-of-memory the agent reads them without a request."
        )
    return [((" ", ""), *line) for line in words(text, "dim", max(10, room - 2))]


def sums(m: Map) -> list[str]:
    if m.found is None or m.record is None:
        return []
    t = m.found.totals
    said = [
        f"reserved {t.reserved:,} B = allocated {t.allocated:,} + waiting {t.waiting:,} + inactive split "
        f"{t.inactive_split:,} + unused {t.unused:,}",
        f"fragmentation {percent(t.fragmentation)} = inactive split {t.inactive_split:,} / reserved {t.reserved:,}",
        f"largest free block {t.largest_free:,} B: a larger request takes a new segment from the device",
    ]
    request = blocks.largest_request(m.found)
    if request is not None:
        said.append(
            f"largest request so far {request:,} B, to 2 MiB: the largest segment of the large pool, because above "
            "20 MiB each is taken for one request"
        )
    if m.verdict is not None:
        said.append(
            f"{m.verdict.text}. Fragmentation is harmful if a request as large as the largest so far fits neither in a "
            "free block nor on the device, although both together have as many bytes."
        )
    said.append("colours are states: the allocator's record of a block does not say whose it is (Layers, Leaks do)")
    if m.record.spent_ns is not None:
        said.append(f"reading {t.blocks:,} blocks paused the training for {m.record.spent_ns:,} ns")
    return said
