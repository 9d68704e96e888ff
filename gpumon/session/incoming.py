"""What is handed from the link to the store: single messages, and runs of those that came together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gpumon_agent import wire
from gpumon_agent.wire import Received


class MessageRun(NamedTuple):
    """Numbered events of one agent that came together, none of them missing: as many Received, made at once."""

    source: str
    unix_ns: int
    events: tuple[wire.Event, ...]
    seq: int  # of the first
    replayed: bool


Incoming = Received | MessageRun


def singly(heard: Iterable[Incoming]) -> Iterator[Received]:
    """Each event for itself."""
    for each in heard:
        if isinstance(each, MessageRun):
            for number, event in enumerate(each.events, each.seq):
                yield Received(each.source, each.unix_ns, event, number, each.replayed)
        else:
            yield each
