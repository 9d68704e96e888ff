"""A publisher on a thread of the process whose events it sends: tests and benchmarks need no helper for each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Thread
from typing import Any

from gpumon_agent import wire
from gpumon_agent.transport.publisher import Publisher, Source


class Threaded(Publisher):
    def __init__(self, source: Source, *args: Any, **options: Any) -> None:
        self._source = source
        self._last: list[wire.Goodbye | None] = []
        self._thread = Thread(target=self.serve, daemon=True)
        super().__init__(self, *args, **options)

    def drain(self) -> Sequence[tuple[int, wire.NumberedEvent | bytes]]:
        for goodbye in self._last:
            self.leave(goodbye)
        return self._source.drain()

    def start(self) -> None:
        """Returns when viewers can attach."""
        self._thread.start()
        end = time.monotonic() + 60
        while not self.ready:
            assert time.monotonic() < end
            time.sleep(0.005)

    def close(self, goodbye: wire.Goodbye | None = None) -> None:
        """Sends what is left and `goodbye`, removes socket and descriptor."""
        self._last.append(goodbye)
        self._thread.join(60)
