"""The state of a job's ranks: live, late, dead or missing, which died first, and how far peaks differ.

Model. A job has as many ranks as its processes report (`world_size`); the ranks of this machine are those that a
launcher's local ranks place here, or all of them without local ranks. A live rank is late if it is behind the foremost
by more than `LATE_STEPS` steps and, at the job's pace, by more than `LATE_S`; so is one without a closed step when the
others have several. The first to die is the one whose end, or last message without one, came `APART_NS` before the next
one's: after it the launcher ends the others (SIGTERM), or they fail without their peer. The order of closer deaths is
unknown.
Cost. A pass over the ranks.
Known limitations. Ranks on other machines are counted, not observed. A rank that died before its first message is
missing, like one that has not started yet. The end of a killed process is seen by its helper, once that gets a core; if
the helper was killed too, only the last sign of life is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gpumon.analysis.robust import median
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent import wire

LATE_STEPS = 2
LATE_S = 2.0
APART_NS = 250_000_000
"""Least distance of two deaths with a known order: a helper looks ten times a second, at the lowest priority."""

State = Literal["live", "late", "silent", "finished", "failed", "killed", "dead", "left", "missing"]
"""dead: gone without a goodbye; killed: by a signal; failed: by an exception; left: only the agent stopped."""

DIED: tuple[State, ...] = ("failed", "killed", "dead")

GONE: dict[str, State] = {
    "finished": "finished", "exception": "failed", "signal": "killed", "lost": "dead", "stopped": "left",
}  # fmt: skip


class RankStatus(msgspec.Struct, frozen=True, gc=False):
    rank: int | None
    state: State
    source: str | None = None  # None: never seen
    node: str | None = None  # the launcher's node and the host, else the host alone
    step: int | None = None  # the last it has completed
    behind: int = 0  # steps behind the foremost
    restarts: int = 0
    replaced: bool = False  # another process has taken its place


class JobStatus(msgspec.Struct, frozen=True):
    """All ranks in order: by node, then by rank."""

    ranks: tuple[RankStatus, ...]
    world_size: int | None  # None: no process reports it
    elsewhere: int = 0  # ranks on other machines
    first_to_die: str | None = None  # its source; None: none died, unknown order, or restarted

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(each.rank for each in self.ranks if each.state == "missing" and each.rank is not None)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.node or "" for each in self.ranks))


class Spread(msgspec.Struct, frozen=True):
    median: float
    worst: int
    at: int  # index of the worst among those given
    skew: float  # worst / median − 1


def job(frame: Frame, paces: Sequence[float | None] = ()) -> JobStatus:
    """`paces`: steps per second of each rank of the frame, if known."""
    steps = [_newest(rank) for rank in frame.ranks]
    live = [step for step, rank in zip(steps, frame.ranks, strict=True) if rank.status == "live" and step is not None]
    foremost = max(live, default=None)
    pace = max((p for p in paces if p), default=None)
    newest: dict[int | None, int] = {}  # rank → when its newest process began
    for rank in frame.ranks:
        newest[rank.hello.rank] = max(rank.hello.clock.unix_ns, newest.get(rank.hello.rank, 0))
    standings = [
        _status(rank, step, foremost, pace, newest[rank.hello.rank])
        for rank, step in zip(frame.ranks, steps, strict=True)
    ]
    sizes = [rank.hello.world_size for rank in frame.ranks if rank.hello.world_size]
    world = max(sizes, default=None)
    absent: list[RankStatus] = []
    elsewhere = 0
    if world is not None and world > 1:
        heard = {rank.hello.rank for rank in frame.ranks}
        here = _expected(frame.ranks, world)
        absent = [RankStatus(number, "missing", node=node) for number, node in here.items() if number not in heard]
        elsewhere = world - len({number for number in heard if number is not None and number < world} | here.keys())
    ordered = sorted((*standings, *absent), key=_order)
    died = {each.source for each in standings if each.state in DIED and not each.replaced}
    dead = sorted((rank for rank in frame.ranks if rank.source in died), key=_last_sign_ns)
    if not dead or len(ordered) < 2:
        return JobStatus(tuple(ordered), world, elsewhere)
    if len(dead) > 1 and _last_sign_ns(dead[1]) - _last_sign_ns(dead[0]) < APART_NS:
        return JobStatus(tuple(ordered), world, elsewhere)
    return JobStatus(tuple(ordered), world, elsewhere, dead[0].source)


def spread(values: Iterable[int | None]) -> Spread | None:
    """None with fewer than two known values."""
    known = [(value, at) for at, value in enumerate(values) if value is not None]
    if len(known) < 2:
        return None
    middle = median([value for value, _ in known])
    worst, at = max(known, key=lambda pair: (pair[0], -pair[1]))
    return Spread(middle, worst, at, worst / middle - 1 if middle else 0.0)


def _status(rank: RankFrame, step: int | None, foremost: int | None, pace: float | None, newest_ns: int) -> RankStatus:
    hello = rank.hello
    state: State = "live"
    behind = 0
    if rank.goodbye is not None:
        state = GONE.get(rank.goodbye.reason, "dead")
    elif rank.status == "silent" or rank.lost_link is not None:
        state = "silent"
    elif foremost is not None:
        behind = max(0, foremost - (step or 0))
        if behind > LATE_STEPS and (step is None or pace is None or behind / pace > LATE_S):
            state = "late"
    return RankStatus(
        hello.rank,
        state,
        rank.source,
        _node(hello.node, hello.host),
        step,
        behind,
        hello.restarts or 0,
        replaced=hello.rank is not None and hello.clock.unix_ns < newest_ns,
    )


def _node(node: str | None, host: str) -> str:
    return host if node is None else f"node {node} · {host}"


def _expected(ranks: Sequence[RankFrame], world: int) -> dict[int, str]:
    """Rank → node of every rank that must be on a machine from which some rank reports."""
    expected: dict[int, str] = {}
    placed = False
    for rank in ranks:
        hello = rank.hello
        if hello.rank is None or hello.local_rank is None or hello.local_world_size is None:
            continue
        placed = True
        first = hello.rank - hello.local_rank
        count = min(hello.local_world_size, wire.LOCAL_RANKS_MAX)
        for number in range(max(0, first), min(world, first + count)):
            expected.setdefault(number, _node(hello.node, hello.host))
    if placed:
        return expected
    hosts = {rank.hello.host for rank in ranks}
    return dict.fromkeys(range(min(world, wire.LOCAL_RANKS_MAX)), hosts.pop()) if len(hosts) == 1 else {}


def died_unix_ns(rank: RankFrame) -> int | None:
    """When it sent its last message, or was last seen alive; None while it lives."""
    return None if rank.goodbye is None or not rank.goodbye.t_ns else rank.unix_ns(rank.goodbye.t_ns)


def ending(rank: RankFrame, *, detail: bool = True) -> str | None:
    """Why and where it ended, as a sentence; None while it runs."""
    bye = rank.goodbye
    if bye is None:
        return None
    what = {
        "finished": "training finished",
        "exception": "ended by an exception",
        "signal": "ended by a signal",
        "lost": "the process is gone without a goodbye (killed?)",
        "stopped": "the agent was stopped; training goes on unwatched",
    }.get(bye.reason, bye.reason)
    where = [part for part in (bye.phase and f"in {bye.phase}", bye.step is not None and f"step {bye.step:,}") if part]
    if bye.reason == "finished":
        where = where[-1:]
    text = what + (
        f" {', '.join(where)}" if where and where[0].startswith("in ") else f" at {where[0]}" if where else ""
    )
    return f"{text} · {bye.detail}" if bye.detail and detail else text


def _last_sign_ns(rank: RankFrame) -> int:
    return died_unix_ns(rank) or rank.heard_unix_ns


def _newest(rank: RankFrame) -> int | None:
    """The last step it has completed: of those that are read, or before the running one of its last heartbeat."""
    read = rank.steps[-1].step if rank.steps else -1
    running = rank.heartbeat.step if rank.heartbeat is not None else 0
    newest = max(read, running - 1)
    return newest if newest >= 0 else None


def _order(standing: RankStatus) -> tuple[str, int, bool]:
    return (standing.node or "", -1 if standing.rank is None else standing.rank, not standing.replaced)
