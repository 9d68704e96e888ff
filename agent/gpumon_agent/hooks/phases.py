"""Turns hook events into windows that tile the step. Long: one state machine, whose events belong together.

The state machine does not import torch. Each event closes the open window with the label that the event gives it, reads
every device of the watched models once, and opens the next.

    first forward begins   → load          root's forward returns  → forward, or eval
    a forward begins       → between       the engine returns      → backward
    a user's phase begins  → between       optimizer.step returns  → optimizer

Backward ends when the engine returns. `loss.backward()` holds its initial gradient (512 bytes for a scalar) a little
longer, so the reading includes it.

A forward that records a graph is labelled forward, otherwise eval. A model in eval mode that records a graph may be
fine-tuned, or evaluated without `no_grad`: its window is labelled forward, and when the step closes it lists the
windows that no backward used (`Step.evaluated`).

If the engine begins before any forward in the step, a `forward (inferred)` is closed. A step closes at the end of
`optimizer.step`: at once if one optimizer is known, at the next event if several take turns. After the user's first
mark, steps close only at marks.

The governor lets most short steps be *quiet*: steps are counted, no window closes, and one reading at their end keeps
their highest peak. Where one optimizer closes the steps, they are even *idle*: the hooks do not call this state
machine, but for a batch with new shapes, for which the step is read, or at least predicted.

Short steps that are read are idle, too, where their hooks can take notes (native_hooks). The notes of many steps are
sent together, as they are. If something happens that the hooks do not know, that is done at once, the state machine
goes through the phases of the open step, and the hooks call it for the rest of that step.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from threading import get_ident
from time import monotonic_ns
from typing import Any

import msgspec

from gpumon_agent.allocator import Read, Reader, Reading, allocated_and_peak, reading
from gpumon_agent.governor import Governor
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.noted import ALLOCATED, NBYTES, NOTE_WORDS, SHAPES, T_NS, Noted, Taken, notes_in
from gpumon_agent.quiet_mark import BITS, CODES, IN_BETWEEN, IN_FORWARD, NEVER_NS, TIMES_MAX, Note, QuietMark
from gpumon_agent.wire import (
    ABORTED,
    BACKWARD,
    BETWEEN,
    EVAL,
    FORWARD,
    GRAPH_REPLAY,
    INFERRED,
    LOAD,
    MERGED,
    OPTIMIZER,
    OVERLAPPED,
    PHASES_PER_STEP_MAX,
    RECOMPUTED,
    RECORDED,
    SAMPLED,
    SHAPES_MAX,
    SKIPPED,
    TRAINS,
    Notice,
    Phase,
    QuietEnd,
    QuietPeak,
    Step,
)

Inputs = tuple[int, Sequence[tuple[int, ...]]]
"""bytes, shapes"""

_OVERLAP_WINDOWS = 64  # windows marked after two threads overlapped
_MERGED_NS = 2_000_000_000  # a step that never closes (evaluation only) sends its folded windows this often
_OPTIMIZERS_MAX = 64  # listed per step
_ASK_NS = 400_000_000  # in quiet steps, between two looks whether something waits that the mark does not tell
_LOOK_NS = 2_000_000_000  # between two accounts of quiet steps, if none is read meanwhile
_SOON_NS = 12_500_000  # what is due so soon is done at once: most of what that costs are cold caches
ENDS_EVERY_NS = 400_000_000  # how often allocated bytes are read at the end of a quiet step: in Python 60 to 150 µs
_NOTES_NS = 100_000_000  # longer steps take no notes
_NOTES_TOGETHER_NS = 500_000_000  # of which they are sent at once: a kill loses so much
_JUDGE_NS = 1_000_000_000  # between two outlooks for batches that fit
_LEFT_MAX = 3  # steps in a row whose notes had to be given up: then none are taken any more
_FOLLOWS = {BETWEEN: FORWARD, FORWARD: BACKWARD, BACKWARD: OPTIMIZER, OPTIMIZER: BETWEEN}  # in a step with notes
_ENDS_MAX = 256  # allocated bytes at the end of quiet steps, until the next is read


class _Thread:
    """What one thread currently runs."""

    __slots__ = ("engine", "forwards", "label", "optimizers", "trains", "unsure")

    def __init__(self) -> None:
        self.forwards: list[int] = []  # roots entered and not left, outermost first
        self.label = FORWARD
        self.trains = True  # the running model is in training mode
        self.unsure: _Unsure | None = None  # the running forward
        self.engine = False
        self.optimizers: list[int] = []  # steps entered and not left

    @property
    def busy(self) -> bool:
        return bool(self.forwards or self.engine or self.optimizers)


class _Unsure:
    """A forward in eval mode that records a graph: fine-tuning, or an evaluation without `no_grad`."""

    __slots__ = ("called", "count", "index", "output", "shapes")

    def __init__(self, count: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self.count = count
        self.shapes = shapes
        self.called = ""  # the model, and the line that called it
        self.index: int | None = None  # among the step's forward windows
        self.output: Callable[[], object] | None = None

    def waits(self) -> bool:
        """Whether a backward may still use its graph: its output is still alive."""
        return self.output is not None and self.output() is not None


class Phases:
    """The open window and step. Events arrive in the training thread; nothing here locks."""

    __slots__ = (  # fields used at every boundary are adjacent in memory
        "__dict__", "_counts", "_events", "_flags", "_governor", "_names", "_numbers", "_opened_ns", "_overlap_left",
        "_put", "_reads", "_recorder", "_usual", "_windows", "aborted", "quiet", "quiet_mark", "readers",
        "step",
    )  # fmt: skip

    def __init__(
        self,
        recorder: Recorder,
        governor: Governor,
        *,
        find_readers: Callable[[], tuple[Reader, ...]],
        read_ledger: Callable[[int, str, int, Any, Reading], object],
        step_closes: Callable[[int], object],
        step_closed: Callable[[int, list[tuple[int, Read]]], object],
        opened_ns: int,
        step_begins: Callable[[], object] = int,
        work: Callable[[int], object] = lambda _: None,
        read_end: Callable[[Any], tuple[int, int] | None] = lambda _: None,
        take_ends: Callable[[list[QuietEnd]], object] = lambda _: None,
        carry_out: Callable[[], object] = int,
        asked: Callable[[], bool] = lambda: False,
        on_batch: Callable[..., tuple[bool, bool] | None] | None = None,
        on_noted: Callable[[int, Sequence[tuple[int, ...]]], object] = lambda *_: None,
        notes_of: Callable[[Any], Any] = lambda _: None,
        make_mark: Callable[[], QuietMark] = QuietMark,
        flush: Callable[[], object] = int,
        tell: Callable[[], object] = int,
    ) -> None:
        self.step = 0
        self.request_waits = False  # a viewer's request waits for the next boundary
        self.readers: tuple[Reader, ...] | None = None  # None: not searched yet
        self.quiet = False  # the open step is not read
        self._fitting_at = 0  # bytes allocated when that was known
        self.works = False  # something is done in slices, as steps close
        self.time_idle: Callable[[], tuple[int, int] | None] | None = None  # IdleHooks.timed, until that is known
        self._forwards = 0  # in the last step that was read
        self.quiet_mark = make_mark()
        self._quiet_steps = 0  # since the last step that was read
        self.quiet_peaks: tuple[QuietPeak, ...] = ()  # of those steps, once the step after them has begun
        self._ends: list[QuietEnd] = []
        self._ends_taken = 0  # of them
        self.ends_every_ns = ENDS_EVERY_NS  # 0: none is read
        self._noting = False  # the open step is read, and its hooks take notes
        self._notes: deque[Note] = deque()  # taken, and not known yet
        self._catches_up = False
        self._plain = False  # the last step that was read had nothing that hooks cannot note
        self._judge_due_ns = 0
        self._left = 0  # steps in a row in which something happened that they cannot
        self._whole_only = False  # every event matters: named phases, optimizer steps inside the engine
        self._until_ns = self._look_due_ns = self._ask_due_ns = 0
        self._quiet_ns = 0  # spent as quiet steps closed, since the last account of them
        self._recorder = recorder
        self._append = recorder.append
        self._numbers, self._put = recorder.numbers, recorder.put
        self._governor = governor
        self._find_readers = find_readers
        self._read_ledger = read_ledger
        self._step_closes = step_closes  # called for a sampled step, before its Step is recorded
        self._step_closed = step_closed  # called for each step, with the readings since its last batch
        self._step_begins = step_begins  # called as a step begins to be read after quiet ones
        self._read_end = read_end  # (allocated, live blocks) of a device, without resetting its peaks
        self._take_ends = take_ends
        self._work = work  # called as a quiet step closes, while `works`
        self._carry_out = carry_out
        self._asked = asked  # whether `tell` would find something to send or to hear
        self._flush = flush  # sends the recorded events, at the end of a step
        self._tell = tell  # the same within a step, where short phases are sent together
        self._on_batch = on_batch  # Outlooks.batch
        self._on_noted = on_noted  # Outlooks.noted
        self._notes_of = notes_of  # Devices.noted
        self._owner = get_ident()
        self._thread = _Thread()
        self._threads = {self._owner: self._thread}
        self._overlap_left = 0
        self._opened_ns = self._step_opened_ns = opened_ns
        self._loaded = False
        self._names: list[str] = []  # the user's phases, outermost first
        self._optimizers: dict[int, tuple[int, weakref.ref[Any]]] = {}  # each with a unique number
        self._pending = False  # optimizers take turns: the step closes at the next event
        self._due = False  # an optimizer stepped inside the engine: the step closes when the engine ends
        self.marked = False  # steps close only at the user's marks
        self._ended_ns = 0
        self.aborted: str | None = None  # the phase that an exception ended, until the next window closes
        # of the open step
        self._counts: dict[str, int] = {}
        self._merged: dict[tuple[str, int], Phase] = {}
        self._stepped: list[int] = []
        self._turn: set[int] = set()  # their numbers: an optimizer may be freed before the step closes
        self._input_shapes: list[tuple[int, ...]] = []
        self._unsure: list[_Unsure] = []  # not used by a backward so far
        self._evaluated: list[int] = []  # indices of forward windows that no backward uses
        self._sure = False  # the newest forward is not in `_unsure`
        self._tunes = False  # eval-mode forwards with a graph count as training: a backward used one
        self._infers = False  # a backward needed a forward that was not seen
        self._seen = False  # this run has had a forward with a graph: then none is inferred
        recorder.now = (0, LOAD, opened_ns)
        self._begin_step()

    def _begin_step(self) -> None:
        self._thread.engine = False  # only True here if a signal handler raised as the engine began or ended
        self._usual = False  # set by the step's first forward: windows close with only a reading
        self._counts.clear()
        self._windows = 0
        self._events = 0
        self._flagged = False  # a window has flags
        self._merged_since = 0
        self._flags = 0
        self._observed = False  # a forward with a graph was seen
        self._stepped.clear()
        self._turn.clear()
        self._unsure.clear()
        self._evaluated.clear()
        self._evaluated_by = ""
        self._skips = 0
        self._input_bytes = 0
        self._input_shapes.clear()
        self._inputs_seen = False
        self._batches = 0
        self._reads: list[tuple[int, Read]] = []  # since the last batch
        self._tops: dict[int, int] = {}  # device → highest peak of this step before the last batch

    # ---------------------------------------------------------------------------------------------------- what happens

    def forward_begins(
        self, root: int, *, gradients: bool, trains: bool, inputs: Callable[[], Inputs], called: Callable[[], str] = str
    ) -> None:
        """`gradients`: a graph is recorded. `trains`: the model is in training mode. `called`: the model and the line
        that called it; only used for a step's first possible evaluation."""
        if self._noting:
            self.leave_notes()
        thread = self._thread if get_ident() == self._owner else self._here()
        forwards = thread.forwards
        if forwards:
            if root not in forwards:  # a watched model inside another
                forwards.append(root)
                return
            del forwards[forwards.index(root) :]  # an interrupt ended it, which no hook sees
            if forwards:
                forwards.append(root)
                return
            self._close(thread.label, BETWEEN, ABORTED)
        if self._pending:
            self._close_step()
        thread.label = FORWARD if gradients else EVAL
        thread.trains = trains
        thread.unsure = None
        forwards.append(root)
        if self.quiet and not self._wakes(gradients, trains, inputs):
            if self.quiet_mark.idle:  # then nobody tells that it ends
                forwards.clear()
            return
        count, shapes = inputs()  # before the window closes: its ledger includes them
        if trains and gradients:
            self._takes(count, shapes)
        elif gradients:
            thread.unsure = _Unsure(count, shapes)
            if not self._unsure and not self._tunes:
                thread.unsure.called = called()
        if not self._names:
            self._usual = self._is_usual()
            self._close(BETWEEN if self._loaded else LOAD, thread.label, tells=False)
            if gradients and (trains or self._tunes) and self._on_batch is not None:
                self._judge(self._batches, shapes, count, self._allocated_now())
                self._batches += 1
            self._closed()
        self._loaded = True

    def _judge(
        self, index: int, shapes: Sequence[tuple[int, ...]], count: int, now: list[tuple[int, int | None, int]]
    ) -> bool:
        """Predicts a batch. Whether others like it need no outlook."""
        assert self._on_batch is not None
        warns, settled = self._on_batch(self.step, index, shapes, count, now) or (False, False)
        if warns:
            self._flush()
        if settled:
            self.quiet_mark.fit(shapes)
        return settled

    def _wakes(self, gradients: bool, trains: bool, inputs: Callable[[], Inputs]) -> bool:
        """A forward begins in a quiet step. True: it is new in some way, so the step is read; nothing of it was missed.

        If that would cost too much, or a part of the step has run, a new batch is only predicted.
        """
        mark = self.quiet_mark
        index = mark.passed
        mark.passed = index + 1
        self._mark(self._thread.label)
        count, shapes = inputs() if gradients else (0, ())
        if mark.fits(shapes) if gradients else mark.evaluates:
            return False
        if not index and self._governor.may_wake():
            self._wake()
            return True
        if gradients and (trains or self._tunes) and self._on_batch is not None:
            self._count_quiet()
            self._judge(index, shapes, count, [(device, None, 0) for _, device, _ in self.readers or ()])
            self._ask_due_ns = min(self._ask_due_ns, monotonic_ns() + _ASK_NS)
            self._set_due()
        return False

    def _takes(self, count: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """Adds an input of the step."""
        self._inputs_seen = True
        self._input_bytes += count
        if len(self._input_shapes) < SHAPES_MAX:
            self._input_shapes += shapes[: SHAPES_MAX - len(self._input_shapes)]

    def _used(self) -> None:
        """A backward begins: it uses the newest forward's graph, and earlier ones whose output is still alive."""
        newest = None if self._sure else self._unsure[-1]
        for each in self._unsure:
            if each is newest or each.waits():
                self._takes(each.count, each.shapes)
                self._tunes = True
            elif each.index is not None:
                self._evaluated.append(each.index)
                self._evaluated_by = self._evaluated_by or each.called
        self._unsure.clear()

    def _unused(self) -> None:
        """The step closes, and no backward used the waiting forwards."""
        self._tunes = self._tunes and self._inputs_seen
        for each in self._unsure:
            if each.index is not None:
                self._evaluated.append(each.index)
                self._evaluated_by = self._evaluated_by or each.called

    def _allocated_now(self) -> list[tuple[int, int | None, int]]:
        """(device, allocated now, the step's highest peak so far)"""
        tops, allocated_by_device = self._tops, {}
        for device, read in self._reads:
            allocated, peak = allocated_and_peak(read)
            allocated_by_device[device] = allocated
            if peak is not None and peak > tops.get(device, 0):
                tops[device] = peak
        self._reads = []
        return [(device, allocated, tops.get(device, 0)) for device, allocated in allocated_by_device.items()]

    def forward_ends(
        self,
        root: int,
        *,
        gradients: bool,
        aborted: bool,
        output: Callable[[], object] | None = None,
        look: Callable[[], object] | None = None,
    ) -> None:
        """`look` reads the graph before the window closes. `output`: returns an output with a grad_fn while alive."""
        if self._noting:
            self.leave_notes()
        thread = self._thread if get_ident() == self._owner else self._here()
        forwards = thread.forwards
        if root not in forwards:
            return
        del forwards[forwards.index(root) :]
        if forwards:
            return
        if aborted:
            self._batches = max(0, self._batches - 1)  # an aborted batch does not count
        elif look is not None:
            look()
        if gradients:
            self._observed = self._seen = True
        label, flags, unsure = thread.label, ABORTED if aborted else 0, thread.unsure
        if label == FORWARD:
            self._sure = unsure is None
        elif thread.trains and not self._names and EVAL not in self._counts:
            flags |= TRAINS
        if unsure is not None:
            thread.unsure = None
            if output is not None:
                unsure.output = output
                flags |= RECORDED
            if self._windows < PHASES_PER_STEP_MAX:
                unsure.index = None if self._names else self._counts.get(label, 0)
            elif not self._tunes:
                label = EVAL  # folded windows of one label are merged
            if not aborted:
                self._unsure.append(unsure)
        if not self._names:
            self._close(label, BACKWARD if gradients else BETWEEN, flags)

    def engine_begins(
        self, look: Callable[[], object] | None = None, needed: Callable[[], bool] = lambda: True
    ) -> bool:
        """False: this call is part of a forward (a compiler traces) or of another engine call.

        `look` reads the graph. `needed`: whether it may belong to a watched model; called only while no forward with a
        graph was seen and none was inferred.
        """
        if self._noting:
            self.leave_notes()
        thread = self._thread if get_ident() == self._owner else self._here()
        if thread.forwards or thread.engine:
            return False
        if self._pending:
            self._close_step()
        if look is not None:
            look()
        if self._unsure:
            self._used()
        if not self._observed and not self._names:
            self._infers = not self._seen and (self._infers or needed())
            if self._infers:
                self._close(FORWARD, BACKWARD, INFERRED)
            else:
                self._close(BETWEEN if self._loaded else LOAD, BACKWARD)
            self._loaded = True
        thread.engine = True  # last: if a signal handler raises before, no `engine_ends` follows
        return True

    def engine_ends(self, *, aborted: bool) -> None:
        if self._noting:
            self.leave_notes()
        thread = self._thread if get_ident() == self._owner else self._here()
        thread.engine = False
        flags = ABORTED if aborted else 0
        if aborted:
            self._batches = max(0, self._batches - 1)
        if not self._names:
            self._close(BACKWARD, OPTIMIZER, flags)
        if self._due:
            self._due = False
            if not self.marked:
                self._close_step()

    def recomputes(self) -> None:
        """A forward is recomputed inside the engine. Also called from the engine's own threads."""
        if self._noting:
            self.leave_notes()
        if self._thread.engine:
            self._flags |= RECOMPUTED
            self._usual = False

    def know(self, optimizers: Iterable[Any]) -> None:
        """Registers optimizers. Others are registered at their first step."""
        known = self._optimizers
        for optimizer in optimizers:
            key = id(optimizer)
            if key not in known:
                taken = {number for number, _ in known.values()}
                number = next(number for number in count() if number not in taken)
                known[key] = number, weakref.ref(optimizer, functools.partial(_forget, known, key))

    def optimizer_begins(self, optimizer: Any, *, in_engine: bool = False) -> None:
        thread = self._stepping(in_engine)
        key = id(optimizer)
        thread.optimizers.append(key)
        if len(thread.optimizers) > 1:
            return
        if key not in self._optimizers:
            self.know((optimizer,))
        if self._pending and key in self._stepped:
            self._close_step()

    def optimizer_ends(self, optimizer: Any, *, in_engine: bool) -> None:
        thread = self._stepping(in_engine)
        optimizers = thread.optimizers
        if not optimizers:
            return
        optimizers.pop()
        if optimizers:
            return
        if in_engine:
            self._due = self._whole_only = True
            self._ended_ns = monotonic_ns()
        else:
            self._optimizer_done(id(optimizer), 0)

    def optimizer_skipped(self, optimizer: Any) -> None:
        """The scaler found infinities and did not call `step`."""
        if self._noting:
            self.leave_notes()
        self._optimizer_done(id(optimizer), SKIPPED)

    def optimizers_left(self, depth: int, *, in_engine: bool = False) -> None:
        """Only `depth` optimizer steps still run in this thread: exceptions ended the others."""
        optimizers = self._stepping(in_engine).optimizers
        if len(optimizers) > depth:
            del optimizers[depth:]
            if not depth and not self._names:
                self._close(OPTIMIZER, BETWEEN, ABORTED)

    @property
    def sampled(self) -> bool:
        """Whether the ledger is read in the open step."""
        return self._governor.ledger

    def in_optimizer(self, *, in_engine: bool = False) -> bool:
        return bool(self._stepping(in_engine).optimizers)

    def _stepping(self, in_engine: bool) -> _Thread:
        """The thread that an optimizer step belongs to. The engine's threads act for the thread that waits for them."""
        if self._noting:
            self.leave_notes()
        waits = in_engine and self._thread.engine
        return self._thread if waits or get_ident() == self._owner else self._here()

    def replay_begins(self) -> bool:
        """A CUDA graph is about to run. False: it is part of a running phase."""
        if self._noting:
            self.leave_notes()
        if self._here().busy:
            return False
        if self._pending:
            self._close_step()
        if not self._names:
            self._close(BETWEEN if self._loaded else LOAD, GRAPH_REPLAY)
        return True

    def replay_ends(self, *, steps: bool) -> None:
        """`steps`: the graph contains an optimizer step, so each replay closes a step."""
        if self._noting:
            self.leave_notes()
        name = self._names[-1] if self._names else None
        if steps or name is None:
            self._close(name or GRAPH_REPLAY, name or BETWEEN, INFERRED)
        if steps and not self.marked:
            self._ended_ns = self._opened_ns
            self._close_step()

    def user_begins(self, name: str) -> None:
        if self._noting:
            self.leave_notes()
        self._whole_only = True
        if self.quiet:
            self._wake()
        if self._pending:
            self._close_step()
        self._close(self._names[-1] if self._names else BETWEEN if self._loaded else LOAD, name)
        self._names.append(name)

    def user_ends(self, *, aborted: bool) -> None:
        if self._noting:
            self.leave_notes()
        if self._names:
            name = self._names.pop()
            self._close(name, self._names[-1] if self._names else BETWEEN, ABORTED if aborted else 0)

    def mark(self) -> None:
        """The user's code marks the end of a step; from then on steps end only at marks.

        If no optimizer stepped, the window since the last backward is labelled optimizer: a manual update.
        """
        if self._noting:
            self.leave_notes()
        first, self.marked = not self.marked, True
        if self._pending:
            self._close_step()
            return
        if first and not self._windows:
            return  # an optimizer has just closed the step
        if self._names:
            self._close(self._names[-1], self._names[-1])
        elif not self._stepped and self._counts.get(BACKWARD):
            self._close(OPTIMIZER, BETWEEN)
        elif not self._stepped:
            self._close(BETWEEN if self._loaded else LOAD, BETWEEN)
        self._ended_ns = self._opened_ns
        self._close_step()

    @property
    def optimizers(self) -> list[Any]:
        return [optimizer for _, reference in self._optimizers.values() if (optimizer := reference()) is not None]

    def finish(self) -> None:
        if self._noting:
            self.leave_notes()
        if self._pending:
            self._close_step()
        if self._quiet_steps or self.quiet_mark.times:
            self._tell_quiet()

    def where(self) -> tuple[int, str, int]:
        """The running step and phase, and since when (monotonic ns). Any thread may call it."""
        marked = self.quiet_mark.read()
        return self._recorder.now if marked is None else (*marked, self._step_opened_ns)

    # ------------------------------------------------------------------------------------------------ windows and steps

    def _optimizer_done(self, key: int, flags: int) -> None:
        self._close(self._names[-1] if self._names else OPTIMIZER, self._names[-1] if self._names else BETWEEN, flags)
        self._stepped.append(key)
        known = self._optimizers.get(key)
        if known is not None:
            self._turn.add(known[0])
        self._skips += bool(flags)
        self._ended_ns = self._opened_ns
        if self.marked:
            return
        # the first step waits too: whether another optimizer takes turns shows only afterwards
        if len(self._optimizers) > 1 or not self.step:
            self._pending = True
        else:
            self._close_step()

    def _here(self) -> _Thread:
        """The calling thread's state. Frequent callers inline the check for the last thread."""
        ident = get_ident()
        return self._thread if ident == self._owner else self._another(ident)

    def _another(self, ident: int) -> _Thread:
        thread = self._threads.get(ident)
        if thread is None:
            self._threads = {i: t for i, t in self._threads.items() if t.busy}  # threads come and go
            thread = self._threads[ident] = _Thread()
        if self._thread.busy:
            self._overlap_left = _OVERLAP_WINDOWS
            self._usual = False
        self._threads[self._owner] = self._thread
        self._owner, self._thread = ident, thread
        return thread

    def _is_usual(self) -> bool:
        if self._governor.ledger or self.readers is None:
            return False
        return not (self._flags or self._overlap_left or self.aborted)

    def _close(self, label: str, following: str, flags: int = 0, *, tells: bool = True) -> None:
        """With a short path for the usual case: training evicts our data from the caches, so each object accessed costs
        1 µs."""
        now = monotonic_ns()
        if self.quiet:
            self._opened_ns = now
            self._mark(following)
            return
        if self._usual and not flags:
            reads = [(device, boundary(device)) for boundary, device, _ in self.readers]  # type: ignore[union-attr]
            self._window(label, following, now, reads)
        else:
            self._close_any(label, following, flags, now)
        if tells:
            self._closed()

    def _closed(self) -> None:
        self._tell()
        self._answer()

    def _answer(self) -> None:
        if self.request_waits:
            self.request_waits = False
            self._carry_out()

    def _window(self, label: str, following: str, now: int, reads: Iterable[tuple[int, Read]]) -> None:
        """One without flags and owners closes. `reads`: by device."""
        step, duration = self.step, now - self._opened_ns
        index, fold = self._number(label)
        for device, read in reads:
            if fold:
                self._fold(Phase(step, label, index, device, now, duration, *reading(read)))
                continue
            self._put((next(self._numbers), step, label, index, device, now, duration, read))
            self._reads.append((device, read))
            self._events += 1
        self._opened_ns = now
        self._recorder.now = (step, following, now)

    def _number(self, label: str) -> tuple[int, bool]:
        """Of the window that closes: its index in the step among those with this label, and whether it is folded."""
        index = self._counts.get(label, 0)
        self._counts[label] = index + 1
        fold = self._windows >= PHASES_PER_STEP_MAX
        self._windows += not fold
        return index, fold

    def _close_any(self, label: str, following: str, flags: int, now: int) -> None:
        governor = self._governor
        step = self.step
        index, fold = self._number(label)
        if self._flags:
            flags |= self._flags
            self._flags = 0
        if self._overlap_left:
            self._overlap_left -= 1
            flags |= OVERLAPPED
        self._flagged = self._flagged or flags != 0
        ledger = governor.ledger and not fold and (label == OPTIMIZER or not governor.ledger_at_end_only)
        if ledger and not governor.hurries:
            flags |= SAMPLED
        ledger_ns = 0
        duration = now - self._opened_ns
        for boundary, device, where in self.readers or self._look_for_readers():
            read = boundary(device)
            if flags:
                read = _flagged(reading(read), label, flags)
            if fold:
                self._fold(Phase(step, label, index, device, now, duration, *reading(read)))
                continue
            self._put((next(self._numbers), step, label, index, device, now, duration, read))
            self._reads.append((device, read))
            self._events += 1
            if ledger:
                began = monotonic_ns()
                self._read_ledger(step, label, index, where, reading(read))
                ledger_ns += monotonic_ns() - began
        self._opened_ns = now
        self.aborted = label if flags & ABORTED else None
        if self.aborted is not None:
            self._usual = False
        self._recorder.now = (step, following, now)
        if ledger_ns:
            governor.ledger_ns += ledger_ns

    def _look_for_readers(self) -> tuple[Reader, ...]:
        self.readers = readers = self._find_readers()
        return readers

    def _fold(self, phase: Phase) -> None:
        """Beyond `PHASES_PER_STEP_MAX`, merges windows per label and device: largest peaks, index of the last."""
        key = phase.phase, phase.device
        before = self._merged.get(key)
        if before is None:
            self._merged[key] = msgspec.structs.replace(phase, flags=phase.flags | MERGED)
            self._merged_since = self._merged_since or phase.t_ns
        else:
            self._merged[key] = msgspec.structs.replace(
                phase,
                duration_ns=before.duration_ns + phase.duration_ns,
                allocated_peak=_largest((before.allocated_peak, phase.allocated_peak)),
                reserved_peak=_largest((before.reserved_peak, phase.reserved_peak)),
                flags=before.flags | phase.flags,
            )
        if phase.t_ns - self._merged_since > _MERGED_NS:
            self._unfold()

    def _unfold(self) -> None:
        for phase in self._merged.values():
            self._append(phase)
            self._events += 1
        self._merged.clear()
        self._merged_since = 0

    def _close_step(self) -> None:
        if self.quiet:
            self._close_quietly()
            return
        phase = self._end_step()
        if self._governor.reads_on:
            self._tell()
        else:
            self._flush()
        self._go_on(phase)

    def _go_on(self, phase: str) -> None:
        """A step begins: it is quiet, or its hooks take notes, or they call us."""
        mark = self.quiet_mark
        self._noting = mark.notes = mark.idle = False
        if self._governor.quiet:
            self._rest(phase)
            return
        if self._may_note():
            self._note(phase)
        if not self._noting:
            mark.end()

    def _end_step(self, *, newest: bool = True) -> str:
        """All but sending it. `newest`: the next step has not been read yet. Returns the phase that is open."""
        self._pending = False
        if self._merged:
            self._unfold()
        ended = self._ended_ns
        duration = ended - self._step_opened_ns
        step = self.step
        if self._governor.ledger:
            self._step_closes(step)
        if self._unsure:
            self._unused()
        self._append(
            Step(
                step,
                ended,
                duration,
                self._input_bytes if self._inputs_seen else None,
                tuple(self._input_shapes),
                bool(self._skips) and self._skips == len(self._stepped),
                self._events,
                tuple(self._evaluated),
                self._evaluated_by,
                tuple(sorted(self._turn)[:_OPTIMIZERS_MAX]),
                self._quiet_steps,
                self.quiet_peaks,
                tuple(self._ends),
            )
        )
        self._forget_quiet()
        self.quiet_mark.evaluates = EVAL in self._counts
        self._forwards = self._counts.get(FORWARD, 0) + self._counts.get(EVAL, 0)
        known = FORWARD in self._counts and self._counts.keys() <= _FOLLOWS.keys()
        self._plain = known and not self._flagged and duration < _NOTES_NS
        said = self._governor.step_closed(duration, ended, may_rest=self._may_rest())
        if said is not None:
            self._append(Notice(ended, said, step))
        if not newest:
            self._governor.reads()
        self._step_opened_ns = ended
        self.step = step + 1
        reads = self._reads
        self._begin_step()
        _, phase, since = self._recorder.now
        self._recorder.now = (step + 1, phase, since)
        if newest:  # of steps that were noted together, one is looked at
            self._step_closed(step, reads)
        return phase

    # --------------------------------------------------------------------------------------------------- noted steps

    def _may_note(self) -> bool:
        return (
            self._plain
            and self._left < _LEFT_MAX
            and self._governor.reads_on
            and not (self._governor.ledger or self.works or self.request_waits)
            and self._may_rest()
            and self._is_idle()
            and self.quiet_mark.can_note()
        )

    def _is_idle(self) -> bool:
        """Whether one optimizer closes the steps."""
        for _, reference in self._optimizers.values():
            self.quiet_mark.only = id(reference())
        return len(self._optimizers) == 1 and not self.marked and not self._thread.busy

    def _note(self, phase: str) -> None:
        """The hooks take notes, in one or more steps."""
        mark, governor = self.quiet_mark, self._governor
        (_, device, where), *others = self.readers or ((None, 0, None),)
        peaks = None if others else self._notes_of(where)
        if peaks is None:
            return
        mark.left = governor.reads_ahead
        mark.due_ns = min(self._ended_ns + _NOTES_TOGETHER_NS, governor.ledger_until_ns)
        mark.passed = 0
        mark.begin(self.step, phase)
        mark.begin_notes(device, peaks)
        self._noting = mark.idle = True

    def catch_up(self) -> None:
        """Goes through the phases that were noted so far."""
        if self._noting and self.quiet_mark.noted and get_ident() == self._owner:
            self._go_through()

    def _go_through(self) -> None:
        if self._catches_up:
            return
        notes, began = self._notes, monotonic_ns()
        self._catches_up = True
        try:
            taken: Taken = self.quiet_mark.take_notes()
            words = taken.words
            if taken.steps and not (notes or self._counts):
                words = self._close_noted(taken, began)
                began = monotonic_ns()
            notes.extend(notes_in(words, taken.shapes))
            device = self.readers[0][1] if self.readers else 0
            while notes:
                phase, t_ns, read, inputs = notes.popleft()
                if phase == BETWEEN:
                    self._note_batch(t_ns, device, read[0], *inputs)
                elif phase == FORWARD:
                    self._observed = self._seen = self._sure = True
                self._window(phase, _FOLLOWS[phase], t_ns, [(device, read)])
                if phase == OPTIMIZER:
                    self._stepped.append(self.quiet_mark.only)
                    self._turn.update(number for number, _ in self._optimizers.values())
                    self._ended_ns = t_ns
                    self._governor.spent_ns, began = monotonic_ns() - began, monotonic_ns()
                    self._end_step(newest=not notes)
                    self._fits_at(read[0])
        finally:
            self._catches_up = False

    def _close_noted(self, taken: Taken, began: int) -> bytes:
        """Whole steps, with the same phases in each, as one event. Returns the notes that are left."""
        (_, device, _), *_ = self.readers or ((None, 0, None),)
        mark, governor = self.quiet_mark, self._governor
        each = NOTE_WORDS * taken.phases
        whole, left = taken.words[: 8 * each * taken.steps], taken.words[8 * each * taken.steps :]
        words = memoryview(whole).cast("q")
        *_, last = closed = words[each - NOTE_WORDS + T_NS :: each].tolist()
        *before, duration = [b - a for a, b in pairwise((self._step_opened_ns, *closed))]
        ends = words[each - NOTE_WORDS + ALLOCATED :: each].tolist()
        steps = words[: None if not taken.alike else each]
        shapes = {found: taken.shapes[found] for found in {*steps[SHAPES::NOTE_WORDS]} & taken.shapes.keys()}
        if self._on_batch is not None and words[T_NS] >= self._judge_due_ns:
            known = shapes.get(words[SHAPES], ())
            self._judge_noted(words[T_NS], device, words[ALLOCATED], words[NBYTES], known)
        self._recorder.append_noted(
            Noted(
                self.step,
                self._step_opened_ns,
                self._opened_ns,
                taken.phases,
                device,
                tuple(number for number, _ in self._optimizers.values()),
                whole,
                shapes,
                taken.alike,
                self._quiet_steps,
                self.quiet_peaks,
                tuple(self._ends),
            )
        )
        self._forget_quiet()
        self.step += taken.steps
        self._opened_ns = self._step_opened_ns = self._ended_ns = last
        self._recorder.now = (self.step, BETWEEN, last)
        self._reads = []
        self._seen = self._sure = True
        mark.evaluates = False
        self._forwards = words[:each:NOTE_WORDS].tolist().count(IN_FORWARD)
        self._plain = duration < _NOTES_NS
        governor.spent_ns = (monotonic_ns() - began) // taken.steps
        said = governor.step_closed(duration, last, may_rest=self._may_rest(), before=before)
        if said is not None:
            self._append(Notice(last, said, self.step - 1))
        for allocated in ends[-1:] if taken.alike else ends:
            self._fits_at(allocated)
        if left:
            governor.reads()
        else:  # one of them is looked at
            ((_, _, read, _),) = notes_in(whole[-8 * NOTE_WORDS :], {})
            self._step_closed(self.step - 1, [(device, read)])
        return left

    def _note_batch(
        self, now: int, device: int, allocated: int, nbytes: int, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """A forward began. Its batch fits, as others like it did; whether they still do is asked once a second."""
        self._takes(nbytes, shapes)
        if self._batches or now < self._judge_due_ns or self._on_batch is None:
            self._on_noted(self.step, shapes)
        else:
            self._judge_noted(now, device, allocated, nbytes, shapes)
        self._batches += 1

    def _judge_noted(
        self, now: int, device: int, allocated: int, nbytes: int, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._judge_due_ns = now + _JUDGE_NS
        if not self._judge(0, shapes, nbytes, [(device, allocated, 0)]):
            self.quiet_mark.forget_shapes()

    def _do_noted(self) -> None:
        """A noted step has closed, and it is time to send what was noted."""
        self._go_through()
        began = monotonic_ns()
        self._left = 0
        self._flush()
        self._answer()
        self._governor.spent_in_closing(monotonic_ns() - began)
        if self._noting:
            self._go_on(self._recorder.now[1])

    def leave_notes(self) -> None:
        """Something happens that the hooks do not know: they call us for the rest of the step."""
        mark, thread = self.quiet_mark, self._thread
        self._noting = mark.notes = mark.idle = False
        self._go_through()
        self.step = mark.step >> BITS
        self._left += mark.passed > 0
        if mark.root:
            thread.forwards[:] = [mark.root]
            thread.label, thread.trains, thread.unsure = FORWARD, True, None
        thread.engine = mark.engine
        if mark.stepping:
            thread.optimizers[:] = [mark.only]
        mark.passed = 0
        mark.end()
        self._usual = self._is_usual()

    def forget_notes(self) -> None:
        """In a forked child."""
        self._noting = self.quiet_mark.notes = self.quiet_mark.idle = False

    # --------------------------------------------------------------------------------------------------- quiet steps

    def _may_rest(self) -> bool:
        return not (
            self._whole_only or self._names or self._overlap_left or self._flags or self.aborted or self.readers is None
        )

    def _rest(self, phase: str) -> None:
        mark = self.quiet_mark
        mark.idle = self._is_idle()
        self.quiet = True
        mark.left, self._until_ns = self._governor.quiet_left, self._governor.until_ns
        mark.read_ends(self.ends_every_ns, self._ends_device())
        self._look_due_ns = self._ended_ns + _LOOK_NS
        mark.begin(self.step, phase)
        self._set_due()

    def _ends_device(self) -> int | None:
        """The device whose ends compiled hooks can read: the only one, if they can take notes of it."""
        (_, device, where), *others = self.readers or ((None, 0, None),)
        return None if others or self._notes_of(where) is None else device

    def read_soon(self) -> None:
        """The next step is read."""
        self.quiet_mark.left = 0

    def stir(self) -> None:
        """Something happens that an idle step does not know. A quiet one stays quiet."""
        if self._noting:
            self.leave_notes()
        self.quiet_mark.idle = False

    def _mark(self, phase: str) -> None:
        self.quiet_mark.enter(CODES.get(phase, IN_BETWEEN))

    def _close_quietly(self) -> None:
        mark = self.quiet_mark
        if not mark.idle:
            self._pending = False
            self._skips = 0
            self._stepped.clear()
            self._turn.clear()
        if mark.pass_step(self._ended_ns):
            self.do_quietly()

    def do_quietly(self) -> None:
        """What is due as a quiet step closes."""
        mark = self.quiet_mark
        if mark.notes:
            self._do_noted()
            return
        began, now = monotonic_ns(), mark.closed_ns
        wakes = mark.left <= 0 or now >= self._until_ns
        mark.hear()
        looks = self._asked() or (
            not wakes and (now + _SOON_NS >= self._look_due_ns or mark.uncounted > TIMES_MAX // 2)
        )
        if wakes or looks or self.works:
            self._count_quiet()
        self._end_quietly((mark.step >> BITS) - 1, now)
        if wakes:
            self._governor.wake(now)
            self._wake()
            self._opened_ns = now
            self._step_begins()
        if self.works:
            self._work(self.step)
        if looks:
            self._look_due_ns = now + _LOOK_NS
            self._tell_ends()
            self._flush()
            self._answer()
        if wakes and self._may_note():
            self._ended_ns = now
            self._note(BETWEEN)
        elif not wakes:
            times = mark.idle and self.time_idle is not None
            waits = (looks or self.works) and self._asked()
            if waits or not mark.hears or (times and not self._governor.knows_hooks):
                self._ask_due_ns = now + _ASK_NS
            else:
                self._ask_due_ns = now + _LOOK_NS if times else NEVER_NS
            self._set_due()
            self._quiet_ns += monotonic_ns() - began
            if times:
                self._time_idle()
        if wakes or looks:
            self._governor.looked(self._quiet_ns)
            self._quiet_ns = 0

    def _time_idle(self) -> None:
        """Here the caches are as cold as they are for the hooks of any quiet step."""
        assert self.time_idle is not None
        timed = self.time_idle()
        if timed is not None and self._governor.idled(timed[0] * self._forwards + timed[1]):
            self.time_idle = None

    def _set_due(self) -> None:
        self.quiet_mark.due_ns = 0 if self.works else min(self._look_due_ns, self._ask_due_ns, self._until_ns)

    def _count_quiet(self) -> None:
        """Counts the quiet steps that have closed since the last call."""
        times = self.quiet_mark.times
        if not times:
            return
        steps = (self.quiet_mark.step - (self.step << BITS)) >> BITS
        self._quiet_steps += steps
        self.step += steps
        self._governor.quiet_closed([b - a for a, b in pairwise((self._step_opened_ns, *times))])
        self._step_opened_ns = times[-1]
        self._recorder.now = (self.step, BETWEEN, times[-1])
        self.quiet_mark.forget_times()

    def _end_quietly(self, step: int, ended: int) -> None:
        """What is allocated as quiet steps end: the series that a leak is found in. Reads it, unless the hooks do."""
        mark = self.quiet_mark
        self._take_hooks_ends()
        if ended + (0 if mark.reads_ends else _SOON_NS) >= mark.ends_due_ns:
            mark.ends_due_ns = ended + mark.ends_every_ns
            reads = [(device, self._read_end(where)) for _, device, where in self.readers or ()]
            ends = [QuietEnd(step, device, *read) for device, read in reads if read is not None]
            self._ends += ends
            if not ends:
                mark.ends_due_ns = NEVER_NS
        if len(self._ends) >= _ENDS_MAX:
            self._tell_ends()
            every = {end.step for end in self._ends}
            kept = set(sorted(every)[1::2])
            self._ends = [end for end in self._ends if end.step in kept]
            self._ends_taken = len(self._ends)
            mark.ends_every_ns *= 2

    def _take_hooks_ends(self) -> None:
        self._ends += [QuietEnd(*end) for end in self.quiet_mark.take_ends()]

    def _tell_ends(self) -> None:
        if len(self._ends) > self._ends_taken:
            new, self._ends_taken = self._ends[self._ends_taken :], len(self._ends)
            self._take_ends(new)

    def _forget_quiet(self) -> None:
        self._quiet_steps, self.quiet_peaks, self._ends, self._ends_taken = 0, (), [], 0

    def _wake(self) -> None:
        """The step is read from here on. One reading ends the quiet ones, so that none of their peaks is lost."""
        now = monotonic_ns()
        self._count_quiet()
        self.quiet = self.quiet_mark.idle = self._governor.quiet = False
        self._opened_ns = now
        self._recorder.now = (self.step, BETWEEN, now)
        self.quiet_mark.end()
        self._take_hooks_ends()
        self._tell_ends()
        self._reads, peaks, allocated = [], [], 0
        for boundary, device, _ in self.readers or self._look_for_readers():
            read = boundary(device)
            self._reads.append((device, read))
            figures = reading(read)
            peaks.append(QuietPeak(device, figures.allocated_peak, figures.reserved_peak))
            allocated += figures.allocated or 0
        self.quiet_peaks = tuple(peaks)
        self._fits_at(allocated)

    def _fits_at(self, allocated: int) -> None:
        if abs(allocated - self._fitting_at) * 100 > allocated:  # other batches may fit now
            self.quiet_mark.forget_shapes()
            self._fitting_at = allocated

    def _tell_quiet(self) -> None:
        """No step follows that would tell of the quiet ones."""
        if self.quiet:
            self._wake()
        step, ended = self.step - 1, self._step_opened_ns
        self._append(
            Step(
                step,
                ended,
                0,
                phases=0,
                quiet=self._quiet_steps - 1,
                quiet_peaks=self.quiet_peaks,
                quiet_ends=tuple(self._ends),
            )
        )
        self._forget_quiet()


def _flagged(read: tuple[Any, ...], label: str, flags: int) -> tuple[Any, ...]:
    """A reading with more flags, and without the peaks that they make invalid."""
    allocated, peak, reserved, reserved_peak, *others, before, rss = read
    if flags & OVERLAPPED:
        peak = reserved_peak = None
    elif label is GRAPH_REPLAY:  # the allocator's counters do not move while a graph runs
        peak = None
    return (allocated, peak, reserved, reserved_peak, *others, flags | before, rss)


def _largest(figures: Iterable[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return max(known, default=None)


def _forget(known: dict[int, Any], key: int, _: object) -> None:
    known.pop(key, None)
