"""How much the phases keep: of steps that are not read, of batches that fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import monotonic_ns
from typing import Any

from gpumon_agent import wire
from gpumon_agent.allocator import Reading
from gpumon_agent.governor import Governor
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.wire.codec import decode_event, encode_event

MS = 1_000_000


class Resting(Governor):
    """Reads two steps. Then none for as long as a test wants, new batches neither."""

    __slots__ = ("counted",)

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []  # durations, at each call

    def quiet_closed(self, durations_ns: Sequence[int]) -> None:
        self.counted.append(len(durations_ns))
        super().quiet_closed(durations_ns)

    def step_closed(self, duration_ns: int, now_ns: int, *, may_rest: bool = True) -> str | None:
        self.steps += 1
        self.quiet = may_rest and self.steps >= 2
        self.quiet_left = self.until_ns = 1 << 62
        return None

    @property
    def reads_on(self) -> bool:
        return not self.quiet

    def wake(self, now_ns: int) -> None:
        self.quiet = False

    def may_wake(self) -> bool:
        return False


class Training:
    """Steps whose end a test gives; a device's allocated bytes grow with each reading of an end."""

    def __init__(self, *, every_ns: int | None = 0, **options: Any) -> None:
        self.recorder = Recorder()
        self.governor = Resting()
        self.governor.ledger = False
        self.told: list[int] = []  # how many ends at one time
        self._ends = 0
        self.phases = Phases(
            self.recorder,
            self.governor,
            find_readers=lambda: ((lambda _: Reading(1 << 20, 1 << 21), 0, 0),),
            read_ledger=lambda *_: None,
            step_closes=lambda step: None,
            step_closed=lambda step, reads: None,
            opened_ns=0,
            read_end=self._read_end,
            take_ends=lambda ends: self.told.append(len(ends)),
            **options,
        )
        if every_ns is not None:
            self.phases.ends_every_ns = every_ns
        self._optimizer = type("Optimizer", (), {})()
        self.now = 0

    def _read_end(self, device: int) -> tuple[int, int]:
        self._ends += 1
        return self._ends, self._ends

    def forward(self, *shapes: tuple[int, ...]) -> None:
        self.phases.forward_begins(1, gradients=True, trains=True, inputs=lambda: (8, shapes or [(2, 4)]))
        self.phases.forward_ends(1, gradients=True, aborted=False)

    def step(self) -> None:
        self.forward()
        self.phases.engine_begins()
        self.phases.engine_ends(aborted=False)
        self.phases.optimizer_begins(self._optimizer)
        self.phases.optimizer_ends(self._optimizer, in_engine=False)

    def rest(self) -> None:
        while not self.phases.quiet:
            self.step()
        self.now = monotonic_ns()

    def quiet_steps(self, count: int, *, ns: int, counts: bool = True) -> None:
        """`counts`: what is due as they close is done."""
        for _ in range(count):
            self.now += ns
            if self.phases.quiet_mark.pass_step(self.now) and counts:
                self.phases.do_quietly()

    def last_step(self) -> wire.Step:
        self.phases.finish()
        return [event for _, event in self.recorder.drain() if isinstance(event, wire.Step)][-1]


def test_the_ends_of_any_number_of_quiet_steps_are_a_series_of_at_most_256() -> None:
    """They must fit the next step's message: viewers accept 320. The steps that stay are about as far apart."""
    training = Training(every_ns=MS)
    training.rest()
    training.quiet_steps(2_040, ns=MS)
    closed = training.last_step()
    assert closed.quiet == 2_040 - 1
    assert 128 < len(closed.quiet_ends) <= 256
    apart = [b.step - a.step for a, b in pairwise(closed.quiet_ends)]
    assert max(apart) <= 2 * min(apart)
    assert decode_event(encode_event(closed)) == closed


def test_ends_are_looked_at_every_two_seconds_or_as_soon_as_a_viewer_asks() -> None:
    """A look has cold caches, which cost more than the ends do."""
    asks = [False]
    training = Training(every_ns=MS, asked=lambda: asks[0])
    training.rest()
    training.quiet_steps(1, ns=MS)
    training.quiet_steps(220, ns=20 * MS)
    assert training.told[1:] == [100]
    asks[0] = True
    training.quiet_steps(5, ns=20 * MS)
    assert sum(training.told) == 226
    assert training.told[3:] == [1] * 4


def test_a_viewer_is_heard_in_the_next_quiet_step() -> None:
    asked: list[int] = []
    training = Training(asked=lambda: bool(asked.append(training.now)))
    training.rest()
    mark = training.phases.quiet_mark
    mark.hears = True  # it is shared with the helper
    training.quiet_steps(900, ns=MS)
    mark.words[mark.called_at] = 7
    before = training.now
    training.quiet_steps(900, ns=MS)
    assert asked[1:] == [before + MS]


def test_ends_are_read_every_400_ms() -> None:
    training = Training(every_ns=None)
    training.rest()
    training.quiet_steps(1_000, ns=MS)
    assert len(training.last_step().quiet_ends) == 3


def test_a_device_without_ends_is_asked_once_between_two_steps_that_are_read() -> None:
    training, asked = Training(every_ns=MS), []
    training.phases._read_end = asked.append
    training.rest()
    training.quiet_steps(1_000, ns=MS)
    assert len(asked) == 1


def test_what_was_due_in_quiet_steps_is_charged_as_a_step_is_read() -> None:
    training = Training(every_ns=MS)
    training.rest()
    training.quiet_steps(10, ns=MS)
    charged = training.governor._looked.spent
    assert not charged
    training.phases.read_soon()
    training.quiet_steps(1, ns=MS)
    assert len(charged) == 1
    assert charged[0] > 0


def test_a_recorder_waits_until_it_is_drained() -> None:
    recorder = Recorder()
    assert not recorder.waits
    recorder.append(wire.Notice(0, "", 0))
    assert recorder.waits
    recorder.drain()
    assert not recorder.waits


def test_a_viewer_is_heard_within_400_ms_where_no_ends_are_read() -> None:
    asked = []
    training = Training(asked=lambda: bool(asked.append(training.now)))
    training.rest()
    training.quiet_steps(1_900, ns=MS)
    assert {b - a for a, b in pairwise(asked[1:])} == {400 * MS}


def test_quiet_steps_are_counted_before_their_list_is_full() -> None:
    training = Training(every_ns=0)
    training.rest()
    training.phases.quiet_mark.hears = True  # then nothing is due every 400 ms
    training.quiet_steps(1, ns=MS)
    training.quiet_steps(40_000, ns=MS // 25)
    training.phases.finish()
    assert sum(training.governor.counted) == 40_001
    assert max(training.governor.counted) < 16_384


def test_a_step_is_sent_at_once_unless_the_next_is_read_too() -> None:
    sent: list[str] = []
    training = Training(flush=lambda: sent.append("at once"), tell=lambda: sent.append("soon"))
    training.step()
    assert set(sent) == {"soon"}
    training.step()
    assert (sent.count("at once"), training.phases.quiet) == (1, True)


def test_durations_of_16384_steps_are_kept_if_counting_fails() -> None:
    """The list must not grow for a whole run. They are counted sooner otherwise."""
    training = Training()
    training.rest()
    training.quiet_steps(20_000, ns=MS, counts=False)
    begun = training.phases.step
    training.phases.do_quietly()
    assert training.governor.counted == [16_384]
    assert training.phases.step == begun + 20_000


def test_4096_shapes_of_batches_that_fit_are_known_at_one_time() -> None:
    """Some 1.5 MiB. A training whose batches all differ would add one with each step."""
    training = Training(on_batch=lambda *_: (False, True))
    training.rest()
    known = []
    for length in range(10_000):
        training.forward((2, length))
        known.append(len(training.phases.quiet_mark._fitting))
    assert max(known) == 4_096
