"""The Blocks screen: segments as figures and as a map that keeps every byte, at any size, drawn once."""

from __future__ import annotations

from typing import Any

import pytest
from pictured import text_of
from textual import events

from gpumon.analysis.blocks import (
    KINDS,
    OWNERLESS,
    AllocatorMap,
    allocator,
    cell_bytes,
    cells,
    largest_for,
    largest_request,
    verdict,
    where,
)
from gpumon.session.frame import SegmentsRecord
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.text_layout import plain, width
from gpumon.tui.widgets.block_lines import Map, look, map_lines, mark, spot
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
    assert [sum(cell.values()) for cell in cells(found.pools[0], MIB // 4)] == [MIB // 4] * 4


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
    each_row = [[sum(cell.values()) for cell in row] for row in made]
    assert [sum(row) for row in each_row] == [pool.totals.reserved for pool in found.pools]
    assert all(cell <= each for row in each_row for cell in row)


def test_a_segment_is_found_in_the_map() -> None:
    pool = next(pool for pool in allocator(SEGMENTS).pools if pool.name == "large pool, stream 0")
    assert where(pool, 0, 4 * MIB) == (0, 5)
    assert where(pool, 1, 4 * MIB) == (5, 21)


def test_a_cell_says_what_most_of_it_is() -> None:
    states = ("allocated", "waiting", "inactive split", "unused")
    made = [
        dict(zip(states, cell, strict=True))
        for cell in ((9, 0, 0, 0), (9, 0, 3, 0), (3, 0, 9, 0), (0, 0, 9, 0), (0, 0, 0, 9), (0, 9, 1, 0))
    ]
    assert [mark(cell, UNICODE)[0] for cell in made] == list("█▓▒░·≈")
    assert [mark(cell, ASCII)[0] for cell in made] == list("#%+-.w")


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_lines_keep_their_room(new_run, store_of, glyphs: Any) -> None:
    record = store_of(new_run().hello().segments(3)).frame(0).ranks[0].segments[0]
    shown = Map("cuda:0", record, allocator(record.segments), unix_ns=10**18)
    for room in (10, 20, 40, 80, 120, 200):
        for height in (1, 3, 6, 12, 40):
            lines = map_lines(shown, (0, 2), room, height, glyphs, "strong")
            assert len(lines) <= height
            assert all(width(line) <= room for line in lines)


# ---------------------------------------------------------------------------------------------------------- the owners

NUMBERS = {line: number for number, line in enumerate(wire.BLOCK_OWNERS)}
HOLDERS = (wire.Holder("cache[*]", "global", "train.py:9"), wire.Holder("ema", "local", "train.py:5", 1, "main"))


def owned_by(*owners: tuple[int, int | str | None], address: int = 0, **how: Any) -> wire.Segment:
    """A segment of blocks (MiB; an owner, a number, or None: free)."""
    return wire.Segment(
        address << 40, sum(size for size, _ in owners) * MIB, False, 0,
        blocks=tuple((size * MIB, FREE if owner is None else USED) for size, owner in owners),
        owners=bytes(NUMBERS[owner] if isinstance(owner, str) else owner or 0 for _, owner in owners), **how,
    )  # fmt: skip


OWNED = (
    owned_by((30, "weights"), (4, ""), (8, "gradients"), (2, None), (20, "optimizer"), (16, "activations")),
    owned_by((64, 128), (8, 129), (4, "variables"), (4, None), address=1),
    owned_by((24, None), address=2),
    owned_by((22, "buffers"), (22, "buckets"), (22, "inputs"), (22, "workspaces"), (22, "checkpoints"),
             (22, "other_models"), address=3),
)  # fmt: skip


def shown_of(segments: Any, *, walked: bool | None = True, leaking: tuple[str, ...] = ("cache",)) -> Map:
    record = SegmentsRecord(0, 0, 7, "backward", 1, "asked", tuple(segments), 5, HOLDERS, walked)
    return Map("cuda:0", record, allocator(segments, HOLDERS, leaking), unix_ns=10**18)


@pytest.mark.parametrize("cut", [False, True])
def test_every_allocated_byte_has_one_owner(cut: bool) -> None:
    many = wire.Segment(9 << 40, 8192 * 512, True, 0, blocks=((512, USED),) * 8192, owners=bytes([1, 2, 128, 0] * 2048))
    parts = [part for some in wire.parts((*OWNED, many)) for part in some] if cut else (*OWNED, many)
    found = allocator(parts, HOLDERS, ("cache",))
    kinds = dict(found.totals.kinds)
    free = [kinds.pop("inactive split"), kinds.pop("unused")]
    assert free == [6 * MIB, 24 * MIB]
    assert sum(kinds.values()) == found.totals.allocated
    assert {kind: size // MIB for kind, size in kinds.items()} == {
        "weights": 31, "unowned": 5, "gradients": 8, "optimizer": 20, "activations": 16, "leak": 65, "variables": 12,
        "buffers": 23, "buckets": 22, "inputs": 22, "workspaces": 22, "checkpoints": 22, "other_models": 22,
    }  # fmt: skip
    assert allocator(parts, HOLDERS).totals.kinds["variables"] == 77 * MIB, "nothing grows"


def test_a_number_of_a_newer_agent_is_an_owner_without_a_name_and_an_older_agent_has_none() -> None:
    newer = allocator([owned_by((3, 99), (2, 200))])
    assert dict(newer.totals.kinds) == {"unowned": 5 * MIB}
    older = allocator(SEGMENTS)
    assert (newer.owned, older.owned) == (True, False)
    assert {"allocated", "waiting"} <= older.totals.kinds.keys() <= {*OWNERLESS}


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
@pytest.mark.parametrize(("room", "height"), [(120, 34), (80, 19)])
def test_every_sign_of_the_map_is_in_the_legend_and_no_two_owners_share_one(
    glyphs: Any, room: int, height: int
) -> None:
    signs = [look(kind, glyphs)[0] for kind in KINDS if kind != "allocated"]
    assert len({*signs}) == len(signs)
    for segments in (OWNED, SEGMENTS):
        lines = map_lines(shown_of(segments), (0, 0), room, height, glyphs, "strong")
        text = plain(lines)
        first = next(at for at, line in enumerate(text.splitlines()) if "pool, stream" in line)
        drawn = {sign for line in lines[first:-3] for part, role in line for sign in part if role.startswith("line:")}
        assert len(drawn) > 3
        legend = "\n".join(text.splitlines()[:first])
        assert all(f"{sign} " in legend for sign in drawn), drawn
        assert ("a cell shows what most of it is" in legend) is (segments is OWNED)
    assert "weights 30.0 MiB" in plain(map_lines(shown_of(OWNED), (0, 0), room, height, glyphs, "strong"))


def test_the_details_say_whose_the_segment_is() -> None:
    def details(segment: int, **how: Any) -> str:
        lines = plain(map_lines(shown_of(OWNED, **how), (0, segment), 80, 24, UNICODE, "strong")).splitlines()
        at = next(at for at, line in enumerate(lines) if line.startswith(" segment "))
        return " ".join(" ".join(lines[at + 1 :]).split())

    assert details(0) == (
        "6 blocks: 30.0 MiB weights, 20.0 MiB optimizer, 16.0 MiB activations, 8.00 MiB gradients, 4.00 MiB unowned, "
        "2.00 MiB free, largest free block 2.00 MiB"
    )
    assert "64.0 MiB leak (cache), 12.0 MiB variables (ema), 4.00 MiB free" in details(1)
    assert "76.0 MiB variables (cache, ema)" in details(1, leaking=())
    assert details(2) == "1 block: 24.0 MiB unused"
    assert "4.00 MiB unowned or activations" in details(0, walked=False)


def test_a_place_on_the_map_is_the_segment_that_is_drawn_there() -> None:
    for segments in (OWNED, SEGMENTS):
        for room, height in ((120, 34), (80, 19), (60, 10)):
            shown = shown_of(segments)
            assert shown.found is not None
            for number, pool in enumerate(shown.found.pools):
                for at in range(len(pool.segments)):
                    lines = map_lines(shown, (number, at), room, height, UNICODE, "strong")
                    texts = [plain([line]) for line in lines]
                    first = next(y for y, text in enumerate(texts) if "pool, stream" in text)
                    end = next(y for y, text in enumerate(texts) if text.startswith(" segment "))
                    marked = [
                        (x, y)
                        for y in range(first, end)
                        for x, role in enumerate(role for text, role in lines[y] for _ in text)
                        if role == "strong" and "pool" not in texts[y]
                    ]
                    found = [spot(shown, (number, at), room, height, UNICODE, x, y) for x, y in marked]
                    assert all(each is not None and each[0] == number for each in found)
                    assert (number, at) in found or len(found) == 1, "it fills most of a cell, or is a part of one"
                    assert found[1:-1] == [(number, at)] * len(found[1:-1])
    assert spot(shown_of(OWNED), (0, 0), 120, 34, UNICODE, 1, 12) is None, "left of the map"


# --------------------------------------------------------------------------------------------------------- the verdict


def holding(*large: tuple[tuple[int, int], ...], **how: Any) -> AllocatorMap:
    """Large segments of these blocks (MiB, state)."""
    return allocator(
        wire.Segment(at << 40, sum(size for size, _ in blocks) * MIB, False, 0, blocks=tuple(
            (size * MIB, state) for size, state in blocks), **how)
        for at, blocks in enumerate(large)
    )  # fmt: skip


GAPS = ((80, USED), (100, FREE), (20, USED)), ((60, FREE), (40, USED)), ((30, FREE),)
"""160 MiB in gaps, 30 MiB unused; the largest request was one of 200 MiB."""


def test_the_largest_request_is_the_largest_segment_that_was_taken_for_one() -> None:
    assert largest_request(holding(*GAPS)) == 200 * MIB
    assert largest_request(holding(((20, USED),), ((22, USED),))) == 22 * MIB
    assert largest_request(holding(((20, USED),))) is None, "20 MiB are taken for many requests below 10 MiB"
    assert largest_request(holding(((400, USED),), expandable=True)) is None
    assert largest_request(holding(((400, USED),), private=True)) is None


@pytest.mark.parametrize(
    ("blocks", "free", "harm", "said"),
    [
        ((((30, FREE),), ((90, USED),)), None, "none", "no harm: 30.0 MiB cached, and nothing of it between blocks"),
        ((*GAPS, ((200, FREE),)), None, "none", "largest request so far 200.0 MiB, largest free block 200.0 MiB"),
        (GAPS, 170, "none", "largest free block 100.0 MiB; the device has 200.0 MiB for a new segment"),
        (GAPS, 169, "gaps", "the device has 199.0 MiB for a new segment, and 160.0 MiB lie in gaps"),
        (GAPS, 10, "gaps", "harm: 190.0 MiB cached"),
        (GAPS, 9, "full", "full, not fragmented: 190.0 MiB cached"),
        ((((150, USED), (50, FREE)),), 150, "gaps", "the device has 150.0 MiB for a new segment, and 50.0 MiB lie in"),
        ((((150, USED), (50, FREE)),), 149, "full", "full, not fragmented: 50.0 MiB cached"),
        (GAPS, None, "unknown", "what the device has free is not known: no verdict"),
        ((((15, USED), (5, FREE)),), 9, "unknown", "no segment tells how large a request was: no verdict"),
    ],
)
def test_fragmentation_is_harmful_if_the_largest_request_fits_only_in_pieces(
    blocks: Any, free: int | None, harm: str, said: str
) -> None:
    found = verdict(holding(*blocks), None if free is None else free * MIB)
    assert found.harm == harm
    assert said in found.text


def test_a_request_that_failed_is_judged_by_its_own_size() -> None:
    assert verdict(holding(*GAPS), 0, failed=180 * MIB).harm == "gaps"
    assert verdict(holding(*GAPS), 0, failed=191 * MIB).harm == "full"
    assert verdict(holding(*GAPS), 150 * MIB, failed=180 * MIB).harm == "unknown"
    assert "180.0 MiB were requested" in verdict(holding(*GAPS), 0, failed=180 * MIB).text
    assert "the device has at most 40.0 MiB for" in verdict(holding(*GAPS), 10 * MIB, at_most=True).text


@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_the_verdict_is_above_the_map_and_mixed_cells_are_in_the_legend(new_run, store_of, glyphs: Any) -> None:
    record = store_of(new_run().hello().segments(3)).frame(0).ranks[0].segments[0]
    shown = Map("cuda:0", record, allocator(record.segments), unix_ns=10**18)
    for room, height in ((120, 34), (80, 19)):
        text = plain(map_lines(shown, (0, 0), room, height, glyphs, "strong"))
        assert text.splitlines()[1].strip().startswith(f"{glyphs.fits} no harm: 5.25 GiB cached, largest request so")
        mixed = "▓ ▒" if glyphs is UNICODE else "% +"
        assert f"{mixed} mixed: mostly allocated, mostly inactive split" in text
        if glyphs is ASCII:
            assert text.isascii()


# ---------------------------------------------------------------------------------------------------------- in the app


async def test_the_screen_asks_when_it_is_opened_and_not_again_while_the_reading_holds(
    app_of, new_run, reader_of, settled, asked
) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader, asker=asked)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert asked.heard == []
        await pilot.press("6")
        await settled(pilot)
        await settled(pilot)
        assert len(asked.heard) == 1
        reader.add(run.segments(12_432))
        await settled(pilot)
        await pilot.press("1", "6")
        await settled(pilot)
        assert len(asked.heard) == 2, "other segments are reserved now than when it was read"
        reserved = app.view.device.ledger.reserved
        part = wire.Segments(0, 1, 12_433, "forward", run.t_ns, "asked", 0, 1, (
            wire.Segment(0, reserved, False, 0, blocks=((reserved, USED),)),), 5)  # fmt: skip
        reader.add(run.say(part) or run)
        await settled(pilot)
        await pilot.press("1", "6")
        await settled(pilot)
        assert len(asked.heard) == 2, "nothing changed since"


async def test_only_a_key_and_a_failure_are_answered_over_the_screen(app_of, new_run, settled, asked) -> None:
    app = app_of(new_run().usual(), asker=asked)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("6")
        await settled(pilot)
        assert len(asked.heard) == 1
        assert [each.message for each in app._notifications] == []
        await pilot.press("b")
        await settled(pilot)
        assert [each.message for each in app._notifications] == ["blocks: at the next phase boundary"]
        app.clear_notifications()
        asked.reply = wire.Reply(False, "CUDA has not begun")
        await pilot.press("1", "6")
        await settled(pilot)
        assert [each.message for each in app._notifications] == ["blocks: CUDA has not begun"]


async def test_a_click_selects_a_segment_and_the_wheel_the_next(app_of, new_run, settled) -> None:
    run = new_run().usual()
    run.say(wire.Segments(0, 1, 12_433, "backward", run.t_ns, "asked", 0, 1, OWNED, 5, HOLDERS, True))
    app = app_of(run)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("6")
        await settled(pilot)
        panel = app.screen.query_one(BlockMap)
        lines = [plain([line]) for line in panel._lines]
        y = next(at for at, line in enumerate(lines) if "large pool, stream 0" in line) + 1
        assert "segment 1 of 4  80.0 MiB" in text_of(app)
        pool = panel._found.pools[0]
        for at in (1, 3, 0, 2):
            place = next(
                (x, row)
                for row in range(y, len(lines))
                for x in range(3, 119)
                if spot(panel._slice, panel._at, *panel.size, UNICODE, x, row) == (0, at)
            )
            await pilot.click(BlockMap, offset=place)
            await settled(pilot)
            assert f"segment {at + 1} of 4  {pool.segments[at].bytes // MIB}.0 MiB at" in text_of(app)
        assert "1 block: 24.0 MiB unused" in text_of(app)
        assert panel.has_focus
        panel.post_message(wheel(events.MouseScrollUp, panel))
        await settled(pilot)
        assert "76.0 MiB variables (cache, ema), 4.00 MiB free" in text_of(app)
        panel.post_message(wheel(events.MouseScrollDown, panel))
        await settled(pilot)
        assert "1 block: 24.0 MiB unused" in text_of(app)
        await pilot.click(BlockMap, offset=(0, 0))
        assert "1 block: 24.0 MiB unused" in text_of(app), "nothing is there"


def wheel(kind: Any, panel: Any) -> Any:
    return kind(panel, 50, 15, 0, 0, 0, shift=False, meta=False, ctrl=False)


async def test_a_replay_is_not_asked(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual())
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("6")
        await settled(pilot)
        assert "none can be requested: this viewer sends no requests" in " ".join(text_of(app).split())
        assert [each.message for each in app._notifications] == []


async def test_the_map_is_asked_for_by_key_and_gone_through_once(app_of, new_run, reader_of, settled, asked) -> None:
    run = new_run().usual()
    reader = reader_of(run)
    app = app_of(reader=reader, asker=asked)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("6")
        await settled(pilot)
        assert "Not read yet; asked for as this screen was opened" in text_of(app)
        assert asked.heard == [(run.source, "blocks", 0)]
        await pilot.press("b")
        await settled(pilot)
        assert asked.heard == [(run.source, "blocks", 0)] * 2
        reader.add(run.segments(12_432))
        await settled(pilot)
        shown = text_of(app)
        assert "step 12,432, as forward began; training waited 25 ms" in shown
        panel = app.screen.query_one(BlockMap)
        found, drawn = panel._found, []
        original = panel.draw
        panel.draw = lambda *a: (drawn.append(1), original(*a))[1]
        free = app.view.device.ledger.free
        run.extra = 30 << 30  # the device has less free now; the map is of the moment when it was read
        reader.add(run.steps(12_433, 3).host())
        await settled(pilot)
        assert app.view.device.ledger.free != free
        for _ in range(4):
            app.redraw()
            await pilot.pause(0.05)
        assert drawn == []
        assert panel._found is found
        await pilot.press("f")
        assert "1 block: 1.00 GiB unused" in text_of(app)
        await pilot.press("down", "down", "right", "left", "left", "up", "e")
        await settled(pilot)
        assert "fragmentation 18 % = inactive split" in text_of(app)


async def test_on_the_cpu_it_says_that_there_is_none(app_of, new_run, settled, asked) -> None:
    run = new_run().hello(backend="cpu", devices=(wire.Device(0, None, "CPU", None, "cpu"),)).steps(0, 3).synced()
    app = app_of(run, asker=asked)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("6", "f", "right", "up", "e")
        await settled(pilot)
        await pilot.press("escape")
        await settled(pilot)
        assert "the CPU has no caching allocator" in text_of(app)
        assert asked.heard == []
