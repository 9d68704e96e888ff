"""An agent in the test's own process that publishes nothing: the test drains its recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumon_agent import agent as agents
from gpumon_agent import governor, wire
from gpumon_agent.quiet_mark import QuietMark

FLAGS = {
    wire.INFERRED: "inferred",
    wire.SKIPPED: "skipped",
    wire.RECOMPUTED: "recomputed",
    wire.OVERLAPPED: "overlapped",
    wire.ABORTED: "aborted",
    wire.MERGED: "merged",
}


class Watched:
    """The agent under test, and what it recorded as words: `["load", "forward", "backward inferred", "| step", …]`."""

    def __init__(self) -> None:
        self.agent = agents.Agent("test", publish=False)
        agents.REGISTRY.agent = self.agent
        self.seen: list[wire.NumberedEvent] = []

    def __call__(self, model: Any, optimizer: Any = None) -> None:
        self.agent.adopt(model, optimizer)

    def events(self) -> list[wire.NumberedEvent]:
        self.seen += [event for _, event in self.agent.recorder.drain()]
        return self.seen

    def phases(self) -> list[wire.Phase]:
        return [event for event in self.events() if isinstance(event, wire.Phase)]

    def steps(self) -> list[wire.Step]:
        return [event for event in self.events() if isinstance(event, wire.Step)]

    def notices(self) -> list[str]:
        return [event.text for event in self.events() if isinstance(event, wire.Notice)]

    def words(self) -> list[list[str]]:
        """The phases of each step in order, the open step last. What was flagged says so; SAMPLED does not count."""
        steps: dict[int, list[str]] = {}
        for phase in self.phases():
            flags = [word for flag, word in FLAGS.items() if phase.flags & flag]
            steps.setdefault(phase.step, []).append(" ".join([phase.phase, *flags]))
        return [steps[step] for step in sorted(steps)]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("GPUMON_GOVERNOR", "off")
    watched = Watched()
    yield watched
    watched.agent.leave("stopped")
    failed = dict(watched.agent.guard.failures)
    watched.agent.guard.failures.clear()  # the process has one guard: another test must not inherit them
    assert not failed


@pytest.fixture
def resting(monkeypatch: pytest.MonkeyPatch, hooks: str) -> Iterator[Watched]:
    """An agent that reads four steps, and then rests for as long as the test wants."""
    monkeypatch.setenv("GPUMON_GOVERNOR", "on")
    monkeypatch.setattr(governor, "READ_FIRST", 4)
    monkeypatch.setattr(governor, "READ_AGAIN_NS", 1 << 61)
    monkeypatch.setattr(governor.Governor, "_decide", lambda self: None)
    watched = Watched()
    assert (type(watched.agent.phases.quiet_mark) is not QuietMark) is (hooks == "compiled")
    watched.agent.governor.read_every = watched.agent.governor.ledger_every = 10**9
    yield watched
    watched.agent.leave("stopped")
    failed = dict(watched.agent.guard.failures)
    watched.agent.guard.failures.clear()
    assert not failed
