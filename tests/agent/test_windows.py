"""A window that closes the short way is told as one that closes the long way: any training, both ways."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpumon_agent import wire
from gpumon_agent.allocator import Reading
from gpumon_agent.governor import Governor
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.hooks.recorder import Recorder

ROOT = 1
_OPTIMIZERS = [type("Optimizer", (), {})() for _ in range(2)]


class Scarce(Governor):
    """Of each five steps it reads four, and every other new batch in the fifth, whatever they take."""

    def step_closed(self, duration_ns: int, now_ns: int, *, may_rest: bool = True) -> str | None:
        self.steps += 1
        self.quiet = may_rest and self.steps % 5 == 4
        self.quiet_left = int(self.quiet)
        self.until_ns = 2**62
        return None

    def wake(self, now_ns: int) -> None:
        self.quiet = False

    def may_wake(self) -> bool:
        return self.steps % 2 == 0


class Training:
    """What a training's events become. `long`: each window closes the long way. `warns`: each batch may not fit."""

    def __init__(self, devices: int, *, long: bool, warns: bool = False) -> None:
        self.recorder = Recorder()
        self.governor = Scarce()
        self.governor.ledger = False
        self.told: list[object] = []
        readings = count(1)
        self.phases = Phases(
            self.recorder,
            self.governor,
            find_readers=lambda: tuple((lambda d: Reading(next(readings), d), d, None) for d in range(devices)),
            read_ledger=lambda *_: None,
            step_closes=lambda step: None,
            step_closed=lambda step, reads: self.told.append((step, list(reads))),
            opened_ns=0,
            carry_out=lambda: self.told.append("carried out"),
            on_batch=lambda *batch: (self.told.append(batch), (warns, False))[1],
            flush=lambda: self.told.append("sent"),
            tell=lambda: self.told.append("sent unless just sent"),
        )
        self.careful = 0
        close_any = self.phases._close_any

        def counted(*args: Any) -> None:
            self.careful += 1
            close_any(*args)

        self.phases._close_any = counted  # type: ignore[method-assign]
        if long:
            self.phases._is_usual = lambda: False  # type: ignore[method-assign]

    def events(self) -> list[object]:
        """In order, without the times."""
        found: list[object] = []
        for seq, event in self.recorder.drain():
            fields = {name: getattr(event, name) for name in event.__struct_fields__}
            found.append((seq, type(event), {k: v for k, v in fields.items() if k not in ("t_ns", "duration_ns")}))
        return found


def _forward(phases: Phases, *, evaluates: bool = False, aborted: bool = False) -> None:
    phases.forward_begins(ROOT, gradients=not evaluates, trains=not evaluates, inputs=lambda: (8, [(2, 4)]))
    phases.forward_ends(ROOT, gradients=not evaluates, aborted=aborted)


def _backward(phases: Phases, *, again: bool = False, aborted: bool = False) -> None:
    phases.engine_begins()
    if again:
        phases.recomputes()
    phases.engine_ends(aborted=aborted)


def _step(phases: Phases, which: int = 0) -> None:
    optimizer = _OPTIMIZERS[which]
    phases.optimizer_begins(optimizer)
    phases.optimizer_ends(optimizer, in_engine=False)


def _in_a_phase(phases: Phases, *, aborted: bool = False) -> None:
    phases.user_begins("mine")
    _forward(phases)
    phases.user_ends(aborted=aborted)


def _rings(phases: Phases) -> None:
    phases.request_waits = True


def _train(phases: Phases) -> None:
    _forward(phases)
    _backward(phases)
    _step(phases)


def _again(phases: Phases) -> None:
    _forward(phases)
    _backward(phases, again=True)
    _step(phases)


def _given_up(phases: Phases) -> None:
    _forward(phases)
    _backward(phases, aborted=True)


MOVES: tuple[Callable[[Phases], None], ...] = (
    _train,
    _forward,
    _backward,
    _step,
    _rings,
    _in_a_phase,
    _again,
    _given_up,
    lambda phases: _forward(phases, evaluates=True),
    lambda phases: _forward(phases, aborted=True),
    lambda phases: _step(phases, 1),
    lambda phases: _in_a_phase(phases, aborted=True),
    lambda phases: [_forward(phases) for _ in range(wire.PHASES_PER_STEP_MAX)] and None,
    lambda phases: [_train(phases) for _ in range(9)] and None,
    lambda phases: phases.optimizer_skipped(_OPTIMIZERS[0]),
)


@example([_train, _train, _again, _train], 1)
@example([_train, _train, _given_up, _train], 1)
@given(st.lists(st.sampled_from(MOVES), max_size=24), st.integers(1, 2))
def test_both_ways_tell_the_same(moves: list[Callable[[Phases], None]], devices: int) -> None:
    short, long = Training(devices, long=False), Training(devices, long=True)
    for move in moves:
        for training in (short, long):
            move(training.phases)
        assert short.phases.aborted == long.phases.aborted
        assert short.recorder.now[:2] == long.recorder.now[:2]
    assert short.events() == long.events()
    assert short.told == long.told


@pytest.mark.parametrize("warns", [False, True])
def test_a_batch_that_may_not_fit_is_sent_before_its_forward_runs(warns: bool) -> None:
    training = Training(1, long=False, warns=warns)
    training.phases.forward_begins(ROOT, gradients=True, trains=True, inputs=lambda: (8, [(2, 4)]))
    _, *sent = training.told
    assert sent == ["sent"] * warns + ["sent unless just sent"]


def test_most_windows_of_a_plain_training_close_the_short_way() -> None:
    training = Training(1, long=False)
    for _ in range(400):
        _train(training.phases)
    assert training.careful < 0.02 * 4 * 400
