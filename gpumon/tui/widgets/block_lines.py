"""The allocator's map as text: figures, rows of cells per pool, the selected segment."""

from __future__ import annotations

from datetime import datetime

import msgspec

from gpumon.analysis import blocks
from gpumon.analysis.blocks import (
    ALLOCATED,
    KINDS,
    OWNERLESS,
    SPLIT,
    UNOWNED,
    UNUSED,
    WAITING,
    AllocatorMap,
    Cell,
    Pool,
    Verdict,
    Whole,
    verdict,
)
from gpumon.analysis.units import duration, percent, size
from gpumon.session.frame import RankFrame, SegmentsRecord
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.text_layout import EMPTY, Line, Span, cells, fit, flow, plain, spread, width, words
from gpumon.tui.widgets.device_bar import LABELS
from gpumon_agent import wire

FOOT = 3  # rows below the map: an empty one, and the selected segment's
TALL = 16  # from this height on, its blocks may take two
MARGIN = 3  # cells left of a row
FULL = 15 / 16  # a cell is drawn full from this share on, and free below the rest

_SIGNS = {
    # kind: role, sign, sign without Unicode; owners have those of the device bar
    UNOWNED: ("text", "╱", "U"),
    ALLOCATED: ("line:allocated", "█", "#"),
    WAITING: ("line:temporaries", "≈", "w"),
    SPLIT: ("line:reserved", "░", "-"),
    UNUSED: ("line:slack", "·", "."),
}
NAMED = 2  # variables in the details of a segment
_HARM = {
    "none": ("fits", "good"), "gaps": ("warning", "bad"), "full": ("warning", "warn"), "unknown": ("silent", "dim"),
}  # fmt: skip
_PARTLY = {ALLOCATED: ("▓", "%"), SPLIT: ("▒", "+")}


class Map(msgspec.Struct, frozen=True):
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


class _Plan(msgspec.Struct, frozen=True):
    """Where the map has what. `top`: lines above it; `rows`: (index of the pool, its first cell; None: its heading)."""

    top: list[Line]
    rows: tuple[tuple[int, int | None], ...]
    each: int  # bytes of a cell
    per_row: int
    rest: tuple[Pool, ...]  # the pools without room


def _plan(m: Map, record: SegmentsRecord, found: AllocatorMap, chosen: int, room: int, height: int, g: Glyphs) -> _Plan:
    top = _facts(m, record, room, g)
    top = [*top, EMPTY] if height >= 12 else top[: max(1, height // 4)]
    left_over = height - 1 - len(top) - _foot_rows(height)
    first, count = _that_fit(len(found.pools), left_over, chosen)
    pools = found.pools[first : first + count]
    rest = found.pools[:first] + found.pools[first + count :]
    per_row = max(1, room - MARGIN - 1)
    rows = max(1, left_over - len(pools) - bool(rest))
    each = blocks.cell_bytes(AllocatorMap(found.totals, pools), per_row, max(rows, len(pools)))
    at: list[tuple[int, int | None]] = []
    for number, pool in enumerate(pools, first):
        at.append((number, None))
        at += [(number, cell) for cell in range(0, -(-pool.totals.reserved // each), per_row)]
    return _Plan(top, tuple(at), each, per_row, rest)


def _foot_rows(height: int) -> int:
    return 0 if height < 9 else FOOT + (height >= TALL)


def spot(m: Map, chosen: tuple[int, int], room: int, height: int, g: Glyphs, x: int, y: int) -> tuple[int, int] | None:
    """The pool and segment drawn there. On a pool's heading: its first segment."""
    if m.record is None or m.found is None or not m.found.pools:
        return None
    plan = _plan(m, m.record, m.found, chosen[0], room, height, g)
    row = y - 1 - len(plan.top)
    if not 0 <= row < min(len(plan.rows), height - _foot_rows(height) - 1 - len(plan.top)):
        return None
    number, cell = plan.rows[row]
    if cell is None:
        return number, 0
    if not 0 <= x - MARGIN < plan.per_row:
        return None
    segment = blocks.segment_at(m.found.pools[number], cell + x - MARGIN, plan.each)
    return None if segment is None else (number, segment)


def map_lines(m: Map, chosen: tuple[int, int], room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    """`chosen`: index of the pool, index of the segment in it."""
    head: list[Span] = [(" Blocks", title), (f"  {m.device}", "dim")]
    if m.record is None or m.found is None or not m.found.pools:
        return [fit(head, room), EMPTY, *_nothing(m, room)]
    plan = _plan(m, m.record, m.found, chosen[0], room, height, glyphs)
    foot = _foot_rows(height)
    lines = [spread(head, [(f"a cell is {size(plan.each)} ", "dim")], room), *plan.top]
    for number in dict.fromkeys(number for number, _ in plan.rows):
        pool = m.found.pools[number]
        here = chosen[1] if number == chosen[0] else None
        lines.append(fit(_heading(pool, number == chosen[0], room, glyphs), room))
        lines += _rows(pool, plan.each, plan.per_row, here, glyphs)
    if plan.rest:
        together = blocks.sum_of(pool.totals for pool in plan.rest)
        lines.append(fit([(f"   {len(plan.rest)} more pools: {size(together.reserved)} reserved", "dim")], room))
    lines = lines[: height - foot]
    if foot and chosen[0] < len(m.found.pools):
        lines += [EMPTY] * (height - foot - len(lines))
        lines += _foot(m.found.pools[chosen[0]], chosen[1], room, foot - 2, m.record)
    return lines


def _that_fit(pools: int, rows: int, chosen: int) -> tuple[int, int]:
    """The first of the pools with room for a heading and a row, and their number. The selected one is among them."""
    if 2 * pools <= rows:
        return 0, pools
    count = max(1, (rows - 1) // 2)
    return max(0, min(chosen - count + 1, pools - count)), count


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
    for kind in KINDS:
        value = t.kinds.get(kind, 0)
        if value or kind == SPLIT:
            sign, role = look(kind, glyphs)
            items.append(((f"{sign} ", role), (f"{word_of(kind, record)} ", "dim"), (size(value), "text")))
    items.append((("reserved ", "dim"), (size(t.reserved), "strong")))
    items.append((("segments ", "dim"), (f"{t.segments:,}", "text"), ("  blocks ", "dim"), (f"{t.blocks:,}", "text")))
    items.append((("largest free block ", "dim"), (size(t.largest_free), "strong")))
    items.append((("fragmentation ", "dim"), (percent(t.fragmentation), "strong")))
    items.append(_mixed(glyphs, owned=m.found.owned))
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


def look(kind: str, glyphs: Glyphs) -> tuple[str, str]:
    """Sign and role of a kind."""
    if kind not in _SIGNS:
        return glyphs.lines[kind], line_role(kind)
    role, sign, plain = _SIGNS[kind]
    return (sign if glyphs.braille else plain), role


def word_of(kind: str, record: SegmentsRecord) -> str:
    if kind == UNOWNED and record.walked is False:
        return "unowned or activations"  # autograd's graph was not read in that step
    return LABELS.get(kind, kind)


def _mixed(glyphs: Glyphs, *, owned: bool) -> Line:
    """What is drawn in cells of more than one kind. From an agent that reads no owners: of more than one state."""
    if owned:
        return (("a cell shows what most of it is", "dim"),)
    at = 0 if glyphs.braille else 1
    text = f"{_PARTLY[ALLOCATED][at]} {_PARTLY[SPLIT][at]} "
    return ((text, "text"), ("mixed: mostly allocated, mostly inactive split", "dim"))


def _heading(pool: Pool, here: bool, room: int, glyphs: Glyphs) -> list[Span]:
    t = pool.totals
    parts = [f"{t.segments:,} segment{'s' * (t.segments > 1)}", size(t.reserved)]
    parts += [f"{kind} {size(value)}" for kind in (WAITING, SPLIT, UNUSED) if (value := t.kinds.get(kind, 0))]
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
    kind = max(cell, key=cell.__getitem__, default=UNUSED)
    sign, role = look(kind, glyphs)
    allocated = cell.get(ALLOCATED, 0) / (sum(cell.values()) or 1)
    if kind in _PARTLY and 1 - FULL < allocated < FULL:
        sign = _PARTLY[kind][0 if glyphs.braille else 1]
    return sign, role


def _foot(pool: Pool, at: int, room: int, most: int, record: SegmentsRecord) -> list[Line]:
    """The selected segment, its blocks in at most so many rows."""
    segment = pool.segments[min(at, len(pool.segments) - 1)]
    t = segment.totals
    first = f" segment {at + 1:,} of {len(pool.segments):,}"
    about = (
        f"  {size(segment.bytes)} at {segment.address:#x}, {pool.name}{', expandable' if segment.expandable else ''}"
    )
    what = ", ".join(_whose(segment, record))
    free = f", largest free block {size(t.largest_free)}" if t.largest_free and not t.unused else ""
    second = f"{t.blocks:,} block{'s' * (t.blocks != 1)}: {what}{free}"
    rows = [plain([row]) for row in words(second, "text", max(10, room - 4))]
    rows = [*rows[: most - 1], " ".join(rows[most - 1 :])]
    return [
        EMPTY,
        fit([(first, "strong"), (about, "dim")], room),
        *(fit([("   ", ""), (row, "text")], room - 1) for row in rows),
    ]


def _whose(segment: Whole, record: SegmentsRecord) -> list[str]:
    """The segment's bytes by owner, the most first, then what is free."""
    kinds, held = segment.totals.kinds, segment.held
    owners = sorted((kind for kind in kinds if kind not in OWNERLESS), key=lambda kind: -kinds[kind])
    said = []
    for kind in (*owners, *(kind for kind in OWNERLESS if kind in kinds)):
        names = [name for (of, name), _ in held.most_common() if of == kind]
        more = f" ({', '.join(names[:NAMED])}{', …' * (len(names) > NAMED)})" if names else ""
        said.append(f"{size(kinds[kind])} {'free' if kind == SPLIT else word_of(kind, record)}{more}")
    return said


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
    if m.found.owned:
        owners = [kind for kind in KINDS if kind in t.kinds and kind not in OWNERLESS]
        parts = " + ".join(f"{word_of(kind, m.record)} {t.kinds[kind]:,}" for kind in owners)
        said.append(
            f"allocated {t.allocated:,} B = {parts}. Blocks are larger than what was requested (by up to "
            "512 B, large ones by up to 1 MiB), so this is more than on the Overview"
        )
    else:
        said.append("this agent does not read the owners of blocks: colours are states (Layers and Leaks tell owners)")
    if m.record.spent_ns is not None:
        said.append(f"reading {t.blocks:,} blocks paused the training for {m.record.spent_ns:,} ns")
    return said
