"""Keeps the agent within its budget: how often the ledger is read, and, on very short steps, the allocator at all."""

from __future__ import annotations

from collections import deque
from math import ceil

STEP_SHARE = 0.008  # of the mean step: the rest of the 1 % is for the hooks themselves, which are not timed
STEP_FLOOR_NS = 100_000  # for any step: one raw allocator read costs about 20 µs of it
SAMPLED_STEP_NS = 10_000_000  # thread time that one sampled step may cost
WAITS = 4  # times that in wall time, with waits for the allocator's lock or a CPU
STEPS_BETWEEN_DECISIONS = 50
TIMED_EVERY, TIMED_FIRST = 4, 8
"""Of the steps that read at each boundary, every nth is timed (at first all): the clock costs time too."""
FIRST_LEDGERS = 2  # steps whose ledger is read before there are costs to decide by
EARLY_LEDGERS = (5, 10, 20, 40, 80)
"""Steps whose ledger is read at any rate: optimizer state exists, batches settle; short runs have no others."""
LEDGERS_JUDGED_BY = 8  # before sampled steps count as too expensive: the first have cold caches
TRIED_AGAIN_BY = 2  # full ledgers, after a rest from them
REST_FIRST, REST_MAX = 8, 512  # sampled steps whose ledger is read only at their end
EVERY_MAX = 10_000
LEDGER_SHARE = 0.125  # of the budget, reserved for the ledger
REPORTED_AGAIN_FACTOR = 3  # a rate that varies with the machine's load is reported once, not each time


class Rest:
    """The turns that a task skips after it was too expensive: `first`, doubled each time, at most `longest`."""

    __slots__ = ("_first", "_left", "_longest", "turns")

    def __init__(self, longest: int, first: int = 1) -> None:
        self.turns = 0  # of the newest rest; 0: the task was cheap
        self._left = 0
        self._first, self._longest = first, longest

    def is_over(self) -> bool:
        """Call it once a turn: whether the task may run."""
        if not self._left:
            return True
        self._left -= 1
        return False

    def judge(self, *, dear: bool) -> None:
        """The task ran."""
        self.turns = self._left = min(max(self._first, self.turns * 2), self._longest) if dear else 0


class Governor:
    """Decides for each step from the costs of the last ones. `off`: every step is sampled (tests).

    The budget is max(0.8 % of the mean step, 100 µs). Reading the allocator at every boundary has priority; the ledger
    gets the rest, at least an eighth, because an old ledger is useless. Mean costs exclude the largest tenth: a
    preempted boundary says nothing about the agent.
    """

    __slots__ = (
        "_boundary",
        "_costs",
        "_durations",
        "_gives_way",
        "_ledgers",
        "_off",
        "_reported",
        "_rest",
        "_whole",
        "_windows",
        "at_end_only",
        "boundaries",
        "boundary_ns",
        "budget_ns",
        "hurries",
        "ledger",
        "ledger_at_end_only",
        "ledger_every",
        "ledger_ns",
        "ledger_thread_ns",
        "read_every",
        "reads",
        "steps",
        "times",
    )

    def __init__(self, *, off: bool = False) -> None:
        self._off = off
        self.steps = 0
        self.boundaries = 0  # of the current step, if timed
        self.boundary_ns = 0  # spent in them, raw reads included
        self.ledger_ns = 0
        self.ledger_thread_ns = 0  # of it, the thread's own time
        self.read_every = 1
        self.ledger_every = 1
        self.ledger_at_end_only = False
        self.reads = True  # the current step: read the allocator at each boundary
        self.ledger = True  # the current step: read the owners
        self.times = True  # the current step: its boundaries are timed
        self.at_end_only = False  # full ledgers are too expensive: the models have too many tensors
        self.hurries = False  # their first ledger is built in slices, one at the end of each step
        self.budget_ns: float = STEP_FLOOR_NS  # of a step, as last decided
        self._gives_way = False
        self._reported = (1, 1)  # the rates last reported to viewers
        self._durations: deque[int] = deque(maxlen=200)
        self._boundary: deque[int] = deque(maxlen=50)  # of steps that read at each boundary
        self._windows: deque[int] = deque(maxlen=50)  # their boundaries
        self._ledgers: deque[int] = deque(maxlen=32)
        self._whole: list[int] = []  # costs of the newest sampled steps with a ledger at every phase
        self._rest = Rest(REST_MAX, REST_FIRST)
        self._costs: deque[int] = deque(maxlen=64)  # of one boundary, step by step

    @property
    def boundary_cost_ns(self) -> int | None:
        """Median cost of a boundary in the last steps that read the allocator."""
        costs = sorted(self._costs)
        return costs[len(costs) // 2] if costs else None

    @property
    def sample_every(self) -> int:
        return max(self.read_every, self.ledger_every)

    def step_closed(self, duration_ns: int) -> str | None:
        """Returns a sentence for viewers if the rates changed."""
        self.steps += 1
        said = None
        if self.times and self.boundaries:
            self._costs.append(self.boundary_ns // self.boundaries)
        if not self._off:
            if self.steps > 1:  # the first includes loading, and an evaluation before training
                self._durations.append(duration_ns)
                if self.times:
                    self._boundary.append(self.boundary_ns)
                    self._windows.append(self.boundaries)
            if self.ledger and self.ledger_ns:
                self._ledgers.append(self.ledger_ns)
                if not self.ledger_at_end_only:
                    self._judge(max(self.ledger_thread_ns, self.ledger_ns // WAITS))
            if self.steps in (FIRST_LEDGERS, 10) or not self.steps % STEPS_BETWEEN_DECISIONS:
                said = self._decide()
            early = self.steps in EARLY_LEDGERS
            self.reads = early or not self.steps % self.read_every
            self.ledger = early or (self.reads and (self.hurries or not self.steps % self.ledger_every))
            if self.ledger:
                self.ledger_at_end_only = not self._rest.is_over() or self.at_end_only
        self.times = self.reads and (self.steps < TIMED_FIRST or not self.steps // self.read_every % TIMED_EVERY)
        self.boundaries = self.boundary_ns = self.ledger_ns = self.ledger_thread_ns = 0
        return said

    def _judge(self, cost_ns: int) -> None:
        """Pauses full ledgers if their median cost is too high (single ones have cold caches)."""
        self._whole.append(cost_ns)
        if len(self._whole) < (TRIED_AGAIN_BY if self._rest.turns else LEDGERS_JUDGED_BY):
            return
        self._rest.judge(dear=sorted(self._whole)[(len(self._whole) - 1) // 2] > SAMPLED_STEP_NS)
        self._whole.clear()

    def give_way(self, on: bool) -> None:
        """`on`: a census uses half of the budget."""
        if on != self._gives_way:
            self._gives_way = on
            if not self._off and self.steps > FIRST_LEDGERS:
                self._decide()

    def ask_ledger(self) -> None:
        """Samples the step that begins now, at any rate."""
        self.reads = self.ledger = True

    def _decide(self) -> str | None:
        step = sum(self._durations) / max(1, len(self._durations))
        self.budget_ns = budget = max(step * STEP_SHARE, STEP_FLOOR_NS)
        if self._gives_way:
            budget /= 2
        boundary, ledger = _mean(self._boundary), _mean(self._ledgers)
        # a change needs an eighth of difference, else the rate would oscillate around the limit
        if boundary > budget * (1.0 if self.read_every == 1 else 1.0 - LEDGER_SHARE):
            self.read_every = min(max(2, ceil(boundary / budget)), EVERY_MAX)
        else:
            self.read_every = 1
        left = max(budget - boundary / self.read_every, budget * LEDGER_SHARE)
        if ledger:
            every = ceil(ledger / left) if left > ledger / EVERY_MAX else EVERY_MAX
            if not 0.8 * self.ledger_every <= every <= self.ledger_every:
                self.ledger_every = max(1, every)
        if self.read_every > 1:  # the ledger belongs to a reading
            self.ledger_every = ceil(self.ledger_every / self.read_every) * self.read_every
        rates = self.read_every, self.ledger_every
        if all(
            reported / REPORTED_AGAIN_FACTOR < rate < reported * REPORTED_AGAIN_FACTOR
            for rate, reported in zip(rates, self._reported, strict=True)
        ):
            return None
        self._reported = rates
        if self.read_every > 1:
            return (
                f"to read the allocator at each of {_mean(self._windows):.0f} phases costs {boundary / 1e6:.2g} ms "
                f"of a step of {step / 1e6:.3g} ms, so one step in {self.read_every} is read at every phase, one in "
                f"{self.ledger_every} has a ledger"
            )
        return f"to stay within 1 % of a step, the ledger is read every {self.ledger_every} steps"


def _mean(costs: deque[int]) -> float:
    kept = sorted(costs)[: max(1, ceil(len(costs) * 0.9))]
    return sum(kept) / len(kept) if kept else 0.0
