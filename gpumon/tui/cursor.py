"""A past step of a live run, chosen with the keys of a replay. What is shown is the run as it was known then."""

from __future__ import annotations

from bisect import bisect_left

from msgspec.structs import replace

from gpumon.analysis import RankReport, Reporter
from gpumon.analysis.answer import NOBODY, Answer, answer
from gpumon.analysis.job_findings import LEAKS
from gpumon.session.frame import Frame, RankFrame
from gpumon.session.moments import LEAK, moments
from gpumon.session.past import at_step
from gpumon.tui.position import Moment, Position
from gpumon.tui.view import View, choose

LEAKS_MAX = 64
"""Leaks whose step is remembered."""


class Cursor:
    """`step` is None while the newest step is shown. The chosen one stays while new ones arrive.

    `steps_at_once`: the most that are analysed in one call of `shown`, but at least one rank is. The others have no
    report yet.
    """

    def __init__(self, steps_at_once: int) -> None:
        self.step: int | None = None
        self._steps_at_once = steps_at_once
        self._live = View(Frame(0, ()))
        self._moments: tuple[Moment, ...] = ()
        self._leaks: dict[tuple[object, ...], tuple[str, int]] = {}  # (source, step) of each leak that was found
        self._known: tuple[str, int] | None = None  # source and step of what follows
        self._frame = Frame(0, ())
        self._reporter = Reporter()
        self._waiting: list[RankFrame] = []  # for their analysis
        self._reports: tuple[RankReport, ...] = ()
        self._answer: Answer = NOBODY

    # -------------------------------------------------------------------------------------------------- wishes

    def go(self, step: int) -> None:
        """To this step, the next one that was read, or the newest."""
        rank = self._live.rank
        if rank is None or not rank.steps:
            return
        self._find_moments(rank)
        at = bisect_left(rank.steps, step, key=lambda record: record.step)
        if at < len(rank.steps):
            self.step = rank.steps[at].step
        else:  # memory may have run out in a step that never closed
            self.step = step if any(each.step == step for each in self._moments) else None

    def go_by(self, steps: int) -> None:
        """By so many steps that were read; from the newest one on it is live again."""
        rank = self._live.rank
        if rank is None or not rank.steps:
            return
        newest = len(rank.steps) - 1
        at = newest if self.step is None else bisect_left(rank.steps, self.step, key=lambda record: record.step)
        to = max(0, min(at, newest) + steps)
        if to > newest:
            self.finish()
        else:
            self.go(rank.steps[to].step)

    def go_to_moment(self, by: int) -> Moment | None:
        """The next (1) or the previous (−1) one; None: there is none."""
        rank = self._live.rank
        if rank is None or not rank.steps:
            return None
        self._find_moments(rank)
        first = rank.steps[0].step
        here = self.step if self.step is not None else 1 << 62
        found = [
            each
            for each in self._moments
            if each.step >= first and (each.step > here if by > 0 else each.step < here)
        ]  # fmt: skip
        if not found:
            return None
        chosen = found[0] if by > 0 else found[-1]
        self.go(chosen.step)
        return chosen

    def finish(self) -> None:
        """Back to the newest step."""
        self.step = None
        self._known, self._frame, self._reports, self._waiting = None, Frame(0, ()), (), []

    # -------------------------------------------------------------------------------------------------- what is shown

    def shown(self, live: View) -> View:
        """The view of the chosen step, or the live one."""
        was, self._live = self._live.rank, live
        rank = live.rank
        if self.step is None or rank is None:
            return live
        if was is not None and was.source != rank.source:
            if any(each.source == was.source for each in live.frame.ranks):
                self.go(self.step)  # another rank may have read other steps
            else:
                self.finish()  # the job began anew
        if self.step is None:
            return live
        if self._known != (rank.source, self.step):
            self._look_back(live, rank, self.step)
        if self._waiting:
            self._analyse()
        said = tuple([each for each in live.said if each.unix_ns <= self._frame.unix_ns])
        view = choose(
            self._frame, self._reports, rank.source, live.index, span=live.span, paused=live.paused, said=said,
            answered=self._answer, cannot_ask=live.cannot_ask,
        )  # fmt: skip
        newest = rank.steps[-1].step if rank.steps else self.step
        position = Position(
            self._frame.unix_ns, self.step, last_ns=live.frame.unix_ns, last_step=newest, held=True,
            moments=self._moments,
        )  # fmt: skip
        return replace(view, position=position, now=live)

    def _look_back(self, live: View, rank: RankFrame, step: int) -> None:
        ranks = tuple([at_step(each, step) for each in live.frame.ranks])
        past = next(each for each in ranks if each.source == rank.source)
        self._frame = Frame(past.heard_unix_ns, ranks)
        self._reporter, self._waiting = Reporter(), [past, *(each for each in ranks if each is not past)]
        self._known = rank.source, step
        self._find_moments(rank)

    def _analyse(self) -> None:
        """Of some of the ranks that wait, from the first kept step on."""
        steps = 0
        while self._waiting and (not steps or steps + len(self._waiting[0].steps) <= self._steps_at_once):
            steps += len(self._waiting.pop(0).steps)
        waiting = {each.source for each in self._waiting}
        known = replace(self._frame, ranks=tuple([e for e in self._frame.ranks if e.source not in waiting]))
        self._reports = self._reporter.report(known)
        self._answer = answer(known, self._reports)

    # -------------------------------------------------------------------------------------------------- events

    def note(self, frame: Frame, reports: tuple[RankReport, ...]) -> None:
        """Remembers when a leak was found: with the census that named it, or now."""
        for report in reports:
            for finding in report.findings:
                if finding.code not in LEAKS or (key := (report.source, *finding.key)) in self._leaks:
                    continue
                rank = next((each for each in frame.ranks if each.source == report.source), None)
                if rank is None or not rank.steps or len(self._leaks) >= LEAKS_MAX:
                    continue
                taken = [each.step for each in rank.censuses if each.reason == "growth"]
                self._leaks[key] = report.source, taken[-1] if taken else rank.steps[-1].step

    def _find_moments(self, rank: RankFrame) -> None:
        found = [Moment(each.kind, each.step, each.unix_ns) for each in moments(rank)]
        found += [Moment(LEAK, step, 0) for source, step in set(self._leaks.values()) if source == rank.source]
        self._moments = tuple(sorted(found, key=lambda each: each.step))
