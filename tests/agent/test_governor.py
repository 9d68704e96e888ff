"""The governor: which steps are read, what that costs, and what it says of it."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from typing import Any

import pytest

from gpumon_agent import governor as governor_module
from gpumon_agent.cost import Cost, unpacked
from gpumon_agent.governor import Governor


class Training:
    """Steps of a given duration. Half of what reading adds falls into the next step: it is sent after the step."""

    def __init__(self, governor: Governor, *, varies: float = 0.0, clocked: float = 0.5) -> None:
        self.governor = governor
        self.read: list[int] = []
        self.ledgers: list[int] = []
        self.said: list[str] = []
        self.now = self.step = 0
        self._varies, self._clocked = varies, clocked
        self._late = 0.0
        self._random = random.Random(1)

    def run(self, steps: int, *, step_ms: float, read_us: float, ledger_us: float = 0.0) -> float:
        """The mean cost of a step in µs."""
        governor, extra, end = self.governor, 0.0, self.step + steps
        while self.step < end:
            if governor.quiet:
                durations = []
                for _ in range(governor.quiet_left):
                    durations.append(self._pass(step_ms, 0.0))
                    if self.now >= governor.until_ns:
                        break
                governor.quiet_closed(durations)
                governor.wake(self.now)
            cost = read_us + (ledger_us if governor.ledger else 0.0)
            extra += cost
            self.read.append(self.step)
            if governor.ledger:
                self.ledgers.append(self.step)
                governor.ledger_ns = governor.ledger_thread_ns = int(ledger_us * 1000)
            governor.spent_ns = int(cost * 1000 * self._clocked)
            duration = self._pass(step_ms, cost)
            said = governor.step_closed(duration, self.now)
            if said is not None:
                self.said.append(said)
        return extra / steps

    def _pass(self, step_ms: float, cost_us: float) -> int:
        true = step_ms * 1e6 * (1 + self._random.uniform(-self._varies, self._varies))
        duration = int(true + self._late + cost_us * 500)
        self._late = cost_us * 500
        self.now += duration
        self.step += 1
        return duration


def test_the_first_100_steps_are_read_with_early_ledgers() -> None:
    training = Training(Governor())
    training.run(300, step_ms=2, read_us=200, ledger_us=500)
    assert training.read[:100] == list(range(100))
    assert training.read[100] > 100
    assert {5, 10, 20, 40, 80} <= set(training.ledgers)


@pytest.mark.parametrize(
    ("step_ms", "read_us", "ledger_us"), [(20, 120, 800), (5, 80, 400), (2, 130, 500), (100, 50, 9000)]
)
def test_the_mean_cost_stays_within_the_budget(step_ms: float, read_us: float, ledger_us: float) -> None:
    training = Training(Governor())
    training.run(2_000, step_ms=step_ms, read_us=read_us, ledger_us=ledger_us)
    mean = training.run(20_000, step_ms=step_ms, read_us=read_us, ledger_us=ledger_us)
    assert mean <= step_ms * 2.5 + 5


def test_cheap_steps_are_all_read() -> None:
    training = Training(Governor())
    training.run(1_000, step_ms=100, read_us=50, ledger_us=50)
    assert training.read == list(range(1_000))


def test_steps_are_read_two_in_a_row_at_distances_that_vary() -> None:
    state = random.getstate()
    training = Training(Governor())
    training.run(10_000, step_ms=5, read_us=100, ledger_us=100)
    assert random.getstate() == state
    late = [step for step in training.read if step > 1_000]
    apart = [b - a for a, b in pairwise(late)]
    assert 0.4 <= apart.count(1) / len(apart) <= 0.6
    assert len({distance for distance in apart if distance > 1}) > 5


def test_a_governor_that_is_off_reads_every_step_with_owners() -> None:
    training = Training(Governor(off=True))
    training.run(300, step_ms=1, read_us=5_000, ledger_us=5_000)
    assert training.read == training.ledgers == list(range(300))


def test_a_training_that_may_not_rest_is_never_quiet_but_has_ledgers() -> None:
    governor, ledgers = Governor(), 0
    for step in range(2_000):
        assert not governor.quiet
        governor.spent_ns = 200_000
        if governor.ledger:
            governor.ledger_ns, ledgers = 100_000, ledgers + (step > 100)
        governor.step_closed(5_000_000, step * 5_000_000, may_rest=False)
    assert 5 <= ledgers < 500


def test_noise_does_not_push_a_step_beyond_six_times_what_the_clock_shows() -> None:
    governor = Governor()
    training = Training(governor, varies=0.5)
    for _ in range(20):
        training.run(500, step_ms=20, read_us=100)
        assert 1 <= governor.read_every <= 6 * 50_000 / (governor.budget_ns / 3) + 1


def ledgers(governor: Governor, steps: int, *, thread_ns: int, wall_ns: int, every: int = 1) -> list[int]:
    """The steps whose ledger was read at every phase, of steps long enough to read it in each."""
    read = []
    for step in range(steps):
        if governor.ledger and not governor.ledger_at_end_only:
            read.append(step)
            governor.ledger_thread_ns, governor.ledger_ns = thread_ns, wall_ns
        governor.step_closed(10**12, step * 10**12)
    return read


@pytest.mark.parametrize(
    ("thread_ms", "wall_ms", "dear"),
    [(9, 9, False), (11, 11, True), (1, 39, False), (1, 41, True)],  # its own time, or four times that by the clock
)
def test_a_ledger_of_more_than_10_ms_rests_after_eight_and_is_tried_again_by_two(
    thread_ms: int, wall_ms: int, dear: bool
) -> None:
    read = ledgers(Governor(), 64, thread_ns=thread_ms * 10**6, wall_ns=wall_ms * 10**6)
    expected = [*range(8), 16, 17, 34, 35] if dear else list(range(64))
    assert read == expected, read


def test_the_first_ledgers_are_read_until_their_cost_is_known() -> None:
    training = Training(Governor())
    training.run(90, step_ms=5, read_us=100, ledger_us=900)
    assert training.ledgers == [0, 1, 2, 5, 10, 20, 40, 80]


def test_a_cost_is_measured_after_some_thirty_steps_that_are_read() -> None:
    governor = Governor()
    training = Training(governor, clocked=0.1)
    training.run(100, step_ms=5, read_us=100, ledger_us=900)
    assumed, begun = governor.read_every, len(training.read)
    while governor.read_every < 2 * assumed and len(training.read) < begun + 100:
        training.run(5, step_ms=5, read_us=100, ledger_us=900)
    assert len(training.read) < begun + 55


def test_a_cost_that_changes_is_answered_within_130_steps_that_are_read() -> None:
    governor = Governor()
    training = Training(governor)
    training.run(20_000, step_ms=5, read_us=100, ledger_us=900)
    before, begun = governor.read_every, len(training.read)
    while governor.read_every < 1.5 * before and len(training.read) < begun + 200:
        training.run(20, step_ms=5, read_us=300, ledger_us=900)
    assert len(training.read) < begun + 130


def test_it_decides_at_every_eighth_step_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[int] = []
    monkeypatch.setattr(Governor, "_decide", lambda self: decided.append(self.steps))
    Training(Governor()).run(90, step_ms=5, read_us=100, ledger_us=900)
    assert decided == [1, 2, 5, *range(9, 90, 8)]


def rested(governor: Governor, steps: int) -> list[bool]:
    """Whether new batches may be read, in a training whose budget for them has grown for so many steps."""
    Training(governor).run(steps, step_ms=5, read_us=100, ledger_us=200)
    return [governor.may_wake() for _ in range(40)]


def test_at_most_16_new_batches_in_a_row_are_read() -> None:
    assert rested(Governor(), 20_000).count(True) <= 16


def test_a_step_is_read_within_2_seconds_and_owners_within_10_whatever_it_costs() -> None:
    training = Training(Governor())
    training.run(2_000, step_ms=1, read_us=50_000, ledger_us=100_000)
    training.run(60_000, step_ms=1, read_us=50_000, ledger_us=100_000)
    late = [step for step in training.read if step > 2_000]
    assert max(b - a for a, b in pairwise(late)) <= 2_100
    owners = [step for step in training.ledgers if step > 2_000]
    assert max(b - a for a, b in pairwise(owners)) <= 12_300


def test_16_new_batches_in_a_row_are_read_after_a_long_rest() -> None:
    assert rested(Governor(), 20_000) == [True] * 16 + [False] * 24


def test_ledgers_that_cost_nothing_do_not_keep_the_steps_between_them_read() -> None:
    training = Training(Governor())
    training.run(2_000, step_ms=5, read_us=100)
    assert training.run(5_000, step_ms=5, read_us=100) <= 5 * 2.5 + 5


def test_a_budget_is_a_share_of_the_step_and_a_third_of_it_is_for_phases() -> None:
    governor = Governor()
    Training(governor).run(100, step_ms=5, read_us=100, ledger_us=900)
    assert governor.budget_ns == pytest.approx(5e6 * 0.002, rel=0.03)
    assert governor.read_every == pytest.approx(2 * 50 / (10.2 / 3), abs=1)  # twice what the clock shows
    Training(governor).run(20_000, step_ms=5, read_us=100, ledger_us=900)
    assert governor.read_every == pytest.approx(100 / (10 / 3), abs=2)
    assert governor.ledger_every == pytest.approx(1_000 / (10 / 3), rel=0.2)


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    governor = Governor()
    training = Training(governor)
    training.run(2_000, step_ms=-1, read_us=1, ledger_us=1)
    training.run(20_000, step_ms=5, read_us=100, ledger_us=900)
    assert governor.budget_ns == pytest.approx(5e6 * 0.002, rel=0.03)


def test_a_cost_that_the_clock_hardly_shows_counts_sixfold_at_most() -> None:
    governor = Governor()
    Training(governor, clocked=0.05).run(20_000, step_ms=5, read_us=100, ledger_us=0)
    assert governor.read_every == pytest.approx(6 * 5 / (10 / 3), abs=1)


def test_it_follows_steps_that_get_longer_or_shorter() -> None:
    governor = Governor()
    training = Training(governor)
    training.run(2_000, step_ms=20, read_us=120, ledger_us=800)
    assert governor.read_every > 2
    training.run(400, step_ms=2_000, read_us=120, ledger_us=800)
    assert (governor.read_every, governor.ledger_every) == (1, 1)
    training.run(3_000, step_ms=1, read_us=120, ledger_us=800)
    assert training.run(10_000, step_ms=1, read_us=120, ledger_us=800) <= 2.5 + 5


def test_the_rates_are_said_once() -> None:
    training = Training(Governor())
    training.run(20_000, step_ms=5, read_us=100, ledger_us=900)
    assert training.said[-1].startswith("to read a step costs ")
    assert ", so about one step in " in training.said[-1]
    told = len(training.said)
    for cost in (80, 120, 90, 140):
        training.run(4_000, step_ms=5, read_us=cost, ledger_us=900)
    assert len(training.said) == told


@pytest.mark.parametrize(("dearer", "told"), [(2.2, False), (4.5, True)])
def test_a_ledger_that_comes_a_third_as_often_is_told(dearer: float, told: bool) -> None:
    """A user who compares two ledgers must know that they are further apart now."""
    training = Training(Governor())
    training.run(20_000, step_ms=5, read_us=100, ledger_us=900)
    before = len(training.said)
    training.run(100_000, step_ms=5, read_us=100, ledger_us=900 * dearer)
    assert (len(training.said) > before) is told


@pytest.mark.parametrize(("step_ms", "nanoseconds"), [(20, 40_000), (1, 25_000)])
def test_a_census_has_a_fivehundredth_of_the_step_or_25_microseconds(step_ms: float, nanoseconds: int) -> None:
    governor = Governor()
    Training(governor).run(200, step_ms=step_ms, read_us=1, ledger_us=1)
    assert governor.census_ns == pytest.approx(nanoseconds, rel=0.02)


def told(
    *, step_ms: float, read_us: float, ledger_us: float, hooks_us: int = 20, varies: float = 0.05, seed: int = 1
) -> tuple[Any, float]:
    """The cost that the governor states, and the true one in the steps that follow, both in millionths of a step."""
    governor = Governor()
    governor._random = random.Random(seed)
    training = Training(governor, varies=varies)
    for _ in range(64):
        governor.idled(int(hooks_us * 1_000))
    training.run(40_000, step_ms=step_ms, read_us=read_us, ledger_us=ledger_us)
    stated = governor.cost
    mean_us = training.run(40_000, step_ms=step_ms, read_us=read_us, ledger_us=ledger_us) + hooks_us
    return stated, 1e6 * mean_us / (step_ms * 1_000 + mean_us - hooks_us)


@pytest.mark.parametrize(("step_ms", "hooks_us"), [(1, 4), (5, 20)])
def test_the_cost_is_measured_and_true_nineteen_times_in_twenty(step_ms: float, hooks_us: int) -> None:
    every = [told(step_ms=step_ms, read_us=100, ledger_us=400, hooks_us=hooks_us, seed=seed) for seed in range(8)]
    right = [abs(cost.share - true) <= cost.error for cost, true in every]
    assert right.count(True) >= 7, every
    assert all(0.02 * true < cost.error < 0.4 * true for cost, true in every)


@pytest.mark.parametrize(
    ("step_ms", "read_us", "varies"),
    [(500, 200, 0.05), (5, 100, 0.5)],  # every step is read; durations vary too much
)
def test_a_cost_that_durations_do_not_show_is_limited_by_our_clock(
    step_ms: float, read_us: float, varies: float
) -> None:
    cost, true = told(step_ms=step_ms, read_us=read_us, ledger_us=400, varies=varies)
    assert cost.error is None
    assert true <= cost.share <= 6 * true


def test_our_clock_may_have_missed_five_sixths() -> None:
    governor = Governor()
    Training(governor, clocked=1).run(90, step_ms=5, read_us=100)
    assert governor.cost is not None
    assert governor.cost.error is None
    assert governor.cost.share == pytest.approx(6 * 1e6 * 100 / 5_100, rel=0.02)


def test_hooks_that_were_not_timed_count_as_those_of_a_step_that_is_read() -> None:
    governor = Governor()
    Training(governor, clocked=1).run(5_000, step_ms=5, read_us=100)
    assert governor.cost is not None
    assert governor.cost.error is None
    assert governor.cost.share == pytest.approx(6 * 1e6 * 100 / 5_000, rel=0.1)


def test_hooks_count_once_they_were_timed_eight_times_and_are_timed_64_times() -> None:
    governor = Governor()
    assert [governor.idled(30_000) for _ in range(7)] == [False] * 7
    training = Training(governor, clocked=1)
    training.run(5_000, step_ms=5, read_us=100)
    assert governor.cost is not None
    assert governor.cost.error is None
    assert not governor.idled(30_000)
    training.run(5_000, step_ms=5, read_us=100)
    assert governor.cost.error is not None
    assert [governor.idled(30_000) for _ in range(56)] == [False] * 55 + [True]
    assert 6_000 <= governor.cost.share <= 6_000 + 4_500


@pytest.mark.parametrize(
    ("hooks_us", "due_us", "share"),
    [(0, 0, 0.002), (1, 0, 0.002), (2.5, 0, 0.0015), (1, 1.5, 0.0015), (50, 0, 0.001)],
    ids=["unknown", "few", "some", "both", "many"],
)
def test_reading_may_take_what_quiet_steps_leave_of_a_share(hooks_us: float, due_us: float, share: float) -> None:
    governor = Governor()
    for _ in range(64 if hooks_us else 0):
        governor.idled(int(hooks_us * 1_000))
    training = Training(governor, varies=0)
    for _ in range(40 if due_us else 1):
        before = training.step
        training.run(20_000 // (40 if due_us else 1), step_ms=1, read_us=20, ledger_us=20)
        if due_us:
            governor.looked(int(due_us * 1_000) * (training.step - before))
    assert governor.budget_ns == pytest.approx(share * 1_000_000, rel=0.1)


def test_what_was_due_in_quiet_steps_counts() -> None:
    costs = []
    for due_ns in (0, 400_000):
        governor = Governor()
        governor._random = random.Random(1)
        for _ in range(64):
            governor.idled(20_000)  # both get the least for reading
        training = Training(governor)
        for _ in range(2_000):
            training.run(1, step_ms=5, read_us=100, ledger_us=200)
            governor.looked(due_ns)
        assert governor.cost is not None
        costs.append(governor.cost.share)
    often = 2_000 / training.step
    assert costs[1] - costs[0] == pytest.approx(1e6 * 400 / 5_000 * often, rel=0.4)


def test_after_the_first_hundred_two_steps_that_are_read_in_a_row_are_sent_together() -> None:
    governor = Governor()
    training = Training(governor)
    for _ in range(governor_module.READ_FIRST):
        training.run(1, step_ms=5, read_us=100)
        assert not governor.reads_on
    sent = []
    for _ in range(200):
        training.run(1, step_ms=5, read_us=100)
        sent.append((governor.reads_on, governor.quiet))
    assert {(True, False), (False, True)} == set(sent)
    off = Governor(off=True)
    Training(off).run(300, step_ms=1, read_us=100)
    assert not off.reads_on


def test_a_governor_that_is_off_knows_no_cost() -> None:
    governor = Governor(off=True)
    Training(governor).run(300, step_ms=1, read_us=100)
    assert governor.cost is None


@pytest.mark.parametrize(
    "cost", [Cost(0, None), Cost(0, 0), Cost(4_100, 1_900), Cost(12, None), Cost(1 << 31, 1 << 31)]
)
def test_a_cost_is_one_word(cost: Cost) -> None:
    assert unpacked(cost.packed()) == cost
    assert 0 < cost.packed() < 1 << 64


def test_no_word_is_no_cost_and_a_huge_one_does_not_overflow() -> None:
    assert unpacked(0) is None
    assert unpacked(Cost(1 << 40, 1 << 40).packed()) == Cost((1 << 32) - 2, (1 << 32) - 2)


def test_the_error_of_durations_is_that_of_a_median() -> None:
    source = random.Random(1)
    values = deque(round(source.gauss(1e6, 1e5)) for _ in range(10_000))
    assert governor_module._error(values) == pytest.approx(1.2533 * 1e5 / 100, rel=0.05)


def test_where_durations_are_exact_the_random_distances_leave_an_error_of_two_eighths() -> None:
    governor = Governor()
    for _ in range(64):
        governor.idled(0)
    Training(governor).run(20_000, step_ms=5, read_us=100)
    assert governor.cost is not None
    assert governor.cost.error == pytest.approx(governor.cost.share * 2 / 64**0.5, rel=0.02)


def test_times_of_hooks_that_vary_leave_an_error_of_two_standard_errors() -> None:
    errors = []
    for apart in (0, 8_000):
        governor = Governor()
        governor._random = random.Random(1)
        for turn in range(64):
            governor.idled(20_000 + turn % 3 * apart)
        Training(governor).run(5_000, step_ms=5, read_us=100)
        assert governor.cost is not None
        assert governor.cost.error is not None
        errors.append(governor.cost.error)
    assert errors[1] - errors[0] == pytest.approx(2e6 * governor_module._error(governor._idle) / 5e6, rel=0.1)


def test_a_cost_is_a_limit_again_once_no_step_is_quiet() -> None:
    governor = Governor()
    for _ in range(64):
        governor.idled(20_000)
    training = Training(governor)
    training.run(20_000, step_ms=5, read_us=100, ledger_us=400)
    assert governor.cost is not None
    assert governor.cost.error is not None
    training.run(400, step_ms=500, read_us=100, ledger_us=100)
    assert governor.read_every == 1
    assert governor.cost.error is None


def test_steps_are_noted_until_the_next_choice() -> None:
    governor = Governor()
    governor.steps, governor._ledger_at, governor._together = 200, 230, 2
    governor.read_every = 1
    assert governor.reads_ahead == 30
    governor.read_every = 50
    assert governor.reads_ahead == 2
    governor._together, governor._ledger_at = 0, 199
    assert governor.reads_ahead == 1


def test_a_ledger_that_came_too_late_for_a_step_comes_soon() -> None:
    governor = Governor()
    governor.steps, governor._ledger_at = 200, 900
    governor.quiet = governor.ledger = True
    governor.reads()
    assert (governor.quiet, governor.ledger, governor._ledger_at) == (False, False, 200)
    governor._ledger_at = 900
    governor.reads()
    assert governor._ledger_at == 900


@pytest.mark.parametrize("ledger_at", [1 << 40, 210, 203])
def test_steps_that_were_noted_together_count_as_one_by_one(ledger_at: int) -> None:
    durations = [10**9 + 1000 * at for at in range(23)]  # so long that all are read: nothing is drawn at random
    known = []
    for together in (True, False):
        governor = Governor()
        governor.steps, governor.read_every, governor._ledger_at, governor._ledger_until_ns = 200, 1, ledger_at, 1 << 60
        governor._read.steps = 200
        governor.ledger = False
        now = 0
        for *before, last in (durations[:7], durations[7:8], durations[8:], durations[:1]):
            for duration in [] if together else before:
                governor.spent_ns, now = 90_000, now + duration
                governor.step_closed(duration, now)
                governor.reads()
            governor.spent_ns, now = 90_000, now + last + (sum(before) if together else 0)
            governor.step_closed(last, now, before=before if together else ())
            if not together:
                governor._many = 1 + len(before)
            governor.spent_in_closing(500 * (1 + len(before)))
            governor.reads()
        kind = governor._read
        figures = governor.steps, governor._ledger_at, governor._newest, kind.steps, kind.at, kind.spent
        run = [(ran is kind, duration) for ran, duration in governor._run]
        known.append((*figures, run, governor.read_every, governor.ledger_every, governor.cost))
    assert known[0] == known[1]
    assert known[0][0] == 224
    assert set(known[0][5]) == {90_500}
