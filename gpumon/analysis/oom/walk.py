"""The walk of an optimizer through its first step: which bytes it asks for, one after another, and what stands by then.

Model. As `optimizer.step` begins, weights and gradients of every parameter stand. What follows depends on how the
optimizer is written:

    reach     each parameter's states when it is reached, then its temporaries (transformers' AdamW, most by hand)
    loop      all states first, then the temporaries of one parameter at a time (torch.optim, foreach=False)
    foreach   all states first, then temporaries of all parameters together (torch.optim's default on CUDA since 2.0)
    fused     all states first, no temporaries

Of a failed request, its size together with `already allocated` tells at which event of which walk it happened.
Blocks count as the caching allocator counts them: sizes rounded up to 512 B; the rest of a segment of its own that is
not split off (1 MiB or less) counts too.

Source. torch/optim (2.15) and transformers' AdamW (to 4.x), compared with the allocator's own record of a first step on
the virtual GPU (tests/oom/test_walk.py).
Cost. O(parameters).
Known limitations. All parameters are taken as one group, in their own order. Ways that a recipe does not list are not
known, nor are optimizers whose temporaries have other shapes than their parameters: Rprop's masks, Adafactor's rows and
columns, Muon's products, LBFGS's one long vector. Tensors below 10 MiB are taken as split without a remainder. Counters
of steps kept on the device (fused, 512 B each) are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.oom.wording import LARGE_MIN, SEGMENT_STEP
from gpumon_agent import wire

REACH, LOOP, FOREACH, FUSED = "reach", "loop", "foreach", "fused"
WAYS = (REACH, LOOP, FOREACH, FUSED)

WAYS_IN_WORDS = {
    REACH: "creates each parameter's states on reaching it, as transformers' own AdamW did",
    LOOP: "creates all states first, then goes parameter by parameter, as torch.optim with foreach=False",
    FOREACH: "creates all states first, then works on all parameters at once, as torch.optim does on CUDA since 2.0",
    FUSED: "creates all states first and needs no temporaries, as torch.optim with fused=True",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """An optimizer as far as its first step is concerned.

    `temporaries` are those of one parameter, in the order in which they are asked for; all but the last are gone before
    the next parameter, the last one when its successor exists (a local variable of the loop).
    """

    name: str
    states: tuple[str, ...] = ()
    temporaries: tuple[str, ...] = ()
    lists: int | None = 0  # lists of temporaries of a foreach step; None: not known
    ways: tuple[str, ...] = WAYS
    width: float | None = None  # bytes an element of state; None: the parameter's own
    early: bool = False  # states are made with the optimizer, before the first forward
    kept: bool = True  # the last temporary lives until its successor exists
    together: bool = True  # lists of a foreach step stand at the same time


_ADAM = ("first moment (exp_avg)", "second moment (exp_avg_sq)")
_ROOT = "second-moment square root"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("adam", _ADAM, (_ROOT, "square root over the bias correction"), 1),
        Recipe("adamw", _ADAM, (_ROOT, "square root over the bias correction"), 1),
        Recipe("nadam", _ADAM, (_ROOT, "square root over the bias correction"), 1, (REACH, LOOP, FOREACH)),
        Recipe("radam", _ADAM, (_ROOT,), 1, (FOREACH,)),
        Recipe("adamax", ("first moment (exp_avg)", "infinity norm"), ("denominator",), 1, (LOOP, FOREACH), kept=False),
        Recipe("adadelta", ("square average", "accumulated deltas"), ("square root",), 2, (FOREACH,)),
        Recipe("sgd", ways=(LOOP, FOREACH, FUSED)),
        Recipe("momentum", ("momentum buffer",), ways=(REACH, FOREACH, FUSED)),
        Recipe("rmsprop", ("square average",), ("square root of the average",), 1, (REACH, LOOP, FOREACH)),
        Recipe("adagrad", ("sum of squares",), ("square root of the sum",), 2, (LOOP, FOREACH, FUSED), early=True),
        Recipe("asgd", ("average (ax)",), ("gap to the average",), 2, (LOOP, FOREACH), kept=False, together=False),
        Recipe("adamw8bit", _ADAM, ways=(REACH,), width=1.016),
    )
}
"""By torch's names in lower case; `momentum` is SGD with momentum."""


@dataclass(frozen=True, slots=True)
class Event:
    """One request: what for, of which parameter, how many bytes, and what stands allocated as it is made."""

    phase: str
    what: str
    tensor: Tensor
    bytes: int
    stands: int


def counted(count: int) -> int:
    """What `memory_allocated` grows by for a tensor of `count` bytes in a segment of its own."""
    block = -(-count // 512) * 512
    if block < LARGE_MIN:
        return block
    segment = -(-block // SEGMENT_STEP) * SEGMENT_STEP
    return block if segment - block > 1 << 20 else segment


def recipe_of(text: str) -> tuple[Recipe, str | None]:
    """ "adamw:fused" → its recipe and its way, None where none is named; "sgd,momentum=0.9" is `momentum`.

    Raises ValueError with one sentence.
    """
    head, *settings = text.lower().replace(" ", "").split(",")
    name, _, way = head.partition(":")
    if name == "sgd" and any(re.fullmatch(r"momentum=0*\.?\d*[1-9]\d*", each) for each in settings):
        name = "momentum"
    recipe = RECIPES.get("adamw8bit" if name == "adam8bit" else name)
    if recipe is None:
        raise ValueError(f"the optimizer {name!r} is not known here; known are {', '.join(RECIPES)}")
    if way and way not in recipe.ways:
        raise ValueError(f"{name} has no way {way!r}; it has {', '.join(recipe.ways)}")
    return recipe, way or None


def standing(tensors: Sequence[Tensor]) -> int:
    """Bytes of all weights and gradients."""
    return sum(counted(t.bytes) * (2 if t.trainable else 1) for t in tensors)


def first_step(tensors: Sequence[Tensor], recipe: Recipe, way: str) -> Iterator[Event]:
    """The requests of the first `optimizer.step`, in order."""
    stands = standing(tensors)
    trained = [t for t in tensors if t.trainable and not t.tied_to]

    def states(tensor: Tensor, kept: int = 0) -> Iterator[Event]:
        nonlocal stands
        for state in recipe.states:
            count = tensor.bytes if recipe.width is None else math.ceil(tensor.count * recipe.width)
            if not recipe.early:
                yield Event(wire.OPTIMIZER, state, tensor, count, stands + kept)
            stands += counted(count)

    def briefly(names: tuple[str, ...], tensor: Tensor, kept: int) -> Iterator[Event]:
        for at, what in enumerate(names):
            yield Event(wire.OPTIMIZER, what, tensor, tensor.bytes, stands + kept + at * counted(tensor.bytes))

    kept = 0  # the temporary of the parameter before
    if way == REACH:
        for tensor in trained:
            yield from states(tensor, kept)
            yield from briefly(recipe.temporaries[:1], tensor, kept)
            kept = counted(tensor.bytes) if recipe.temporaries and recipe.kept else 0
        return
    for tensor in trained:
        yield from states(tensor)
    if way == LOOP:
        for tensor in trained:
            yield from briefly(recipe.temporaries, tensor, kept)
            kept = counted(tensor.bytes) if recipe.temporaries and recipe.kept else 0
    elif way == FOREACH:
        for _ in range(recipe.lists or 0):
            kept = kept if recipe.together else 0
            for tensor in trained:
                yield from briefly(recipe.temporaries[:1], tensor, kept)
                kept += counted(tensor.bytes)


def loading(tensors: Sequence[Tensor]) -> Iterator[Event]:
    """The requests of `model.to(device)`, in order."""
    stands = 0
    for tensor in tensors:
        if not tensor.tied_to:
            yield Event(wire.LOAD, "weights", tensor, tensor.bytes, stands)
            stands += counted(tensor.bytes)


def gradients(tensors: Sequence[Tensor]) -> Iterator[Event]:
    """The gradients of a first backward, last parameter first. What stands is the least: activations come on top."""
    stands = sum(counted(t.bytes) for t in tensors)
    for tensor in reversed([t for t in tensors if t.trainable and not t.tied_to]):
        yield Event(wire.BACKWARD, "gradient", tensor, tensor.bytes, stands)
        stands += counted(tensor.bytes)


def peak(tensors: Sequence[Tensor], recipe: Recipe, way: str) -> int:
    """The most that stands allocated during the first step."""
    events = first_step(tensors, recipe, way)
    return max((event.stands + counted(event.bytes) for event in events), default=standing(tensors))
