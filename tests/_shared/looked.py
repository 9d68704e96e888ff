"""What is found of runs whose every byte is known, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from synthetic import Run

from gpumon.analysis import Finding, Reporter
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import wire


def history(*runs: Run, steps: int, host_every: int = 1) -> list[tuple[Finding, ...]]:
    """The first run's findings after each of its steps, with all runs side by side."""
    store, reporter = SessionStore(StoreLimits(steps=64)), Reporter()
    said: list[tuple[Finding, ...]] = []
    streams = [run.stream(steps, host_every=host_every) for run in runs]
    for received in _side_by_side(streams):
        store.apply(received)
        if isinstance(received.event, wire.Step):
            rank = store.rank(received.source, 0)
            assert rank is not None
            found = reporter.rank(rank).findings
            if received.source == runs[0].nonce:
                said.append(found)
    return said


def _side_by_side(streams: list[Iterable[wire.Received]]) -> Iterable[wire.Received]:
    for together in zip(*streams, strict=False):
        yield from together


def codes(found: tuple[Finding, ...], state: str = "open") -> set[str]:
    return {finding.code for finding in found if finding.state == state}


def only(found: tuple[Finding, ...], code: str) -> Finding:
    (finding,) = [finding for finding in found if finding.code == code]
    return finding
