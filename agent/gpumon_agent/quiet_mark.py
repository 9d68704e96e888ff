"""Step and phase of a step that is not read, as one word: a hook stores a number, and the helper reads it."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from gpumon_agent.wire import BACKWARD, BETWEEN, EVAL, FORWARD, GRAPH_REPLAY, LOAD, OPTIMIZER

_PHASES = ("", BETWEEN, FORWARD, EVAL, BACKWARD, OPTIMIZER, GRAPH_REPLAY, LOAD)
CODES = {phase: code for code, phase in enumerate(_PHASES) if phase}
BITS = 3
A_STEP = 1 << BITS

IN_FORWARD, IN_BACKWARD, IN_OPTIMIZER, IN_BETWEEN = CODES[FORWARD], CODES[BACKWARD], CODES[OPTIMIZER], CODES[BETWEEN]


class QuietMark:
    """`words[at] = step | CODES[phase]`; 0: the running step is read, and the status names its phase."""

    __slots__ = ("at", "step", "words")

    def __init__(self) -> None:
        self.words: Any = array("Q", (0,))
        self.at = 0
        self.step = 0  # shifted, for the hooks

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

    def end(self) -> None:
        self.words[self.at] = 0

    def read(self) -> tuple[int, str] | None:
        return marked(self.words[self.at])


def marked(word: int) -> tuple[int, str] | None:
    """(step, phase). None: the running step is read."""
    return (word >> BITS, _PHASES[word & (1 << BITS) - 1]) if word else None
