"""The findings of a whole job: equal findings of several ranks are merged into one, with its ranks.

Model. Two are equal if code, state, severity, subject, holder and line are; the one with the most bytes represents
them. Order: open before gone, then by severity, then by bytes. Host leaks come after the device's findings, since their
bytes differ in kind. So does rank-skew of a rank with a leak: the leak is the cause.
Cost. A pass over the ranks' findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpumon.analysis.job import job
from gpumon.analysis.reports import RankReport
from gpumon.analysis.rules import RANK_SKEW, RETAINED_CHECKPOINT, RETAINED_GRAPH, STRAY_CONTEXT, TENSOR_LEAK
from gpumon.analysis.types import SEVERITIES, Finding
from gpumon.session.frame import Frame, RankFrame

LEAKS = frozenset(rule.code for rule in (TENSOR_LEAK, RETAINED_GRAPH, RETAINED_CHECKPOINT))
_OF_ONE = frozenset(rule.code for rule in (RANK_SKEW, STRAY_CONTEXT))  # their titles name the rank
_NAMED_MAX = 3


class JobFinding(msgspec.Struct, frozen=True):
    finding: Finding
    sources: tuple[str, ...]  # the one with the most bytes first
    ranks: str = ""  # "rank 3", "ranks 2, 3", "5 ranks", "all ranks"; "" for a single rank, or if the title names it


def job_findings(frame: Frame, reports: Iterable[RankReport]) -> tuple[JobFinding, ...]:
    """Most important first. Processes that were replaced by another are left out."""
    standing = job(frame)
    replaced = {each.source for each in standing.ranks if each.replaced}
    present = {rank.source: rank for rank in frame.ranks if rank.source not in replaced}
    alike: dict[tuple[object, ...], list[tuple[str, Finding]]] = {}
    for report in reports:
        if report.source in present:
            for at, each in enumerate(report.findings):
                own = (report.source, at) if each.code in _OF_ONE else ()
                key = each.code, each.state, each.severity, each.subject, each.holder, each.where, own
                alike.setdefault(key, []).append((report.source, each))
    found = []
    for group in alike.values():
        group.sort(key=lambda one: -(one[1].bytes or 0))
        sources = tuple(dict.fromkeys(source for source, _ in group))
        largest = group[0][1]
        if (standing.world_size or len(present)) < 2 or largest.code in _OF_ONE:
            named = ""
        elif len(sources) == len(present) and not standing.missing and not standing.elsewhere:
            named = "all ranks"
        else:
            named = _named(sources, present)
        found.append(JobFinding(largest, sources, named))
    leaking = {
        source
        for each in found
        if each.finding.code in LEAKS and each.finding.state == "open"
        for source in each.sources
    }

    def weight(each: JobFinding) -> tuple[object, ...]:
        finding = each.finding
        behind = finding.code == "host-leak" or (finding.code == RANK_SKEW.code and each.sources[0] in leaking)
        return finding.state != "open", -SEVERITIES.index(finding.severity), behind, -(finding.bytes or 0)

    return tuple(sorted(found, key=weight))


def _named(sources: Sequence[str], present: dict[str, RankFrame]) -> str:
    if len(sources) > _NAMED_MAX:
        return f"{len(sources)} ranks"
    labels = [rank.label for source, rank in present.items() if source in sources]
    kinds = {label.split()[0] for label in labels}
    if len(labels) == 1 or len(kinds) > 1:
        return ", ".join(labels)
    return f"{kinds.pop()}s {', '.join(label.split()[1] for label in labels)}"
