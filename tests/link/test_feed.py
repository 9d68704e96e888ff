"""Packets in whatever order sockets deliver them, and messages in the order in which they were said."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpumon.link.feed import Feed
from gpumon.session.incoming import singly
from gpumon_agent import wire
from gpumon_agent.wire import Packet, Received

SECOND = 1_000_000_000
HELLO = wire.Hello((wire.PROTOCOL_MAJOR, 0), "0", "ab", "x.py", "h", 1, 2, "b", (), "3", wire.Clock(0, 0))


def packet(*numbers: int, replayed: bool = False) -> Packet:
    assert list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))
    return Packet(numbers[0], replayed, tuple(wire.Step(number, 0, 0) for number in numbers))


def picture(newest: int) -> list[Packet]:
    return [Packet(-1, True, (HELLO,)), Packet(-1, True, (wire.Synced(newest),))]


class Listener:
    """A feed and what came out of it."""

    def __init__(self) -> None:
        self.feed = Feed("?")
        self.feed.requested()
        self.heard: list[Received] = []

    def live(self, *packets: Packet, at: int = 0) -> None:
        for one in packets:
            self.heard += singly(self.feed.take(one, at, answer=False))

    def answer(self, *packets: Packet, at: int = 0) -> None:
        for one in packets:
            self.heard += singly(self.feed.take(one, at, answer=True))

    @property
    def numbers(self) -> list[int]:
        return [received.seq for received in self.heard if received.seq >= 0]

    @property
    def told(self) -> list[str]:
        return [received.event.text for received in self.heard if isinstance(received.event, wire.Notice)]


@pytest.fixture
def synced() -> Listener:
    listener = Listener()
    hello, end = picture(2)
    listener.answer(hello, packet(0, 1, 2, replayed=True), end)
    return listener


def test_live_messages_wait_for_the_past_that_is_still_coming() -> None:
    listener = Listener()
    hello, end = picture(4)
    listener.live(packet(3, 4), packet(5))
    listener.answer(hello, packet(0, 1, 2, 3, 4, replayed=True))
    listener.live(packet(6))
    assert listener.numbers == [0, 1, 2, 3, 4]
    listener.answer(end)
    assert listener.numbers == [0, 1, 2, 3, 4, 5, 6]
    assert listener.told == []
    assert {received.source for received in listener.heard} == {"ab"}


def test_of_a_stream_that_waits_for_the_past_4096_frames_are_kept() -> None:
    listener = Listener()
    listener.live(*(packet(number) for number in range(4097)))
    listener.answer(*picture(-1))
    assert listener.numbers == list(range(4096))


def test_a_message_that_comes_twice_is_heard_once(synced: Listener) -> None:
    synced.live(packet(1, 2, 3), packet(3, 4), packet(4))
    assert synced.numbers == [0, 1, 2, 3, 4]


def test_a_past_that_begins_late_is_no_loss() -> None:
    listener = Listener()
    hello, end = picture(902)
    listener.answer(hello, packet(900, 901, 902, replayed=True), end)
    assert (listener.numbers, listener.feed.missed) == ([900, 901, 902], 0)


def test_a_gap_is_filled_from_the_agents_past(synced: Listener) -> None:
    synced.live(packet(6, 7), at=10 * SECOND)
    assert synced.feed.wants_snapshot
    synced.feed.requested()
    synced.live(packet(8), at=10 * SECOND)
    assert synced.numbers == [0, 1, 2]
    synced.answer(*picture(7)[:1], packet(1, 2, 3, 4, 5, 6, 7, replayed=True), *picture(7)[1:], at=10 * SECOND)
    assert synced.numbers == list(range(9))
    assert (synced.feed.missed, synced.told) == (0, [])


def test_what_the_past_no_longer_holds_is_told_once(synced: Listener) -> None:
    synced.live(packet(50), at=10 * SECOND)
    synced.feed.requested()
    synced.answer(*picture(51)[:1], packet(40, 41, replayed=True), *picture(41)[1:], at=10 * SECOND)
    assert synced.numbers == [0, 1, 2, 40, 41, 50]
    assert synced.told == [f"{37 + 8} messages did not reach this viewer"]
    synced.live(packet(51), at=30 * SECOND)
    assert len(synced.told) == 1


def test_an_agent_that_keeps_losing_is_not_asked_again_and_again(synced: Listener) -> None:
    synced.live(packet(10), at=10 * SECOND)
    synced.feed.requested()
    synced.answer(*picture(10), at=10 * SECOND)
    synced.live(packet(20), packet(30), at=12 * SECOND)
    assert not synced.feed.wants_snapshot
    assert synced.numbers == [0, 1, 2, 10, 20, 30]
    synced.live(packet(31), at=16 * SECOND)
    assert synced.told == [f"{n} messages did not reach this viewer" for n in (7, 18)]


def test_a_snapshot_whose_end_was_lost_does_not_hold_up_the_rest(synced: Listener) -> None:
    synced.live(packet(9), at=10 * SECOND)
    synced.feed.requested()
    synced.heard += singly(synced.feed.go_on(11 * SECOND))
    assert synced.numbers == [0, 1, 2, 9]


def test_another_major_protocol_is_refused() -> None:
    listener = Listener()
    strange = wire.Hello((9, 0), "0", "ab", "x.py", "h", 1, 2, "b", (), "3", wire.Clock(0, 0))
    with pytest.raises(wire.ProtocolMismatch):
        listener.answer(Packet(-1, True, (strange,)))


def test_an_agent_on_another_machine_is_named_as_its_machine_is_and_its_clock_is_related_to_this_one_s() -> None:
    """Readings go to the ranks of a name, and times of two machines are compared by wall clock."""
    hello = replace(HELLO, clock=wire.Clock(7 * SECOND, 100 * SECOND))
    feed = Feed("?", "node7", 20 * SECOND)
    feed.requested()
    (heard,) = singly(feed.take(Packet(-1, True, (hello,)), 0, answer=True))
    assert isinstance(heard.event, wire.Hello)
    assert heard.event.host == "node7"
    assert heard.event.clock == wire.Clock(7 * SECOND, 120 * SECOND)
