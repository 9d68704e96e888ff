"""Who came, went, fell silent and spoke again, told once each: lines of the log."""

from __future__ import annotations

from collections.abc import Iterator

from gpumon.session.frame import Frame, RankFrame


class Changes:
    """Follows the ranks' statuses from frame to frame."""

    def __init__(self) -> None:
        self._statuses: dict[str, str] = {}

    def look(self, frame: Frame) -> Iterator[str]:
        """What is new since the frame before."""
        for rank in frame.ranks:
            before, now = self._statuses.get(rank.source), rank.status
            if before == now:
                continue
            self._statuses[rank.source] = now
            if before is None:
                yield f"listening to {rank.hello.name}, {_who(rank)}"
            elif now == "silent":
                yield f"{_who(rank)} is silent"
            elif before == "silent" and now == "live":
                yield f"{_who(rank)} is heard again"
        if len(self._statuses) > 2 * len(frame.ranks) + 64:
            present = {rank.source for rank in frame.ranks}
            self._statuses = {source: s for source, s in self._statuses.items() if source in present}


def _who(rank: RankFrame) -> str:
    number = f"rank {rank.hello.rank}, " if rank.hello.rank is not None else ""
    return f"{number}pid {rank.hello.pid}"
