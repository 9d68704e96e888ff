"""Keeps the agent within its budget: which steps are read, and which of them with their owners.

Most short steps are quiet: their hooks return at once. A step that is read costs more than our own clock shows (hooks,
the interpreter's cold caches), so its cost is the difference between its duration and that of the quiet steps around
it. Which steps are read is drawn at random, with a generator of our own, so that the choice cannot follow the batches.

Viewers are told the same figures as one: what the agent costs a mean step, quiet steps included. All together get
`COST_SHARE`: where quiet steps take most of it, fewer steps are read.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from math import ceil, sqrt

from gpumon_agent.cost import Cost

COST_SHARE = 0.004  # of the mean step, for all that we do; from outside (benchmarks/overhead.py) it is a third more
STEP_SHARE, STEP_SHARE_MIN = 0.002, 0.001  # of it, for all that is read: what quiet steps leave
TASKS = 3  # that share the budget: phases, owners, batches with new shapes
CENSUS_SHARE, CENSUS_FLOOR_NS = 0.002, 25_000  # beside it, while memory grows: a leak must get its name soon
SAMPLED_STEP_NS = 10_000_000  # thread time that one sampled step may cost
WAITS = 4  # times that in wall time, with waits for the allocator's lock or a CPU
READ_FIRST = 100
"""Steps that are all read: the shape model learns from them, and a short run is seen whole."""
READ_TOGETHER = 2
"""Steps in a row that are read: what changes from one step to the next is seen in no other way."""
READ_AGAIN_NS, LEDGER_AGAIN_NS = 2_000_000_000, 10_000_000_000  # at the latest, whatever it costs
FIRST_LEDGERS = 2  # steps whose ledger is read before there are costs to decide by
EARLY_LEDGERS = (5, 10, 20, 40, 80)
"""Steps whose ledger is read at any rate: optimizer state exists, batches settle; short runs have no others."""
NEWEST = 64  # steps of a kind, to judge by
DECIDED_EVERY = 8  # steps that are read
KNOWN_AFTER = 8  # durations of a kind, before it is compared with the others
UNCLOCKED, UNCLOCKED_MAX = 2.0, 6.0
"""What a step costs, in units of what our clock shows: assumed before it is known, and at most. Durations vary with the
batches, so that few of them can show anything."""
LEDGERS_JUDGED_BY = 8  # before sampled steps count as too expensive: the first have cold caches
TRIED_AGAIN_BY = 2  # full ledgers, after a rest from them
REST_FIRST, REST_MAX = 8, 512  # sampled steps whose ledger is read only at their end
WAKES_MAX = 16  # new batches in a row that may be read
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


class _Kind:
    """What the newest steps of a kind cost.

    `costs`: from the durations of a run of them and of the quiet step that followed, because a step is sent after it
    has ended. `spent`: what our own clock saw of it. `at`: their numbers.
    """

    __slots__ = ("at", "costs", "spent", "steps")

    def __init__(self) -> None:
        self.costs: deque[int] = deque(maxlen=NEWEST)
        self.spent: deque[int] = deque(maxlen=NEWEST)
        self.at: deque[int] = deque(maxlen=NEWEST)
        self.steps = 0

    def add(self, spent_ns: int, step: int) -> None:
        self.spent.append(spent_ns)
        self.at.append(step)
        self.steps += 1

    def per_step(self, step: int) -> float:
        """How many of the steps up to this one were of this kind, of one."""
        return max(1, len(self.at) - 1) / max(1, step - self.at[0]) if self.at else 0.0

    @property
    def measured_ns(self) -> int | None:
        return _median(self.costs) if len(self.costs) >= KNOWN_AFTER else None

    def cost_ns(self) -> float:
        """Of one step: as measured, within what our clock makes credible."""
        own, measured = _mean(self.spent), self.measured_ns
        return UNCLOCKED * own if measured is None else min(max(measured, own), UNCLOCKED_MAX * own)


class Governor:
    """Decides for each step from the durations of the last ones. `off`: every step is read, with its owners (tests)."""

    __slots__ = (
        "_closed",
        "_decided",
        "_idle",
        "_judged",
        "_ledger_at",
        "_ledger_until_ns",
        "_looked",
        "_many",
        "_newest",
        "_off",
        "_quiet",
        "_random",
        "_read",
        "_reported",
        "_rest",
        "_run",
        "_sampled",
        "_together",
        "_wakes_ns",
        "at_end_only",
        "budget_ns",
        "cost",
        "hurries",
        "ledger",
        "ledger_at_end_only",
        "ledger_every",
        "ledger_ns",
        "ledger_thread_ns",
        "quiet",
        "quiet_left",
        "read_every",
        "spent_ns",
        "steps",
        "until_ns",
    )

    def __init__(self, *, off: bool = False) -> None:
        self._off = off
        self._random = random.Random()
        self.steps = 0
        self.spent_ns = 0  # in our hooks, in the current step
        self.ledger_ns = 0
        self.ledger_thread_ns = 0  # of it, the thread's own time
        self.read_every = 1
        self.ledger_every = 1
        self.ledger_at_end_only = False
        self.quiet = False  # the current step is not read
        self.ledger = True  # the current step: read the owners
        self.at_end_only = False  # full ledgers are too expensive: the models have too many tensors
        self.hurries = False  # their first ledger is built in slices, one at the end of each step
        self.budget_ns = 1.0  # of a step, as last decided
        self._quiet: deque[int] = deque(maxlen=2 * NEWEST)  # durations
        self._newest: deque[int] = deque(maxlen=2 * NEWEST)  # of all steps
        self._read, self._sampled = _Kind(), _Kind()
        self._looked = _Kind()  # accounts of what was due as quiet steps closed
        self._idle: deque[int] = deque(maxlen=NEWEST)  # what the hooks of a quiet step cost
        self.cost: Cost | None = None  # of all that we do; None: not known
        self._closed: _Kind | None = None  # of the step that was read last
        self._many = 1  # steps that closed with it
        self._decided = -1  # steps read at the last decision, in units of DECIDED_EVERY
        self._run: list[tuple[_Kind, int]] = []  # the steps that were read since the last quiet one, with durations
        self._together = 0  # of which so many are still to come
        self.quiet_left = 0  # quiet steps before the next that is read
        self.until_ns = self._ledger_until_ns = 0  # when the next must be read
        self._ledger_at = 0  # the step that has the next ledger
        self._wakes_ns: float = 0  # what new batches may still cost
        self._reported = (1, 1)  # the rates last reported to viewers
        self._judged: list[int] = []  # costs of the newest sampled steps with a ledger at every phase
        self._rest = Rest(REST_MAX, REST_FIRST)

    @property
    def census_ns(self) -> int:
        """Of a step, for a census."""
        return max(CENSUS_FLOOR_NS, int(_mean(self._newest) * CENSUS_SHARE))

    @property
    def reads_on(self) -> bool:
        """The next step is read, too, and neither is one of the first, whose figures are wanted at once."""
        return not (self.quiet or self._off) and self.steps > READ_FIRST

    @property
    def reads_ahead(self) -> int:
        """So many steps, with the open one, are read without their owners before the next choice."""
        ahead = self._ledger_at - self.steps
        return max(1, ahead if self.read_every == 1 else min(ahead, self._together))

    @property
    def ledger_until_ns(self) -> int:
        return self._ledger_until_ns

    def reads(self) -> None:
        """The step after the one that closed has been read already, without its owners."""
        if self.ledger:
            self.sample_soon()
        self.quiet = self.ledger = False

    def quiet_closed(self, durations_ns: Sequence[int]) -> None:
        """Steps closed that were not read."""
        self.steps += len(durations_ns)
        if self._run and durations_ns:
            self._measure(durations_ns[0])
            durations_ns = durations_ns[1:]
        self._quiet.extend(durations_ns)
        self._newest.extend(durations_ns)

    def spent_in_closing(self, ns: int) -> None:
        """Of the step that was read last: sending it, and those that closed with it."""
        spent = self._closed.spent if self._closed is not None else deque()
        many = min(self._many, len(spent))
        for at in range(1, many + 1):
            spent[-at] += ns // many

    def looked(self, ns: int) -> None:
        """What was due as quiet steps closed, since the last call."""
        self._looked.add(ns, self.steps)

    def idled(self, ns: int) -> bool:
        """The hooks of a quiet step were timed. True: often enough."""
        self._idle.append(ns)
        return len(self._idle) == NEWEST

    def _measure(self, duration_ns: int) -> None:
        """The first quiet step after a run of others closes."""
        run, self._run = self._run, []
        quiet = self._quiet_ns()
        if quiet is None or len(run) > READ_TOGETHER:
            return
        cost = sum([duration for _, duration in run]) + duration_ns - (len(run) + 1) * quiet
        sampled = [kind for kind, _ in run if kind is self._sampled]
        if sampled:
            read = self._read.measured_ns
            if read is not None:
                self._sampled.costs.append(int(cost - (len(run) - len(sampled)) * read) // len(sampled))
        else:
            self._read.costs.append(int(cost) // len(run))

    def wake(self, now_ns: int) -> None:
        """The step that begins is read."""
        self.quiet = False
        self._together = READ_TOGETHER
        self._choose_ledger(now_ns)

    def may_wake(self) -> bool:
        """Whether a batch with new shapes may be read."""
        cost = self._read.cost_ns()
        self._wakes_ns = min(self._wakes_ns, WAKES_MAX * cost)
        if self._wakes_ns < cost:
            return False
        self._wakes_ns -= cost
        self.quiet = self.ledger = False
        self._together = 1
        return True

    def step_closed(
        self, duration_ns: int, now_ns: int, *, may_rest: bool = True, before: Sequence[int] = ()
    ) -> str | None:
        """A step that was read closes. Returns a sentence for viewers if the rates changed.

        `before`: durations of steps that were noted with it, before it, without their owners; each cost as much.
        """
        if before:
            self._close_before(before)
        self._many = 1 + len(before)
        self.steps += 1
        said = None
        if not self._off:
            self._closed = None
            if self.steps > 1:  # the first includes loading, and an evaluation before training
                self._newest.append(duration_ns)
                self._closed = self._sampled if self.ledger and self.ledger_ns else self._read
                self._closed.add(self.spent_ns, self.steps)
                self._run = [*self._run[-READ_TOGETHER:], (self._closed, duration_ns)]
            if self.ledger and self.ledger_ns and not self.ledger_at_end_only:
                self._judge(max(self.ledger_thread_ns, self.ledger_ns // WAITS))
            read = self._read.steps + self._sampled.steps
            if self.steps in (FIRST_LEDGERS, EARLY_LEDGERS[0]) or read // DECIDED_EVERY != self._decided:
                self._decided = read // DECIDED_EVERY
                said = self._decide()
            self._choose(now_ns, may_rest=may_rest)
        self.spent_ns = self.ledger_ns = self.ledger_thread_ns = 0
        return said

    def _close_before(self, durations_ns: Sequence[int]) -> None:
        first, many = self.steps + 1, len(durations_ns)
        self.steps += many
        self._newest.extend(durations_ns)
        self._read.spent.extend([self.spent_ns] * many)
        self._read.at.extend(range(first, first + many))
        self._read.steps += many
        self._run += [(self._read, duration_ns) for duration_ns in durations_ns[-READ_TOGETHER - 1 :]]
        self._together -= many
        self._wakes_ns += many * self.budget_ns / TASKS

    def _choose(self, now_ns: int, *, may_rest: bool) -> None:
        """Whether the next step is read, and if so, with its owners."""
        self.quiet_left = 0
        self._together -= 1
        if may_rest and self._together <= 0 and self.steps >= READ_FIRST and not self.hurries:
            self.quiet_left = self._random.randint(0, 2 * READ_TOGETHER * (self.read_every - 1))
            self._together = 0 if self.quiet_left else READ_TOGETHER
        self.quiet = self.quiet_left > 0
        self.until_ns = now_ns + READ_AGAIN_NS
        self._wakes_ns += (self.quiet_left + 1) * self.budget_ns / TASKS
        if self.quiet:
            self.ledger = False
        else:
            self._choose_ledger(now_ns)

    def _choose_ledger(self, now_ns: int) -> None:
        due = self.steps >= self._ledger_at or now_ns >= self._ledger_until_ns
        self.ledger = due or self.hurries or self.steps in EARLY_LEDGERS
        if due:
            self._ledger_at = self.steps + self.ledger_every
            self._ledger_until_ns = now_ns + LEDGER_AGAIN_NS
        if self.ledger:
            self.ledger_at_end_only = not self._rest.is_over() or self.at_end_only

    def _judge(self, cost_ns: int) -> None:
        """Pauses full ledgers if their median cost is too high (single ones have cold caches)."""
        self._judged.append(cost_ns)
        if len(self._judged) < (TRIED_AGAIN_BY if self._rest.turns else LEDGERS_JUDGED_BY):
            return
        self._rest.judge(dear=sorted(self._judged)[(len(self._judged) - 1) // 2] > SAMPLED_STEP_NS)
        self._judged.clear()

    def ask_ledger(self) -> None:
        """Samples the step that begins now, at any rate."""
        self.quiet = False
        self.ledger = True

    def sample_soon(self) -> None:
        """The next step that is read is sampled."""
        self._ledger_at = self.steps

    @property
    def knows_hooks(self) -> bool:
        """Whether the hooks of a quiet step were timed often enough for a first figure."""
        return len(self._idle) >= KNOWN_AFTER

    @property
    def _hooks_ns(self) -> int:
        """Of a quiet step. 0: not known."""
        return _median(self._idle) if self.knows_hooks else 0

    @property
    def _due_ns(self) -> float:
        """Of a mean step, for what is due as quiet steps close."""
        return self._looked.per_step(self.steps) * _mean(self._looked.spent)

    def _quiet_ns(self) -> float | None:
        return _median(self._quiet) if len(self._quiet) >= KNOWN_AFTER else None

    def _decide(self) -> str | None:
        step = _mean(self._newest)
        left = step * COST_SHARE - self._hooks_ns - self._due_ns
        self.budget_ns = max(1.0, step * STEP_SHARE_MIN, min(step * STEP_SHARE, left))
        each = self.budget_ns / TASKS
        # before steps without a ledger were read, those with one show that half at least
        read = self._read.cost_ns() or (UNCLOCKED * _mean(self._sampled.spent))
        self.read_every = max(1, ceil(read / each))
        sampled = max(self._sampled.cost_ns(), read)  # its phases are read, too
        self.ledger_every = max(1, ceil(sampled / each))
        self._ledger_at = min(self._ledger_at, self.steps + self.ledger_every)
        self.cost = self._cost_of(step) if step > 0 else None  # the clock may be set back
        rates = self.read_every, self.ledger_every
        if all(
            reported / REPORTED_AGAIN_FACTOR < rate < reported * REPORTED_AGAIN_FACTOR
            for rate, reported in zip(rates, self._reported, strict=True)
        ):
            return None
        self._reported = rates
        return (
            f"to read a step costs {read / 1e6:.2g} ms of {step / 1e6:.3g} ms, so about one step in "
            f"{self.read_every:,} is read, one in {self.ledger_every:,} with its owners"
        )

    def _cost_of(self, step_ns: float) -> Cost:
        """Each part as measured. If one is not, or less closely than our clock limits it, so much at most."""
        kinds = [(kind, kind.per_step(self.steps), _mean(kind.spent)) for kind in (self._read, self._sampled)]
        cost, error, measured = self._due_ns, 0.0, True
        if len(self._idle) >= KNOWN_AFTER:
            cost, error = cost + self._hooks_ns, 2 * _error(self._idle)
        else:  # those of a step that is read are more
            measured = False
            quiet = max(0.0, 1 - sum(often for _, often, _ in kinds))
            cost += quiet * UNCLOCKED_MAX * max(own for _, _, own in kinds)
        for kind, often, own in kinds:
            more, inexact, most = kind.measured_ns, 0.0, UNCLOCKED_MAX * own
            if more is not None and self.read_every > 1:
                more = max(more, int(own) - self._hooks_ns)  # what they cost more than a quiet step, with its hooks
                inexact = 2 * _error(kind.costs) + 2 * more / sqrt(len(kind.at))  # and distances are random
            if more is None or self.read_every == 1 or more + inexact > most:
                measured = measured and not kind.steps
                more, inexact = int(most), 0.0
            cost += often * more
            error += often * inexact
        if measured:
            return Cost(round(1e6 * cost / step_ns), round(1e6 * error / step_ns))
        return Cost(ceil(1e6 * (cost + error) / step_ns), None)


def _median(values: deque[int]) -> int:
    in_order = sorted(values)
    return in_order[len(in_order) // 2]


def _error(values: deque[int]) -> float:
    """Standard error of the median, from the median deviation: robust against single slow steps."""
    middle = _median(values)
    deviations = sorted(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * deviations[len(deviations) // 2] / sqrt(len(values))  # both for normal distributions


def _mean(costs: deque[int]) -> float:
    """Without the largest tenth: a step in which we were preempted says nothing about us."""
    kept = sorted(costs)[: max(1, ceil(len(costs) * 0.9))]
    return sum(kept) / len(kept) if kept else 0.0
