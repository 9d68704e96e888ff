"""Step and phase of a step that is not read, as one word: a hook stores a number, and the helper reads it.

All that the hooks of an idle step (hooks.phases) read or write is in one object, and so in few cache lines.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from typing import Any

from gpumon_agent.wire import BACKWARD, BETWEEN, EVAL, FORWARD, GRAPH_REPLAY, LOAD, OPTIMIZER

_PHASES = ("", BETWEEN, FORWARD, EVAL, BACKWARD, OPTIMIZER, GRAPH_REPLAY, LOAD)
CODES = {phase: code for code, phase in enumerate(_PHASES) if phase}
BITS = 3
A_STEP = 1 << BITS
_TIMES_MAX = 4_096  # of quiet steps between two counts; only more if counting has failed

IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER, IN_BETWEEN = CODES[FORWARD], CODES[BACKWARD], CODES[OPTIMIZER], CODES[BETWEEN]


class QuietMark:
    """`words[at] = step | CODES[phase]`; 0: the running step is read, and the status names its phase."""

    __slots__ = ("at", "due_ns", "evaluates", "fitting", "idle", "left", "only", "passed", "step", "times", "words")

    def __init__(self) -> None:
        self.words: Any = array("Q", (0,))
        self.at = 0
        self.step = 0  # shifted, for the hooks
        self.idle = False  # the open step is quiet, and hooks need not call the state machine
        self.only = 0  # id of the optimizer whose step closes an idle step
        self.fitting: set[tuple[tuple[int, ...], ...]] = set()  # shapes of batches that are known to fit
        self.evaluates = False  # the last step that was read had a forward without a graph
        self.passed = 0  # forwards in the open step, if it is quiet
        self.left = 0  # quiet steps left
        self.due_ns = 0  # when something is to be done as a quiet step closes
        self.times: deque[int] = deque(maxlen=_TIMES_MAX)  # when quiet steps closed that are not counted yet

    def share(self, words: memoryview[int], at: int) -> None:
        """From here on the word is in memory that the helper sees.

        Not in a Python without a GIL: there a thread could store into memory that another one unmaps.
        """
        if getattr(sys, "_is_gil_enabled", lambda: True)():
            words[at] = self.words[self.at]
            self.words, self.at = words, at

    def keep(self) -> None:
        """The shared memory is about to be unmapped."""
        self.words, self.at = array("Q", (self.words[self.at],)), 0

    def begin(self, step: int, phase: str = BETWEEN) -> None:
        self.step = step << BITS
        self.words[self.at] = self.step | CODES[phase]

    def pass_step(self, now: int) -> bool:
        """A quiet step closes. True: call `Phases.do_quietly`. It runs unguarded and with cold caches, so it does
        nothing that can wait or fail."""
        self.times.append(now)
        self.passed = 0
        left = self.left = self.left - 1
        step = self.step = self.step + A_STEP
        self.words[self.at] = step | IN_BETWEEN
        return left <= 0 or now >= self.due_ns

    def end(self) -> None:
        self.words[self.at] = 0

    def read(self) -> tuple[int, str] | None:
        return marked(self.words[self.at])


def marked(word: int) -> tuple[int, str] | None:
    """(step, phase). None: the running step is read."""
    return (word >> BITS, _PHASES[word & (1 << BITS) - 1]) if word else None
