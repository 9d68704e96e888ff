"""A training loop that says where it is and logs figures: a library's, through its callback, or the user's own.

`lightning`, `transformers` and `keras` beside this file are the callbacks; `gpumon_agent.progress` and `figures` are
for loops without one.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, NamedTuple, ParamSpec, TypeVar

from gpumon_agent.guard import protect
from gpumon_agent.logged import Logged
from gpumon_agent.registry import REGISTRY
from gpumon_agent.shim import joining

P = ParamSpec("P")
R = TypeVar("R")

TRAIN, SANITY_CHECK, VALIDATE, TEST, PREDICT = "train", "sanity check", "validate", "test", "predict"
_APART_NS = 1_000_000_000  # between two messages: a person reads them


class Where(NamedTuple):
    """The fields of a wire.Progress that the loop knows."""

    stage: str = ""
    epoch: int | None = None
    batch: int | None = None
    batches: int | None = None


def guarded(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """The result; None if it fails: another version of the library may lack what it reads."""
    return protect("callback", function)(*args, **kwargs)


class Loop:
    """Can be copied and pickled: libraries do so with their callbacks."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._due_ns = 0
        self._said = Where()
        self._logged = Logged()

    def begin(self, model: Any = None) -> None:
        """Watches this process from here on, unless `gpumon run` or `watch` does already. A `model` without an
        optimizer of PyTorch's, by which it would be found, is watched in any case."""
        guarded(self._begin, model)

    def _begin(self, model: Any) -> None:
        from gpumon_agent.agent import watch  # imports torch

        REGISTRY.followers.add(self._logged)
        if model is not None:
            watch(model)
        elif REGISTRY.agent is None and not REGISTRY.finders:
            joining.join(lambda _: None)  # without an optimizer yet, models are found when one is built

    def due(self) -> bool:
        """Whether `say` would send something. In most batches this is all that runs."""
        return monotonic_ns() >= self._due_ns

    def say(self, where: Callable[P, Where], *args: P.args, **kwargs: P.kwargs) -> None:
        """Tells viewers where the loop is, if `where(...)` has changed."""
        self._due_ns = monotonic_ns() + _APART_NS
        agent = REGISTRY.agent
        found = None if agent is None else guarded(where, *args, **kwargs)
        if found is not None and found != self._said:
            self._said = found
            guarded(agent.say_progress, self._library, found.stage, found.epoch, found.batch, found.batches)

    def figures(self) -> dict[str, int]:
        """Those of `gpumon_agent.figures`, since this loop last asked."""
        return guarded(self._figures) or {}

    def _figures(self) -> dict[str, int]:
        agent = REGISTRY.agent
        if agent is None:
            return {}
        agent.read_for(self._logged)
        return self._logged.take()


def own_loop() -> Loop:
    """The one of the user's own loop."""
    loop: Loop | None = REGISTRY.loop
    if loop is None:
        REGISTRY.loop = loop = Loop("")
    return loop
