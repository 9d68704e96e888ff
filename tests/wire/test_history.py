"""The recent past: whole, in order, and bounded."""

from __future__ import annotations

from gpumon_agent import wire
from gpumon_agent.transport.history import History


def fill(history: History, steps: int, phases: int = 5) -> None:
    for step in range(steps):
        for index in range(phases):
            event = wire.Phase(step, "forward", index, 0, step, 1, 1 << 35, 1 << 35, 1 << 36, 1 << 36)
            history.extend([(history.newest + 1, wire.encode_event(event))])
        history.extend([(history.newest + 1, wire.encode_event(wire.Step(step, step, 1)))])


def numbers(history: History) -> list[int]:
    packets = [wire.decode_frame(wire.LIVE + packet) for packet in history.packets()]
    assert all(packet.replayed for packet in packets)
    return [packet.seq + i for packet in packets for i in range(len(packet.events))]


def test_a_short_past_is_whole() -> None:
    history = History()
    fill(history, 100)
    assert numbers(history) == list(range(600))


def test_a_long_past_is_the_newest_two_thousand_steps_and_less_than_a_page_more() -> None:
    history = History()
    fill(history, 5000)
    seen = numbers(history)
    assert seen == list(range(seen[0], 30_000))
    assert 2000 * 6 <= len(seen) <= 2000 * 6 + 1000
    assert abs(history.steps - len(seen) / 6) < 1


def test_four_mebibytes_are_never_exceeded() -> None:
    history = History()
    fill(history, 2000, phases=100)
    assert 3.8 * 2**20 < history.nbytes <= 4 * 2**20
    assert sum(map(len, history.packets())) <= 4 * 2**20
    assert numbers(history)[-1] == 2000 * 101 - 1
    assert max(map(len, history.packets())) + 9 <= wire.FRAME_BYTES_MAX
