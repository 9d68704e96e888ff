"""Turns evidence into findings: one opens after its rule has held for a while, and is gone after it has not.

A finding opens after `opens_after` looks in a row with evidence, and is gone after `closes_after` without. Only a new
step counts as a look, so time without training opens and closes nothing. The newest `GONE_KEPT` that are gone stay
listed.
A finding gives its first step only if the run's history shows it, so that every viewer gives the same.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
from msgspec.structs import replace

from gpumon.analysis.findings import CATALOGUE, Evidence, Look
from gpumon.analysis.rules import (
    NEAR_CAPACITY,
    OOM_AHEAD,
    RETAINED_CHECKPOINT,
    RETAINED_GRAPH,
    TENSOR_LEAK,
    Rule,
)
from gpumon.analysis.types import Finding

GONE_KEPT = 32
ORDER = {rule.code: at for at, (rule, _) in enumerate(CATALOGUE)}
RULES = {rule.code: rule for rule, _ in CATALOGUE}
KEEPING = frozenset({RETAINED_CHECKPOINT.code, RETAINED_GRAPH.code, TENSOR_LEAK.code})


_Key = tuple[str, int, str]
"""The rule's code, the device, and the subject if a rule can hold for several."""


class _Case(msgspec.Struct):
    held: int = 0  # looks in a row with evidence
    missed: int = 0  # looks in a row without, once open
    since: int | None = None
    finding: Finding | None = None


class Tracker(msgspec.Struct):
    _cases: dict[_Key, _Case] = msgspec.field(default_factory=dict)
    _gone: OrderedDict[tuple[_Key, int | None], Finding] = msgspec.field(default_factory=OrderedDict)

    def look(self, look: Look, *, again: bool = False) -> None:
        """`again`: the same step with new evidence; it does not count as another look."""
        held: dict[_Key, tuple[Rule, Evidence]] = {}
        ahead = False
        for rule, find in CATALOGUE:
            if ahead and rule is NEAR_CAPACITY:
                continue  # oom-ahead says the same, and more
            found = find(look)
            if found is None:
                continue
            ahead = ahead or rule is OOM_AHEAD
            for evidence in found if isinstance(found, tuple) else (found,):
                held[rule.code, look.device, evidence.subject] = (rule, evidence)
        for key, (rule, evidence) in held.items():
            unnamed = (key[0], key[1], "")
            if key not in self._cases and unnamed in self._cases and unnamed not in held:
                self._cases[key] = self._cases.pop(unnamed)  # the same, now with a name
            self._hold(key, rule, evidence, look, again)
        if self._cases:
            for key in [key for key in self._cases if key[1] == look.device and key not in held]:
                self._miss(key, again)

    def _hold(self, key: _Key, rule: Rule, evidence: Evidence, look: Look, again: bool) -> None:
        case = self._cases.get(key)
        if case is None:
            case = self._cases[key] = _Case(since=look.record.step)
            again = False
        if evidence.since is not None and case.finding is None:
            case.since = evidence.since
        if not again:
            case.held += 1
        case.missed = 0
        if case.finding is not None or case.held >= rule.opens_after or evidence.at_once:
            case.finding = Finding(
                code=rule.code,
                severity=evidence.severity or rule.severity,
                step=evidence.since,
                title=evidence.title,
                bytes=evidence.bytes,
                bytes_per_step=evidence.bytes_per_step,
                holder=evidence.holder,
                by=evidence.by,
                so_far=max(evidence.bytes or 0, evidence.so_far) if evidence.so_far else None,
                where=evidence.where,
                source_line=evidence.source_line,
                remedy=evidence.remedy,
                subject=evidence.subject or look.where.strip(),
            )

    def _miss(self, key: _Key, again: bool) -> None:
        case = self._cases[key]
        if case.finding is None:
            del self._cases[key]
            return
        if not again:
            case.missed += 1
        if case.missed >= RULES[key[0]].closes_after:
            self._gone[key, case.since] = replace(case.finding, state="gone")
            if len(self._gone) > GONE_KEPT:
                self._gone.popitem(last=False)
            del self._cases[key]

    @property
    def confirming(self) -> bool:
        """Whether there is evidence that was not yet seen often enough."""
        return bool(self._cases) and any(case.finding is None for case in self._cases.values())

    def findings(self) -> tuple[Finding, ...]:
        """Open ones in the catalogue's order, then those that are gone, newest first."""
        if not self._cases and not self._gone:
            return ()
        cases = [(key, case.finding) for key, case in self._cases.items() if case.finding is not None]
        cases.sort(key=lambda item: (ORDER[item[0][0]], item[1].severity == "info", item[0]))
        open_now = [finding for _, finding in cases]
        return (*open_now, *reversed(self._gone.values()))

    def keeping(self, device: int) -> tuple[Finding, ...]:
        """Open findings on memory that a device keeps for no use, with a holder; most bytes first."""
        here = [case.finding for (code, where, _), case in self._cases.items() if where == device and code in KEEPING]
        named = [finding for finding in here if finding is not None and finding.bytes and finding.holder]
        return tuple(sorted(named, key=lambda finding: -(finding.bytes or 0)))
