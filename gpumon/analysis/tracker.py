"""From evidence to findings: one opens when its rule has held for a while, and is gone when it has not.

A rule's finding opens after `opens_after` looks in a row with evidence and is gone after `closes_after` without. A look
is a newest step not seen before, so time without training opens and closes nothing. What is gone stays listed, the
newest `GONE_KEPT`.
Known limitation: a finding says at which look it began; at several steps a look that is up to that much later.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from gpumon.analysis.findings import CATALOGUE, Evidence, Look
from gpumon.analysis.lines import Finding
from gpumon.analysis.rules import NEAR_CAPACITY, OOM_AHEAD, Rule

GONE_KEPT = 32


@dataclass(slots=True)
class _Case:
    held: int = 0  # looks in a row with evidence
    missed: int = 0  # looks in a row without, once open
    since: int | None = None
    finding: Finding | None = None


@dataclass(slots=True)
class Tracker:
    """The findings of one rank: feed it each look, read `findings`."""

    _cases: dict[tuple[str, int], _Case] = field(default_factory=dict)
    _gone: OrderedDict[tuple[str, int, int | None], Finding] = field(default_factory=OrderedDict)

    def look(self, look: Look) -> None:
        found = {rule.code: find(look) for rule, find in CATALOGUE}
        if found[OOM_AHEAD.code] is not None:  # says the same, and more
            found[NEAR_CAPACITY.code] = None
        for rule, _ in CATALOGUE:
            self._weigh(rule, look, found[rule.code])

    def _weigh(self, rule: Rule, look: Look, evidence: Evidence | None) -> None:
        key = (rule.code, look.device)
        case = self._cases.get(key)
        if evidence is None:
            if case is None:
                return
            if case.finding is None:
                del self._cases[key]
                return
            case.missed += 1
            if case.missed >= rule.closes_after:
                self._gone[key[0], key[1], case.since] = replace(case.finding, state="gone")
                if len(self._gone) > GONE_KEPT:
                    self._gone.popitem(last=False)
                del self._cases[key]
            return
        if case is None:
            case = self._cases[key] = _Case(since=look.record.step)
        case.held += 1
        case.missed = 0
        if case.finding is not None or case.held >= rule.opens_after:
            case.finding = Finding(
                code=rule.code,
                severity=rule.severity,
                step=case.since,
                title=evidence.title,
                bytes=evidence.bytes,
                bytes_per_step=evidence.bytes_per_step,
                holder=evidence.holder,
                where=evidence.where,
                remedy=evidence.remedy,
            )

    def findings(self) -> tuple[Finding, ...]:
        """Open ones in the catalogue's order, then those that are gone, newest first."""
        order = {rule.code: at for at, (rule, _) in enumerate(CATALOGUE)}
        cases = sorted(self._cases.items(), key=lambda item: (order[item[0][0]], item[0][1]))
        open_now = [case.finding for _, case in cases if case.finding is not None]
        return (*open_now, *reversed(self._gone.values()))
