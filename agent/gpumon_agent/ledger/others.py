"""Models on the device that nobody watches (an EMA, a teacher, a frozen copy): their weights and buffers, and who.

Model. `find` notes every module as it is built, copied or unpickled, while it is installed (`gpumon run`); those that
are no other's child and neither watched nor around or inside a watched one are the others. A model whose parameters
have the shapes of a watched model's, in order, is called a copy of it.
Cost: one pass over the noted modules every `LOOK_EVERY` looks; between them, one over the others' own tensors.
Known limitations. With `watch()` alone nothing is noted: the line is None. Gradients of such models are unexplained.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor
from torch.nn import Module

from gpumon_agent.ledger.storages import storages
from gpumon_agent.steps import find

LOOK_EVERY = 64


class Others:
    """The models that nobody watches, known weakly. `tell` is told of each once."""

    def __init__(self, watched: Callable[[], Iterable[tuple[int, Module]]], tell: Callable[[str], None]) -> None:
        self._watched = watched
        self._tell = tell
        self._left = 0
        self._others: list[weakref.ref[Module]] | None = None
        self._told: weakref.WeakSet[Module] = weakref.WeakSet()

    def changed(self) -> None:
        """More is watched than before."""
        self._left = 0

    def tensors(self, *, look: bool) -> Iterator[Tensor] | None:
        """Their parameters and buffers. None where modules are not noted. `look`: new ones may be looked for."""
        if self._left <= 0 and (look or self._others is None):
            self._left = LOOK_EVERY
            self._look()
        self._left -= look
        return None if self._others is None else self._each()

    def modules(self) -> list[Module]:
        """Those that the last look found and that are still there."""
        return [module for reference in self._others or () if (module := reference()) is not None]

    def _each(self) -> Iterator[Tensor]:
        for reference in self._others or ():
            if (module := reference()) is not None:
                yield from module.parameters()
                yield from module.buffers()

    def _look(self) -> None:
        tops = find.tops()
        if tops is None:
            self._others = None
            return
        watched = [model for _, model in self._watched()]
        inside = {id(module) for model in watched for module in model.modules()}
        shapes = [[parameter.shape for parameter in model.parameters()] for model in watched]
        others = [
            top for top in tops if id(top) not in inside and not any(id(module) in inside for module in top.modules())
        ]
        self._others = [weakref.ref(other) for other in others]
        for other in others:
            nbytes = sum({identity: size for t in other.parameters() for identity, size, _ in storages(t)}.values())
            if nbytes and other not in self._told:
                self._told.add(other)
                copy = [parameter.shape for parameter in other.parameters()] in shapes
                what = f"a copy of a watched model ({type(other).__name__})" if copy else type(other).__name__
                self._tell(f"{what} of {nbytes:,} bytes is not trained: the ledger counts it among other models")
