"""`gpumon snapshot FILE --screen`: the cursor moves through the events, and both tables follow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from pictured import text_of
from snapshot_files import BASE, MIB, block, content, event, frame, freed, segment

from gpumon.snapshots.parsing import parse
from gpumon.snapshots.summary import summarize
from gpumon.tui.snapshot_app import SnapshotApp
from gpumon.tui.themed_app import Options

MODEL, TRAIN = [frame("/my/model.py", 7)], [frame("/my/train.py", 9, "main")]


DARK = Options()


def app(devices: int = 1, look: Options = DARK) -> SnapshotApp:
    """20 MiB are there, 30 come in two blocks, one of which goes, and 8 come: the peak is 50 MiB, at event 2."""
    a, b, c, start = (BASE + n * 100 * MIB for n in range(4))
    events = [
        event("segment_alloc", BASE, 60 * MIB),
        event("alloc", a, 10 * MIB, frames=MODEL),
        event("alloc", b, 20 * MIB, frames=MODEL),
        *freed(b, 20 * MIB),
        *freed(start, 20 * MIB),
        event("alloc", c, 8 * MIB, frames=TRAIN),
    ]
    end = segment(block(10 * MIB, address=a), block(8 * MIB), block(42 * MIB, state="inactive"), total=60 * MIB)
    end["blocks"][1]["address"] = c
    other = segment(block(3 * MIB), device=1)
    traces = [events, [event("alloc", BASE, 3 * MIB, frames=TRAIN)]][:devices]
    snapshot = parse(content([end, other][:devices], *traces), 100_000)
    return SnapshotApp(Path("my.pickle"), snapshot, summarize(snapshot), look)


def seen(tried: SnapshotApp, *keys: str, size: tuple[int, int] = (100, 30)) -> list[str]:
    """The screen's lines after the keys."""

    async def run() -> list[str]:
        async with tried.run_test(size=size) as pilot:
            await pilot.pause()
            await pilot.press(*keys)
            await pilot.pause()
            return text_of(tried).splitlines()

    return asyncio.run(run())


def table(lines: Sequence[str]) -> list[list[str]]:
    """The words of the rows below the headings."""
    at = next(n for n, line in enumerate(lines) if "source line" in line or "allocated at" in line)
    return [line.split() for line in lines[at + 1 : -1] if line.strip()]


def test_it_opens_at_the_peak() -> None:
    lines = seen(app())
    assert lines[1].strip() == "Event 2 of 8, the peak: 50.0 MiB requested of 60.0 MiB reserved (17 % free or rounding)"
    assert [" ".join(row) for row in table(lines)] == [
        "/my/model.py:7 forward 30.0 MiB 2 30.0 MiB 0 B",
        "allocated before the first event 20.0 MiB 1 20.0 MiB 0 B",
    ]


@pytest.mark.parametrize(
    ("keys", "event", "requested"),
    [
        (["home"], "0 of 8", "20.0 MiB"),
        (["end"], "7 of 8, the end", "18.0 MiB"),
        (["comma"], "1 of 8", "30.0 MiB"),
        (["full_stop", "full_stop"], "4 of 8", "30.0 MiB"),
        (["end", "full_stop"], "7 of 8, the end", "18.0 MiB"),
        (["home", "p"], "2 of 8, the peak", "50.0 MiB"),
    ],
)
def test_keys_move_the_cursor(keys: list[str], event: str, requested: str) -> None:
    assert seen(app(), *keys)[1].strip().startswith(f"Event {event}: {requested} requested")


def test_arrows_go_from_column_to_column() -> None:
    there = app()
    seen(there, "home", "right")
    assert there.cursor.event > 0
    back = app()
    seen(back, "home", "right", "left")
    assert back.cursor.event == 0


def test_the_tables_follow() -> None:
    end = table(seen(app(), "end"))
    assert [" ".join(row) for row in end] == [
        "/my/model.py:7 forward 10.0 MiB 1 30.0 MiB −20.0 MiB",
        "/my/train.py:9 main 8.00 MiB 1 0 B +8.00 MiB",
        "allocated before the first event 0 B 0 20.0 MiB −20.0 MiB",
    ]
    blocks = table(seen(app(), "end", "2"))
    assert [" ".join(row) for row in blocks] == [
        "/my/model.py:7 forward 10.0 MiB 1 10.0 MiB 1",
        "/my/train.py:9 main 8.00 MiB 1 8.00 MiB 7",
    ]


def test_devices_take_turns() -> None:
    lines = seen(app(2))
    assert "device 0" in lines[0]
    lines = seen(app(2), "d")
    assert "device 1" in lines[0]
    assert "Event 0 of 1, the peak: 3.00 MiB requested" in lines[1]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 10)])
@pytest.mark.parametrize("look", [DARK, Options(ascii=True), Options("gpumon-light")])
def test_it_fits(size: tuple[int, int], look: Options) -> None:
    lines = seen(app(look=look), "e", "escape", "question_mark", "escape", "t", size=size)
    assert lines[1].strip().startswith("Event 2 of 8, the peak")
    assert any("model.py:7" in line for line in lines)
    assert lines[-1].strip().startswith("q Quit ? Help")
