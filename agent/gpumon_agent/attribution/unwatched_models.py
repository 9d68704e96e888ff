"""Weights and buffers of models on the device that are not watched (an EMA, a teacher, a frozen copy), and their names.

Model. While model_discovery is installed (`gpumon run`), it records every module that is built, copied or unpickled. A
module that is no child, not watched, and neither around nor inside a watched one is an unwatched model. If its
parameters have the shapes of a watched model's, in order, it is called a copy of that model.
Cost: every `SEARCHED_EVERY` fresh reads one pass over the recorded modules, else one over the unwatched models'
tensors.
Known limitations. With `watch()` alone no modules are recorded: the line is None. Gradients of such models are
unexplained.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from torch import Tensor
from torch.nn import Module

from gpumon_agent.hooks import model_discovery
from gpumon_agent.module_tree import SEARCHED_EVERY, tree
from gpumon_agent.storages import storages

SLICE = 256  # modules or tensors between two looks at the clock: half a millisecond


class UnwatchedModels:
    """The unwatched models, by weak reference. `tell` reports each once."""

    def __init__(self, watched: Callable[[], Iterable[tuple[int, Module]]], tell: Callable[[str], None]) -> None:
        self._watched = watched
        self._tell = tell
        self._left = 0
        self._others: list[weakref.ref[Module]] | None = None
        self._reported: weakref.WeakSet[Module] = weakref.WeakSet()

    def changed(self) -> None:
        self._left = 0

    def tensors(self, *, look: bool) -> Iterator[Tensor] | None:
        """Their parameters and buffers. None if modules are not recorded. `look`: may search for new models."""
        if self._left <= 0 and (look or self._others is None):
            self._left = SEARCHED_EVERY
            self._look()
        self._left -= look
        return None if self._others is None else self._each()

    def modules(self) -> list[Module]:
        """The models found by the last search that are alive."""
        return [module for reference in self._others or () if (module := reference()) is not None]

    def _each(self) -> Iterator[Tensor]:
        for reference in self._others or ():
            if (module := reference()) is not None:
                yield from module.parameters()
                yield from module.buffers()

    def _look(self) -> None:
        for _ in self._looking():
            pass

    def in_slices(self) -> Iterator[weakref.ref[Module] | None] | None:
        """Searches for them, then yields each of their modules; yields None where the work may be interrupted."""
        if model_discovery.tops() is None:
            self._others = None
            return None
        return self._modules_in_slices()

    def _modules_in_slices(self) -> Iterator[weakref.ref[Module] | None]:
        yield from self._looking()
        for reference in list(self._others or ()):
            other = reference()
            found = tree([] if other is None else [other])
            del other
            yield from (module for _, module in found)

    def _looking(self) -> Iterator[None]:
        """Searches for unwatched models; yields None after every slice."""
        tops = model_discovery.tops()
        if tops is None:
            self._others = None
            return
        candidates = [weakref.ref(top) for top in tops]
        del tops
        inside: set[int] = set()
        for count, (_, reference) in enumerate(tree([model for _, model in self._watched()]), 1):
            inside.add(id(reference()))
            if not count % SLICE:
                yield None
        others: list[weakref.ref[Module]] = []
        for candidate in candidates:
            top = candidate()
            if top is None or id(top) in inside:
                continue
            found = tree([top])
            del top
            for count, (_, reference) in enumerate(found, 1):
                if id(reference()) in inside:
                    break
                if not count % SLICE:
                    yield None
            else:
                others.append(candidate)
        self._others = others
        if not inside:  # no model is watched yet
            return
        for other in others:
            yield from self._tell_of(other)

    def _tell_of(self, reference: weakref.ref[Module]) -> Iterator[None]:
        other = reference()
        if other is None or other in self._reported:
            return
        kind, tensors = type(other).__name__, _parameters(other)
        sizes: dict[int, int] = {}
        shapes = hash(())
        del other
        for count, tensor in enumerate(tensors, 1):
            if (parameter := tensor()) is not None:
                sizes.update((identity, nbytes) for identity, nbytes, _ in storages(parameter))
                shapes = hash((shapes, parameter.shape))
            del parameter
            if not count % SLICE:
                yield None
        nbytes = sum(sizes.values())
        if not nbytes or (other := reference()) is None:
            return
        self._reported.add(other)
        del other
        copy = False
        for _, model in self._watched():
            theirs = hash(())
            tensors = _parameters(model)
            del model
            for count, tensor in enumerate(tensors, 1):
                theirs = hash((theirs, getattr(tensor(), "shape", None)))
                if not count % SLICE:
                    yield None
            copy = copy or theirs == shapes
        what = f"a copy of a watched model ({kind})" if copy else kind
        self._tell(f"{what} of {nbytes:,} bytes is not trained: it is counted as other models")


def _parameters(root: Module) -> Iterator[weakref.ref[Tensor]]:
    seen: set[int] = set()
    for _, reference in tree([root]):
        at, more = 0, True
        while more and (module := reference()) is not None:
            own = list(islice(module._parameters.values(), at, at + SLICE))
            del module
            at, more = at + SLICE, len(own) == SLICE
            found = [weakref.ref(each) for each in own if each is not None and id(each) not in seen]
            seen.update(map(id, own))
            own.clear()
            yield from found
