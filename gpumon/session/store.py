"""Pure state of a session: events go in, frozen Frames come out. No clock, no socket, no drawing.

`apply` is O(1) (a late event of a closed step costs a bisection) and never raises, whatever the order or loss of
events. Memory is bounded: `StoreLimits` caps every ring, and lost numbers are stored as a few intervals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpumon.session.frame import Frame, HostSample, RankFrame
from gpumon.session.limits import StoreLimits
from gpumon.session.rank import Rank
from gpumon_agent import wire

__all__ = ["SessionStore", "StoreLimits"]


_NO_LINK = wire.Link("")  # an agent on this machine


class SessionStore:
    """All ranks and machines of one session.

    `replaying`: events come from a recording; silence is then measured against the newest recorded time.
    """

    def __init__(self, limits: StoreLimits | None = None, *, replaying: bool = False) -> None:
        self._limits = limits or StoreLimits()
        self._replaying = replaying
        self._ranks: dict[str, Rank] = {}
        self._hosts: dict[str, deque[HostSample]] = {}
        self._links: dict[str, wire.Link] = {}
        self._host_views: dict[str, tuple[HostSample, ...]] = {}
        self._newest_unix_ns = 0
        self._arrivals = 0

    def apply(self, received: wire.Received) -> None:
        if received.unix_ns > self._newest_unix_ns:
            self._newest_unix_ns = received.unix_ns
        rank = self._ranks.get(received.source)
        if rank is None:
            if isinstance(received.event, wire.Host):
                self._host(received.event, received.unix_ns)
                return
            if isinstance(received.event, wire.Link):
                self._links[received.event.host] = received.event
                return
            self._arrivals += 1
            rank = self._ranks[received.source] = Rank(received.source, self._limits, self._arrivals)
            self._forget_ended()
            for each in self._ranks.values():
                each.keep(self._limits.steps_of(len(self._ranks)), self._limits.older_of(len(self._ranks)))
        rank.apply(received)

    def apply_run(
        self, source: str, unix_ns: int, events: Sequence[wire.Event], seq: int, replayed: bool = False
    ) -> None:
        """Applies consecutive numbered events of one rank; `seq`: number of the first."""
        rank = self._ranks.get(source)
        if rank is not None and rank.apply_run(unix_ns, events, seq, replayed):
            self._newest_unix_ns = max(self._newest_unix_ns, unix_ns)
            return
        for number, event in enumerate(events, seq):
            self.apply(wire.Received(source, unix_ns, event, number, replayed))

    def frame(self, now_unix_ns: int) -> Frame:
        """The state at `now_unix_ns` (the receiver's clock); in a replay, at its newest recorded time."""
        now = self._newest_unix_ns if self._replaying else now_unix_ns
        for name, samples in self._hosts.items():
            if name not in self._host_views:
                self._host_views[name] = tuple(samples)
        self._drop_replaced(now)
        order = sorted((r for r in self._ranks.values() if r.hello is not None), key=lambda r: self._order(r, now))
        ranks = [
            rank.frame(
                rank.hello,
                now,
                self._host_views.get(rank.hello.host, ()),
                self._links.get(rank.hello.host, _NO_LINK).lost,
            )
            for rank in order
            if rank.hello is not None
        ]
        hosts = tuple(samples[-1].host for _, samples in sorted(self._host_views.items()))
        return Frame(unix_ns=now, ranks=tuple(ranks), hosts=hosts, replaying=self._replaying)

    def rank(self, source: str, now_unix_ns: int) -> RankFrame | None:
        """One rank, for consumers that act on each event; None before its Hello."""
        rank = self._ranks.get(source)
        if rank is None or rank.hello is None:
            return None
        name = rank.hello.host
        if name in self._hosts and name not in self._host_views:
            self._host_views[name] = tuple(self._hosts[name])
        return rank.frame(rank.hello, now_unix_ns, self._host_views.get(name, ()), self._links.get(name, _NO_LINK).lost)

    def sources(self) -> tuple[str, ...]:
        """All known ranks, in order of arrival."""
        return tuple(self._ranks)

    def _host(self, event: wire.Host, unix_ns: int) -> None:
        samples = self._hosts.get(event.host)
        if samples is None:
            samples = self._hosts[event.host] = deque(maxlen=self._limits.host_samples)
        samples.append(HostSample(unix_ns, event))
        self._host_views.pop(event.host, None)

    # ------------------------------------------------------------------------------------------------ restarts

    def _successor(self, rank: Rank, now_unix_ns: int) -> Rank | None:
        """The process with the same name and rank that began after this one's last step; None while this one is live.

        One that began earlier runs beside it: processes of a job need not have ranks.
        """
        hello = rank.hello
        if hello is None or rank.status(now_unix_ns) == "live":
            return None
        newest: Rank | None = None
        until = max(hello.clock.unix_ns, rank.stepped_unix_ns)
        for other in self._ranks.values():
            theirs = other.hello
            if theirs is None or other is rank:
                continue
            same = (theirs.name, theirs.host, theirs.rank) == (hello.name, hello.host, hello.rank)
            if same and theirs.clock.unix_ns > until and (newest is None or other.arrival > newest.arrival):
                newest = other
        return newest

    def _drop_replaced(self, now_unix_ns: int) -> None:
        """Drops ended or silent ranks once the process that replaced them has closed a step."""
        if len(self._ranks) < 2:
            return
        for source, rank in list(self._ranks.items()):
            successor = self._successor(rank, now_unix_ns)
            if successor is not None and successor.steps:
                del self._ranks[source]

    def _order(self, rank: Rank, now_unix_ns: int) -> tuple[int, int, int, int]:
        hello = rank.hello
        if hello is None:
            return (0, 0, 0, 0)
        replaced = len(self._ranks) > 1 and self._successor(rank, now_unix_ns) is not None
        return (0 if replaced else 1, -1 if hello.rank is None else hello.rank, hello.pid, rank.arrival)

    def _forget_ended(self) -> None:
        ended = [source for source, rank in self._ranks.items() if rank.goodbye is not None]
        for source in ended[: max(0, len(ended) - self._limits.ended)]:
            del self._ranks[source]
