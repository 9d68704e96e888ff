"""Where the process stands as an allocation fails: the user's line, the module that runs, parameters of that size.

Read in the thread that asked, before the exception exists, from live frames. Nothing is kept: no frame, no tensor. On
Python 3.11 reading `f_locals` leaves a dict of references in the frame, so it is cleared at once.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from gpumon_agent import wire
from gpumon_agent.ledger.storages import elements

if TYPE_CHECKING:
    from torch.nn import Module

FRAMES_MAX = 200  # looked at, outwards from the allocation
STACK_MAX = 24  # told
SAME_SIZE_MAX = 8
SEGMENT_BYTES = 2 << 20  # the allocator rounds what it asks the driver for up to this
LARGE_BYTES = 20 << 20  # up to here a segment serves tensors of many sizes

_OURS = str(Path(__file__).parents[1])  # of the whole package
_INSTALLED = tuple(
    {path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))}
)


class Scene(NamedTuple):
    """What was found. Texts and numbers only."""

    where: str | None = None  # file.py:LINE
    module: str | None = None
    stack: tuple[str, ...] = ()  # "file.py:LINE in function", outermost first


def read(models: Iterable[Module], training_thread: int) -> Scene:
    """The scene of this moment. In backward the engine asks from a thread of its own, the training thread waits."""
    own = [*_frames(sys._getframe(1))]
    frames = own
    if all(_installed(frame) for frame in own):
        waiting = sys._current_frames().get(training_thread)
        frames = own + ([*_frames(waiting)] if waiting is not None else [])
    user = next((frame for frame in frames if not _installed(frame)), None)
    return Scene(
        where=None if user is None else _place(user),
        module=_module(own, models),
        stack=tuple(f"{_place(frame)} in {frame.f_code.co_name}" for frame in reversed(frames[:STACK_MAX])),
    )


def users_line() -> str | None:
    """file.py:LINE of the innermost of the user's own code that runs in this thread."""
    user = next((frame for frame in _frames(sys._getframe(1)) if not _installed(frame)), None)
    return None if user is None else _place(user)


def same_size(models: Iterable[Module], requested: int) -> tuple[wire.Sized, ...]:
    """Parameters for which the allocator would ask the driver for `requested` bytes.

    Small tensors share segments, so nothing can be told for those.
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


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Innermost first, without ours."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def _installed(frame: FrameType) -> bool:
    return is_installed(frame.f_code.co_filename)


def is_installed(path: str) -> bool:
    """Whether code in this file is Python's own or an installed package's."""
    return path.startswith(("<frozen", *_INSTALLED)) or "site-packages" in path or "dist-packages" in path


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _module(frames: Iterable[FrameType], models: Iterable[Module]) -> str | None:
    """Path of the module whose call is innermost, or its class where no watched model holds it."""
    for frame in frames:
        if frame.f_code.co_name == "_call_impl" and frame.f_code.co_filename.endswith("module.py"):
            values = frame.f_locals
            called = values.get("self")
            if sys.version_info < (3, 13):  # since then it is a view
                values.clear()
            if called is None:
                continue
            for model in models:
                for path, module in model.named_modules():
                    if module is called:
                        return path or type(called).__name__
            return type(called).__name__
    return None
