"""Log lines for status changes of a rank: connected, ended, silent, heard again."""

from __future__ import annotations

from collections.abc import Iterator

from gpumon.analysis.units import size
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent import wire


class StatusLog:
    """Tracks the ranks' statuses from frame to frame."""

    def __init__(self) -> None:
        self._statuses: dict[str, str] = {}
        self._lost: dict[str, str] = {}
        self._answered: dict[str, tuple[int, int]] = {}

    def look(self, frame: Frame) -> Iterator[str]:
        """Changes since the previous frame."""
        lost = {
            rank.hello.host: f"{rank.lost_link_said}: {rank.lost_link}" for rank in frame.ranks if rank.lost_link_said
        }
        yield from (said for host, said in lost.items() if host not in self._lost)
        yield from (f"link to {host} restored" for host in self._lost if host not in lost)
        self._lost = lost
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
                yield f"{_who(rank)} sends messages again"
        if len(self._statuses) > 2 * len(frame.ranks) + 64:
            present = {rank.source for rank in frame.ranks}
            self._statuses = {source: s for source, s in self._statuses.items() if source in present}

    def answers(self, frame: Frame) -> Iterator[str]:
        """Results of requests that no screen shows: a snapshot's path, or why a request was refused."""
        for rank in frame.ranks:
            refused = next((n for n in reversed(rank.notices) if n.text.startswith(wire.NOT_DONE)), None)
            now = (rank.snapshot.t_ns if rank.snapshot else 0, refused.t_ns if refused else 0)
            before = self._answered.get(rank.source)
            if rank.synced:  # earlier events are the replayed past
                self._answered[rank.source] = now
            if before is None or before == now:
                continue
            if rank.snapshot is not None and now[0] > before[0]:
                yield written(rank)
            if refused is not None and now[1] > before[1]:
                yield f"{_who(rank)}: {refused.text}"


def written(rank: RankFrame) -> str:
    """The newest snapshot's path."""
    snapshot = rank.snapshot
    assert snapshot is not None
    if snapshot.path is None:
        return f"{_who(rank)}: {snapshot.why or 'no snapshot was written'}"
    said = f"{snapshot.path} ({size(snapshot.bytes)}, on {rank.hello.host}): open it at pytorch.org/memory_viz"
    return f"{said}; {snapshot.why}" if snapshot.why else said


def _who(rank: RankFrame) -> str:
    number = f"rank {rank.hello.rank}, " if rank.hello.rank is not None else ""
    return f"{number}pid {rank.hello.pid}"
