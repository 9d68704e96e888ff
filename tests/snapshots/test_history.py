"""The blocks in use after any event are those of a replay from the first one."""

from __future__ import annotations

import random
from pathlib import Path

from snapshot_files import BASE, MIB, block, content, event, freed, segment, write

from gpumon.snapshots.history import PARTS, History
from gpumon.snapshots.reading import read
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED


def test_every_event_has_its_sums_and_its_blocks(tmp_path: Path) -> None:
    chance = random.Random(5)
    addresses = iter(range(BASE + MIB, BASE + (1 << 40), MIB))
    alive: list[tuple[int, int]] = [(next(addresses), 300)]  # there before the first event
    events = []
    for _ in range(3 * PARTS):
        if alive and chance.random() < 0.45:
            events += freed(*alive.pop(chance.randrange(len(alive))))
        else:
            alive.append((next(addresses), chance.randrange(1, MIB)))
            events.append(event("alloc", *alive[-1]))
    while alive:
        events += freed(*alive.pop())
    (device,) = read(write(tmp_path / "a.pickle", content([segment(block(MIB, state="inactive"))], events))).devices
    trace = device.trace
    assert trace is not None
    history = History(device, trace)
    assert history.last == len(events) - 1
    now: dict[int, tuple[int, int | None]] = {number: (size, None) for number, size in trace.start}
    sums = []
    for at in range(-1, len(events)):
        if at >= 0 and trace.codes[at] == ALLOC:
            now[trace.ids[at]] = trace.bytes[at], at
        elif at >= 0 and trace.codes[at] == FREE_COMPLETED:
            del now[trace.ids[at]]
        assert history.uses(at) == [(number, *each) for number, each in now.items()]
        assert history.requested(at) == sum(size for size, _ in now.values())
        sums.append(history.requested(at))
    assert history.peak == sums.index(max(sums)) - 1
