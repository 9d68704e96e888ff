"""Input of the store, from the link: single messages, and runs of consecutive ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpumon_agent import wire
from gpumon_agent.wire import Received


class MessageRun(NamedTuple):
    """Consecutive events of one agent without gaps, received together: a compact list of Received."""

    source: str
    unix_ns: int
    events: tuple[wire.Event, ...]
    seq: int  # of the first
    replayed: bool


Incoming = Received | MessageRun


def singly(heard: Iterable[Incoming]) -> Iterator[Received]:
    """The events one by one."""
    for each in heard:
        if isinstance(each, MessageRun):
            for number, event in enumerate(each.events, each.seq):
                yield Received(each.source, each.unix_ns, event, number, each.replayed)
        else:
            yield each
