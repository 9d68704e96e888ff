"""The Blocks screen: segments as figures and as a map that keeps every byte, at any size, drawn once."""

from __future__ import annotations

from typing import Any

import pytest

from gpumon.analysis.blocks import allocator, cell_bytes, cells, largest_for, where
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import width
from gpumon.tui.widgets.block_lines import Map, map_lines, mark
from gpumon.tui.widgets.block_map import BlockMap
from gpumon_agent import wire

MIB = 1 << 20
FREE, USED, WAITS = 0, 1, 2  # as recordings and agents of any version have them
SEGMENTS = (
    wire.Segment(0, 20 * MIB, False, 0, blocks=((5 * MIB, USED), (10 * MIB, FREE), (5 * MIB, WAITS))),
    wire.Segment(100 * MIB, 2 * MIB, True, 0, blocks=tuple((512, i % 2) for i in range(4096))),
    wire.Segment(200 * MIB, 64 * MIB, False, 0, blocks=((64 * MIB, FREE),)),
    wire.Segment(300 * MIB, 32 * MIB, False, 7, expandable=True, blocks=((32 * MIB, USED),)),
    wire.Segment(400 * MIB, 128 * MIB, False, 0, private=True, blocks=((28 * MIB, USED), (100 * MIB, FREE))),
)


def text_of(app: Any) -> str:
    return "\n".join("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())


@pytest.mark.parametrize("cut", [False, True])
def test_every_byte_of_reserved_has_one_kind(cut: bool) -> None:
    found = allocator([part for some in wire.parts(SEGMENTS) for part in some] if cut else SEGMENTS)
    t = found.totals
    assert t.reserved == sum(s.bytes for s in SEGMENTS) == t.allocated + t.waiting + t.inactive_split + t.unused
    assert (t.allocated, t.waiting, t.inactive_split, t.unused) == (66 * MIB, 5 * MIB, 111 * MIB, 64 * MIB)
    assert (t.segments, t.blocks, t.largest_free) == (5, 4103, 100 * MIB)
    assert [pool.name for pool in found.pools] == [
        "private, large pool, stream 0", "large pool, stream 0", "large pool, stream 7", "small pool, stream 0",
    ]  # fmt: skip


@pytest.mark.parametrize("beyond", [(FREE, 1 << 60), (USED, 512), (WAITS, 0)])
def test_blocks_beyond_their_segments_end_are_left_out(beyond: tuple[int, int]) -> None:
    state, size = beyond
    found = allocator([wire.Segment(0, MIB, True, 0, blocks=((MIB // 2, USED), (MIB // 2, FREE), (size, state)))])
    assert (found.totals.reserved, found.totals.blocks) == (MIB, 2)
    assert [sum(cell) for cell in cells(found.pools[0], MIB // 4)] == [MIB // 4] * 4


def test_a_request_looks_into_the_pool_of_its_size() -> None:
    found = allocator(SEGMENTS)
    assert largest_for(found, 30 * MIB) == 64 * MIB
    assert largest_for(found, 1 * MIB) == 512


@pytest.mark.parametrize("width_", [1, 7, 80, 300])
@pytest.mark.parametrize("height", [4, 9, 30])
def test_the_map_fits_and_keeps_every_byte(width_: int, height: int) -> None:
    found = allocator(SEGMENTS)
    each = cell_bytes(found, width_, height)
    made = [cells(pool, each) for pool in found.pools]
    assert sum(-(-len(row) // width_) for row in made) <= height
    assert [sum(map(sum, row)) for row in made] == [pool.totals.reserved for pool in found.pools]
    assert all(sum(cell) <= each for row in made for cell in row)


def test_a_segment_is_found_in_the_map() -> None:
    pool = next(pool for pool in allocator(SEGMENTS).pools if pool.name == "large pool, stream 0")
    assert where(pool, 0, 4 * MIB) == (0, 5)
    assert where(pool, 1, 4 * MIB) == (5, 21)


def test_a_cell_says_what_most_of_it_is() -> None:
    assert [
        mark(cell, UNICODE)[0]
        for cell in ((9, 0, 0, 0), (9, 0, 3, 0), (3, 0, 9, 0), (0, 0, 9, 0), (0, 0, 0, 9), (0, 9, 1, 0))
    ] == list("█▓▒░·▞")
    assert [
        mark(cell, ASCII)[0] for cell in ((9, 0, 0, 0), (9, 0, 3, 0), (3, 0, 9, 0), (0, 0, 9, 0), (0, 0, 0, 9))
    ] == list("#%+-.")


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_lines_keep_their_room(new_run, store_of, glyphs: Any) -> None:
    record = store_of(new_run().hello().segments(3)).frame(0).ranks[0].segments[0]
    shown = Map("cuda:0", record, allocator(record.segments), unix_ns=10**18)
    for room in (10, 20, 40, 80, 120, 200):
        for height in (1, 3, 6, 12, 40):
            lines = map_lines(shown, (0, 2), room, height, glyphs, "strong")
            assert len(lines) <= height
            assert all(width(line) <= room for line in lines)


# ---------------------------------------------------------------------------------------------------------- in the app


async def test_the_map_is_asked_for_by_key_and_gone_through_once(app_of, new_run, reader_of, settled, asked) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader, asker=asked)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("6")
        await settled(pilot)
        assert "Not read yet. Press b" in text_of(app)
        await pilot.press("b")
        await settled(pilot)
        assert asked.heard == [(run.source, "blocks", 0)]
        reader.add(run.segments(12_432))
        await settled(pilot)
        shown = text_of(app)
        assert "step 12,432, as forward began; training waited 25 ms" in shown
        panel = app.screen.query_one(BlockMap)
        found, drawn = panel._found, []
        original = panel.draw
        panel.draw = lambda *a: (drawn.append(1), original(*a))[1]
        for _ in range(4):
            app.redraw()
            await pilot.pause(0.05)
        assert drawn == []
        assert panel._found is found
        await pilot.press("f")
        assert "1 block: unused 1.00 GiB" in text_of(app)
        await pilot.press("down", "down", "right", "left", "left", "up", "e")
        await settled(pilot)
        assert "fragmentation 18 % = inactive split" in text_of(app)


async def test_on_the_cpu_it_says_that_there_is_none(app_of, new_run, settled) -> None:
    run = new_run().hello(backend="cpu", devices=(wire.Device(0, None, "CPU", None, "cpu"),)).steps(0, 3).synced()
    app = app_of(run)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("6", "f", "right", "up", "e")
        await settled(pilot)
        await pilot.press("escape")
        await settled(pilot)
        assert "the CPU has no caching allocator" in text_of(app)
