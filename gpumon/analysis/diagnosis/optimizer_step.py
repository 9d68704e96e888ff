"""The allocations of one optimizer step, in order: the size of each, and the bytes allocated before it.

Model. When `optimizer.step` begins, all weights and gradients are allocated, and all states in every step but the
first. The order of allocations depends on the optimizer's implementation:

    reach     each parameter's states when it is reached, then its temporaries (transformers' AdamW, most by hand)
    loop      all states of a group first, then the temporaries of one parameter at a time (torch.optim, foreach=False)
    foreach   all states of a group first, then temporaries of all its parameters together (torch.optim's default on
              CUDA since 2.0)
    fused     all states of a group first, no temporaries

Parameter groups follow one another. special_optimizers.py has the optimizers whose temporaries differ in shape from
their parameters. The size of a failed request and `already allocated` together identify the event that failed. Blocks
count as the caching allocator counts them: sizes rounded up to 512 B; the rest of a segment of its own that is not
split off (1 MiB or less) counts too.

Source. torch/optim (2.15), transformers' AdamW (to 4.x) and bitsandbytes' 8-bit Adam, the first two compared with the
allocator's own record of first and third steps on the virtual GPU (tests/oom/test_walk.py).
Cost. O(parameters).
Known limitations. Not modelled: ways that a recipe does not list; LBFGS, whose step calls forward and backward;
SparseAdam's gradients and temporaries, whose rows are those looked up; step counters on the device (fused, 512 B each).
Tensors below 10 MiB are assumed to leave no remainder when a block is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence

import msgspec

from gpumon.analysis.diagnosis import special_optimizers
from gpumon.analysis.diagnosis.optimizer_events import Allocated, Event, counted
from gpumon.analysis.estimate.model import Tensor
from gpumon_agent import wire

REACH, LOOP, FOREACH, FUSED = "reach", "loop", special_optimizers.FOREACH, "fused"
WAYS = (REACH, LOOP, FOREACH, FUSED)

WAYS_IN_WORDS = {
    REACH: "creates each parameter's states on reaching it, as transformers' own AdamW did",
    LOOP: "creates all states first, then goes parameter by parameter, as torch.optim with foreach=False",
    FOREACH: "creates all states first, then works on all parameters at once, as torch.optim does on CUDA since 2.0",
    FUSED: "creates all states first and needs no temporaries, as torch.optim with fused=True",
}


class Recipe(msgspec.Struct, frozen=True):
    """An optimizer's memory use.

    `temporaries` are those of one parameter, in order of allocation. All but the last are freed before the next
    parameter; the last lives until its successor exists (a local variable of the loop).
    """

    name: str
    states: tuple[str, ...] = ()
    temporaries: tuple[str, ...] = ()
    lists: int | None = 0  # lists of temporaries of a foreach step; None: not known
    ways: tuple[str, ...] = WAYS
    made: Callable[[Tensor], list[tuple[str, int]]] | None = None  # for states that differ in size from their parameter
    takes: Callable[[Allocated, Sequence[Tensor], str], Iterator[Event]] | None = None  # for such temporaries
    early: bool = False  # states are created in the optimizer's __init__
    kept: bool = True  # the last temporary lives until its successor exists
    together: bool = True  # lists of a foreach step live at the same time
    looped: bool = True  # LOOP has these temporaries too
    gradients: bool = True  # as large as their parameters; False: sparse

    def states_of(self, tensor: Tensor) -> list[tuple[str, int]]:
        """(what, bytes) of each state, in order of creation."""
        return [(state, tensor.bytes) for state in self.states] if self.made is None else self.made(tensor)


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
        Recipe("asgd", ("average (ax)",), ("gap to the average",), 2, (LOOP, FOREACH), together=False, looped=False),
        Recipe(
            "rprop", ("previous gradient (prev)", "step size"), ways=(LOOP, FOREACH), takes=special_optimizers.rprop
        ),
        Recipe("adafactor", ways=(LOOP, FOREACH), made=special_optimizers.factored, takes=special_optimizers.adafactor),
        Recipe("muon", ("momentum buffer",), ways=(LOOP,), takes=special_optimizers.muon),
        Recipe("sparseadam", _ADAM, ways=(LOOP,), gradients=False),
        Recipe("adamw8bit", ways=(REACH,), made=special_optimizers.eight_bit),
    )
}
"""Keyed by torch's names in lower case; `momentum` is SGD with momentum."""


def recipe_of(text: str) -> tuple[Recipe, str | None]:
    """ "adamw:fused" → recipe and way (None if not given); "sgd,momentum=0.9" → `momentum`.

    Raises ValueError with a message of one sentence.
    """
    head, *settings = text.lower().replace(" ", "").split(",")
    name, _, way = head.partition(":")
    if name == "sgd" and any(re.fullmatch(r"momentum=0*\.?\d*[1-9]\d*", each) for each in settings):
        name = "momentum"
    recipe = RECIPES.get("adamw8bit" if name == "adam8bit" else name)
    if recipe is None:
        raise ValueError(f"unknown optimizer {name!r}; known are {', '.join(RECIPES)}")
    if way and way not in recipe.ways:
        raise ValueError(f"{name} has no form {way!r}; it has {', '.join(recipe.ways)}")
    return recipe, way or None


def standing(tensors: Sequence[Tensor], recipe: Recipe | None = None) -> int:
    """Bytes of all weights and gradients."""
    gradients = recipe is None or recipe.gradients
    return sum(counted(t.bytes) * (2 if t.trainable and gradients else 1) for t in tensors)


def stepped(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters that the optimizer updates, by group."""
    trained = [t for t in tensors if t.trainable and not t.tied_to and t.group is not None]
    return [[t for t in trained if t.group == group] for group in sorted({t.group or 0 for t in trained})]


def states(tensors: Sequence[Tensor], recipe: Recipe) -> int:
    return sum(counted(size) for group in stepped(tensors) for t in group for _, size in recipe.states_of(t))


def step(tensors: Sequence[Tensor], recipe: Recipe, way: str, *, later: bool = False) -> Iterator[Event]:
    """The requests of one `optimizer.step`, in order: of the first step, or with `later` of any other."""
    there = later or recipe.early
    memory = Allocated(standing(tensors, recipe) + (states(tensors, recipe) if there else 0), later)
    before: list[int] = []
    for group in stepped(tensors):
        if way == REACH:
            before = yield from _reaching(memory, recipe, group, there, before)
            continue
        if not there:
            for tensor in group:
                yield from _states(memory, recipe, tensor)
        if recipe.takes is not None:
            yield from recipe.takes(memory, group, way)
        elif way == LOOP and recipe.looped:
            yield from _loop(memory, recipe, group)
        elif way == FOREACH:
            yield from _lists(memory, recipe, group)
    memory.free(*before)


def _states(memory: Allocated, recipe: Recipe, tensor: Tensor) -> Iterator[Event]:
    for what, size in recipe.states_of(tensor):
        yield memory.request(what, tensor, size)


def _reaching(
    memory: Allocated, recipe: Recipe, group: Sequence[Tensor], there: bool, before: list[int]
) -> Generator[Event, None, list[int]]:
    """`before`: the previous parameter's temporary, which lives on into the next group. Returns the last one."""
    for tensor in group:
        if not there:
            yield from _states(memory, recipe, tensor)
        for what in recipe.temporaries[:1]:
            yield memory.request(what, tensor, tensor.bytes)
            memory.free(*before)
            before = [tensor.bytes]
    return before


def _loop(memory: Allocated, recipe: Recipe, group: Sequence[Tensor]) -> Iterator[Event]:
    before: list[int] = []
    for tensor in group:
        for what in recipe.temporaries:
            yield memory.request(what, tensor, tensor.bytes)
        memory.free(*before)
        fresh = [tensor.bytes] * len(recipe.temporaries)
        before = fresh[-1:] if recipe.kept else []
        memory.free(*fresh[len(before) :])
    memory.free(*before)


def _lists(memory: Allocated, recipe: Recipe, group: Sequence[Tensor]) -> Iterator[Event]:
    taken: list[int] = []
    for _ in range(recipe.lists or 0):
        if not recipe.together:
            memory.free(*taken)
            taken = []
        for tensor in group:
            for what in recipe.temporaries[:1]:
                yield memory.request(what, tensor, tensor.bytes)
                taken.append(tensor.bytes)
    memory.free(*taken)


def loading(tensors: Sequence[Tensor]) -> Iterator[Event]:
    """The requests of `model.to(device)`, in order."""
    allocated = 0
    for tensor in tensors:
        if not tensor.tied_to:
            yield Event(wire.LOAD, "weights", tensor, tensor.bytes, allocated)
            allocated += counted(tensor.bytes)


def gradients(tensors: Sequence[Tensor]) -> Iterator[Event]:
    """The gradients of a first backward, last parameter first. `stands` is a lower bound: it excludes activations."""
    allocated = sum(counted(t.bytes) for t in tensors)
    for tensor in reversed([t for t in tensors if t.trainable and not t.tied_to]):
        yield Event(wire.BACKWARD, "gradient", tensor, tensor.bytes, allocated)
        allocated += counted(tensor.bytes)


def peak(tensors: Sequence[Tensor], recipe: Recipe, way: str) -> int:
    """Peak of allocated bytes in the first step; later steps peak no higher."""
    events = step(tensors, recipe, way)
    return max((event.allocated_before + counted(event.bytes) for event in events), default=standing(tensors, recipe))
