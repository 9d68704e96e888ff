"""Step and phase while hooks do not call the state machine, as one word: a hook stores a number, the helper reads it.

All that the hooks of an idle step (hooks.phases) read or write is in one object, and so in few cache lines. Where they
are compiled, that object is hooks.native_hooks.NativeMark.
"""

from __future__ import annotations

import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic_ns
from typing import Any, TypeVar

from gpumon_agent.wire import BACKWARD, BETWEEN, EVAL, FORWARD, GRAPH_REPLAY, LOAD, OPTIMIZER

_PHASES = ("", BETWEEN, FORWARD, EVAL, BACKWARD, OPTIMIZER, GRAPH_REPLAY, LOAD)
CODES = {phase: code for code, phase in enumerate(_PHASES) if phase}
BITS = 3
A_STEP = 1 << BITS
TIMES_MAX = 16_384  # of quiet steps between two counts; only more if counting has failed
FITTING_MAX = 4_096  # shapes of batches that are known to fit
NEVER_NS = (1 << 63) - 1

IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER, IN_BETWEEN = CODES[FORWARD], CODES[BACKWARD], CODES[OPTIMIZER], CODES[BETWEEN]
PASSED, DUE, NOTES = 1, 2, 2
"""An idle step has closed. DUE: call `Phases.do_quietly`. Or its backward has begun. NOTES: its end is to be noted."""

Shapes = Sequence[Sequence[int]]
Hooks = TypeVar("Hooks", bound="OrderedDict[int, Any]")
Shaped = dict[int, tuple[tuple[int, ...], ...]]
"""Shapes of a forward's inputs, by their hash."""
Note = tuple[str, int, tuple[Any, ...], tuple[int, tuple[tuple[int, ...], ...]]]
"""The end of a phase: its name, monotonic ns, the fields of a Reading; if a forward begins, bytes and shapes of its
inputs."""


class QuietMark:
    """`words[at] = step | CODES[phase]`; 0: the running step is read, and the status names its phase.

    `words[called_at]`: the helper changes it if it has a request.
    """

    hears = False  # the helper can be heard in the words

    def __init__(self) -> None:
        self._put_in(array("Q", (0, 0)), 0, 1)
        self.step = 0  # shifted, for the hooks
        self.idle = False  # the open step is quiet, and hooks need not call the state machine
        self.only = 0  # id of the optimizer whose step closes an idle step
        self.evaluates = False  # the last step that was read had a forward without a graph
        self.passed = 0  # forwards in the open step, if it is quiet
        self.left = 0  # quiet steps left
        self.due_ns = 0  # when something is to be done as a quiet step closes
        self.ends_due_ns = NEVER_NS  # when allocated bytes are to be read then
        self.ends_every_ns = 0
        self.notes = False  # the open step is read: the hooks take notes
        self.root = 0  # id of the model whose forward a step with notes runs
        self.engine = self.stepping = False  # it runs its backward; its optimizer
        self.noted = 0  # phases
        self._times: deque[int] = deque(maxlen=TIMES_MAX)
        self._fitting: set[tuple[tuple[int, ...], ...]] = set()

    def share(self, words: memoryview[int], at: int, called_at: int) -> None:
        """From here on both words are in memory that the helper sees.

        Not in a Python without a GIL: there a thread could store into memory that another one unmaps.
        """
        if getattr(sys, "_is_gil_enabled", lambda: True)():
            words[at] = self.words[self.at]
            self._put_in(words, at, called_at)
            self.hears = True

    def keep(self) -> None:
        """The shared memory is about to be unmapped."""
        self.hears = False
        self._put_in(array("Q", (self.words[self.at], 0)), 0, 1)

    def _put_in(self, words: Any, at: int, called_at: int) -> None:
        self.words, self.at, self.called_at = words, at, called_at
        self.hear()

    def hear(self) -> None:
        """What the helper has asked for so far is being looked at."""
        self.heard = self.words[self.called_at]

    def begin(self, step: int, phase: str = BETWEEN) -> None:
        self.step = step << BITS
        self.enter(CODES[phase])

    def enter(self, code: int) -> None:
        self.words[self.at] = self.step | code

    def end(self) -> None:
        self.words[self.at] = 0

    def read(self) -> tuple[int, str] | None:
        return marked(self.words[self.at])

    def pass_step(self, now: int) -> bool:
        """A quiet step closes. True: call `Phases.do_quietly`. It runs unguarded and with cold caches, so it does
        nothing that can wait or fail."""
        self._times.append(now)
        self.passed = 0
        self.left -= 1
        step = self.step = self.step + A_STEP
        self.words[self.at] = step | IN_BETWEEN
        return self._is_due(now)

    def _is_due(self, now: int) -> bool:
        return (
            self.left <= 0
            or now >= self.due_ns
            or now >= self.ends_due_ns
            or self.words[self.called_at] != self.heard
            or self.uncounted > TIMES_MAX // 2
        )

    @property
    def times(self) -> Sequence[int]:
        """When quiet steps closed that are not counted yet."""
        return self._times

    @property
    def uncounted(self) -> int:
        return len(self._times)

    @property
    def closed_ns(self) -> int:
        """When the last of them closed."""
        return self._times[-1]

    def forget_times(self) -> None:
        self._times.clear()

    # ---------------------------------------------------------------------------------------- what is allocated at ends

    def read_ends(self, every_ns: int, device: int | None) -> None:
        """Allocated bytes are read as quiet steps close. `device`: CUDA's, whose ends hooks that are compiled read."""
        self.ends_every_ns = every_ns
        if not every_ns:
            self.ends_due_ns = NEVER_NS
        elif self.ends_due_ns == NEVER_NS:
            self.ends_due_ns = 0

    @property
    def reads_ends(self) -> bool:
        """Whether they do."""
        return False

    def take_ends(self) -> Iterable[tuple[int, int, int, int]]:
        """(step, device, bytes allocated at its end, live blocks), of those they have read since the last call."""
        return ()

    # -------------------------------------------------------------------------------- shapes of batches known to fit

    def fit(self, shapes: Shapes) -> None:
        if len(self._fitting) >= FITTING_MAX:
            self.forget_shapes()
        self._fitting.add(tuple(map(tuple, shapes)))

    def fits(self, shapes: Shapes) -> bool:
        return tuple(shapes) in self._fitting

    def forget_shapes(self) -> None:
        self._fitting.clear()

    # --------------------------------------------------------------------------------------------------------- notes

    def can_note(self) -> bool:
        """Only hooks that are compiled do."""
        return False

    def begin_notes(self, device: int, peaks: Any) -> None:
        """The open step and those after it are read. `peaks`: see native.py's Boundary."""

    def take_notes(self) -> Any:
        """noted.Taken: the notes since the last call. Only if hooks take notes."""

    # ---------------------------------------------------------------------------------------------------- for the hooks

    def kind_of_hooks(self, python: type[Hooks]) -> type[Hooks]:
        """The class of a model's hook dicts: `python`, or one derived from it whose bool() is compiled. Torch asks for
        that in `Module._call_impl`; what C++ does not know, `asks` of `python` answers."""
        return python

    def ask(self, hooks: Any, model: weakref.ref[Any], *, begins: bool) -> None:
        """From here on bool() of that hook dict, which is of that class, is compiled. While the step is idle it is
        False: before a forward (`begins`), if nothing about the call is new, and then a forward has begun; after it,
        unless torch must call hooks."""

    def ask_no_more(self, hooks: Any) -> None:
        """The dict no longer contains our hook."""

    def leaves(self) -> Callable[[], bool]:
        """A function that is called as the backward of a step with notes ends: whether that is noted."""
        return bool

    def enters(self, code: int) -> Callable[[], int]:
        """A function that says whether the step is idle. Then a phase has begun."""

        def entered() -> int:
            if self.idle:
                self.words[self.at] = self.step | code
            return self.idle

        return entered

    def begins(self, code: int) -> Callable[[Any], bool]:
        """The same, if it is given the optimizer whose step closes an idle step."""

        def began(optimizer: Any) -> bool:
            if self.idle and self.only == id(optimizer):
                self.words[self.at] = self.step | code
                return True
            return False

        return began

    def closes(self) -> Callable[[Any], int]:
        """A function that closes an idle step, if that optimizer does: PASSED or DUE, else 0."""

        def closed(optimizer: Any) -> int:
            if not self.idle or self.only != id(optimizer):
                return 0
            return DUE if self.pass_step(monotonic_ns()) else PASSED

        return closed


def phase_of(code: int) -> str:
    return _PHASES[code]


def marked(word: int) -> tuple[int, str] | None:
    """(step, phase). None: the running step is read."""
    return (word >> BITS, _PHASES[word & (1 << BITS) - 1]) if word else None
