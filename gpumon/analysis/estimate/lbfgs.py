"""Memory of an LBFGS step: what it keeps from step to step, and what is alive while its closure runs again.

Model. LBFGS treats all parameters as one flat tensor. Between steps it keeps the direction, the last gradient, and
`history_size` pairs of older ones. Within a step there are also the current gradient, the previous direction, the new
one, and the replaced pair while the newest is stored. Each iteration but the last runs the closure once more, with all
of that alive. The line search (`strong_wolfe`) runs it as often as needed: it keeps a copy of the parameters, the
initial gradient, those of both ends of its bracket, and the newest two.

Source. torch/optim/lbfgs.py (2.15); compared with the allocator in first, second and later steps, with the values it
decides by from the same problem solved on the CPU (tests/analysis/test_estimate_lbfgs.py).
Cost. A pass of forward and backward for each iteration but the last, as in training; with the line search four.

Known limitations. The number of iterations depends on values. Assumed: all possible iterations, each pair kept, and the
most the line search keeps at once, which is up to four tensors of all parameters too much if the first step succeeds.
Reduction buffers are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from gpumon.analysis.estimate.workload import FLOAT, Workload

NAME = "lbfgs"
_HISTORY, _ITERATIONS = 100, 20


class Taking(Protocol):
    def take(self, size: int, line: str) -> Any: ...

    def drop(self, storage: Any) -> None: ...

    def move(self, storage: Any, line: str) -> Any: ...


class Lbfgs(msgspec.Struct):
    """One optimizer, from step to step. `sizes`: bytes of each parameter's copy; `evaluate`: the closure."""

    memory: Taking
    work: Workload
    sizes: Sequence[int]
    evaluate: Callable[[], object]
    _pairs: deque[list[Any]] = msgspec.field(default_factory=deque)
    _scales: list[Any] = msgspec.field(default_factory=list)
    _direction: Any = None
    _gradient: Any = None  # of the previous iteration

    def step(self) -> None:
        """The rest of `step()`, after the closure's first run."""
        last = self._iterations
        flat = self._fresh()
        self._brief()
        direction, q = self._direction, None
        copies: list[Any] = []
        for iteration in range(1, last + 1):
            if direction is None:
                direction = self._fresh()
            else:
                self._pair()
                fresh = self._fresh()
                self._drop(q)
                q = fresh
                self._dot()
                fresh = self._fresh()
                if direction is not self._direction:
                    self._drop(direction)
                direction = fresh
            if self._gradient is None:
                self._gradient = self.memory.take(sum(self.sizes), "optimizer")
                self._brief()
            self._dot()
            if self._searches:
                fresh = [self.memory.take(size, "temporaries") for size in self.sizes]
                self._drop(*copies)
                copies = fresh
                flat = self._search(flat)
                self._brief()
            elif iteration < _whole(self._settings, "max_iter", _ITERATIONS):
                flat = self._evaluated(flat)
                self._brief()
            if iteration == last:
                break
            moved = self._fresh()
            self._brief()
            self._drop(moved)
        self._drop(self._direction, q, flat, *copies)
        self._direction = self.memory.move(direction, "optimizer")

    def fill(self) -> None:
        """Sets the state after so many steps that the history is full."""
        while self._direction is not None and len(self._pairs) < self._history:
            self._keep([self._fresh(), self._fresh()])

    def _search(self, flat: Any) -> Any:
        """Two extrapolations, then the bracket: both ends, the gradient at its start, the newest two."""
        self._brief()
        start, newest, clones = self._fresh(), None, []
        for _ in range(3):
            newest = self._evaluated(newest)
            self._dot()
            clones.append(self._fresh())
        newest = self._evaluated(newest)
        self._dot()
        before, high, low = clones
        self._drop(start, before, newest, high, flat)
        return low

    def _evaluated(self, before: Any) -> Any:
        """The gradient at another point; the previous one lives until it exists."""
        self.evaluate()
        fresh = self._fresh()
        self._drop(before)
        return fresh

    def _pair(self) -> None:
        """The newest difference of gradient and position; the oldest pair is freed after it exists."""
        fresh = [self._fresh(), self._fresh()]
        self._dot()
        if len(self._pairs) == self._history:
            self._drop(*self._pairs.popleft())
        self._keep(fresh)

    def _keep(self, pair: list[Any]) -> None:
        self._pairs.append([self.memory.move(each, "optimizer") for each in pair])
        while len(self._scales) < 2 * len(self._pairs):  # `ro` and `al`, one number each
            self._scales.append(self.memory.take(FLOAT, "optimizer"))

    # -------------------------------------------------------------------------------------------------------- settings

    @property
    def _settings(self) -> dict[str, str]:
        return dict(self.work.optimizer.settings)

    @property
    def _searches(self) -> bool:
        return searches(self._settings)

    @property
    def _history(self) -> int:
        return history(self._settings)

    @property
    def _iterations(self) -> int:
        """Iterations of a step; each but the last evaluates once, and `max_eval` limits them too."""
        most = _whole(self._settings, "max_iter", _ITERATIONS)
        evaluations = _whole(self._settings, "max_eval", most * 5 // 4)
        return max(1, min(most, evaluations - (not self._searches)))

    # ---------------------------------------------------------------------------------------------------------- tensors

    def _fresh(self) -> Any:
        return self.memory.take(sum(self.sizes), "temporaries")

    def _brief(self) -> None:
        self._drop(self._fresh())

    def _dot(self) -> None:
        self._drop(self.memory.take(self.work.hardware.cublas_workspace, "temporaries"))

    def _drop(self, *storages: Any) -> None:
        for storage in storages:
            if storage is not None:
                self.memory.drop(storage)


def history(settings: dict[str, str]) -> int:
    """The most pairs it keeps."""
    return _whole(settings, "history_size", _HISTORY)


def searches(settings: dict[str, str]) -> bool:
    """Whether it has a line search, so that its memory depends on values."""
    return settings.get("line_search_fn", "none").lower() != "none"


def _whole(settings: dict[str, str], name: str, otherwise: int) -> int:
    try:
        return int(settings[name])
    except (KeyError, ValueError):
        return otherwise
