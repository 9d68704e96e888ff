"""Finds where an allocation fails: the user's line, the running module, parameters of the requested size.

Reads live frames in the thread that asked, before the exception exists. Keeps no frame and no tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from gpumon_agent import frames, wire
from gpumon_agent.storages import elements

if TYPE_CHECKING:
    from torch.nn import Module

STACK_MAX = 24  # frames reported
SAME_SIZE_MAX = 8
SEGMENT_BYTES = 2 << 20  # the allocator rounds its requests to the driver up to this
LARGE_BYTES = 20 << 20  # up to here a segment serves tensors of many sizes


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
        module=_module(own, models),
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
