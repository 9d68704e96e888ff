"""Finds where an allocation fails: the user's line, the running module, parameters of the requested size.

Reads live frames in the thread that asked, before the exception exists. Keeps no frame and no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gpumon_agent import frames, wire
from gpumon_agent.storages import elements

if TYPE_CHECKING:
    from torch.nn import Module

STACK_MAX = 24  # frames reported
SAME_SIZE_MAX = 8
CASTS_MAX = 3  # between a parameter and the operator that takes it: autocast's copy, a transposition, a view
SEGMENT_BYTES = 2 << 20  # the allocator rounds its requests to the driver up to this
LARGE_BYTES = 20 << 20  # up to here a segment serves tensors of many sizes


_operator: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)  # since torch 2.1


class FailureSite(NamedTuple):
    """Texts and numbers only."""

    where: frames.Place | None = None
    module: str | None = None
    stack: tuple[str, ...] = ()  # "file.py:LINE in function", outermost first


def read(models: Iterable[Module], training_thread: int) -> FailureSite:
    """The current failure site. In backward an engine thread allocates while the training thread waits."""
    own = stack = [*frames.outwards(sys._getframe(1))]
    if all(_installed(frame) for frame in own):
        waiting = sys._current_frames().get(training_thread)
        stack = own + ([*frames.outwards(waiting)] if waiting is not None else [])
    user = next((frame for frame in stack if not _installed(frame)), None)
    return FailureSite(
        where=user and frames.place(user),
        module=_module(own, models) or _in_backward(models),
        stack=tuple(f"{frames.place(frame)} in {frame.f_code.co_name}" for frame in reversed(stack[:STACK_MAX])),
    )


def same_size(models: Iterable[Module], requested: int) -> tuple[wire.Sized, ...]:
    """Parameters for which the allocator would ask the driver for `requested` bytes.

    Empty up to `LARGE_BYTES`: small tensors share segments.
    """
    if requested <= LARGE_BYTES:
        return ()
    found = []
    for model in models:
        for path, parameter in model.named_parameters():
            count, width = elements(parameter), parameter.element_size()
            if requested - SEGMENT_BYTES < count * width <= requested:
                found.append(wire.Sized(path, tuple(parameter.shape), width, parameter.requires_grad))
                if len(found) == SAME_SIZE_MAX:
                    return tuple(found)
    return tuple(found)


def _installed(frame: FrameType) -> bool:
    return frames.is_installed(frame.f_code.co_filename)


def _in_backward(models: Iterable[Module]) -> str | None:
    """The module whose backward runs in this thread: the operator took its parameters, directly or cast or transposed.

    Of several modules the innermost that contains them all; None for an operator without parameters.
    """
    operator = _operator() if _operator is not None else None
    used = set(_parameters(operator)) if operator is not None else set()
    paths = [
        path.rpartition(".")[0] or type(model).__name__
        for model in models
        for path, parameter in model.named_parameters()
        if used and id(parameter) in used
    ]
    if len(paths) < 2:
        return paths[0] if paths else None
    names = [path.split(".") for path in paths]
    common = [at[0] for at in takewhile(lambda at: len(set(at)) == 1, zip(*names, strict=False))]
    return ".".join(common) or None


def _parameters(operator: Any) -> Iterator[int]:
    """ids of the parameters whose gradients it, or one of its inputs, makes."""
    for each in (operator, *(before for before, _ in operator.next_functions)):
        for _ in range(CASTS_MAX + 1):
            parameter = getattr(each, "variable", None)
            if parameter is not None:
                yield id(parameter)
            if parameter is not None or each is None or len(each.next_functions) != 1:
                break
            each = each.next_functions[0][0]


def _module(stack: Iterable[FrameType], models: Iterable[Module]) -> str | None:
    """Path of the innermost module called; its class if no watched model contains it."""
    for frame in stack:
        if frame.f_code.co_name == "_call_impl" and frame.f_code.co_filename.endswith("module.py"):
            called = frames.variables(frame).get("self")
            if called is None:
                continue
            for model in models:
                for path, module in model.named_modules():
                    if module is called:
                        return path or type(called).__name__
            return type(called).__name__
    return None
