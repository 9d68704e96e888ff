"""The only frame of ours between a caller and a watched torch function.

The name of this file is intended. `warnings.warn(..., stacklevel=2)` in the watched function means its caller. Python
skips a frame when its file's name contains both "importlib" and "_bootstrap" (`warnings._is_internal_frame`, 3.10 to
3.14), so it skips ours and names the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumon_agent.guard import leave_no_frame, tries_at_once

if TYPE_CHECKING:  # it would load msgspec in processes that only import torch
    from gpumon_agent.quiet_mark import QuietMark

Before = Callable[..., Any]
"""Called with the call's arguments. Its result is passed to `after`; None: `after` is not called."""
After = Callable[[Any, Any, "BaseException | None"], object]
"""token, result, error"""


class Compiler(NamedTuple):
    """torch.compile's own switches, from torch._C."""

    traces: Callable[[], bool]  # a constant for a compiler that traces the caller
    dynamo: Callable[[], bool]  # the same, but False for torch.export's other way of tracing; a third of its time
    swap: Callable[[Any], Any]  # sets this thread's frame compiler and returns the previous one; None: none
    skip: Callable[[Any], None]  # frames of a code object are never compiled


def between(
    original: Callable[..., Any],
    before: Before,
    after: After,
    inert: Callable[[], bool],
    compiler: Compiler,
    mark: QuietMark | None = None,
    code: int = 0,
) -> Any:
    """A function that calls `original` between `before` and `after`; in an idle step it only marks the phase.

    A frame that runs between two graphs of a compiled function would be compiled too. So the compiler is active in
    `original`, but not in `before` and `after`.
    """
    _, dynamo, swap, _ = compiler

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            token = None
            try:
                # a compiler that traces this sees only the original
                if mark is not None and not dynamo() and mark.idle:
                    mark.words[mark.at] = mark.step | code
                elif not inert():
                    compiles = swap(None)
                    try:
                        token = before(*args, **kwargs)
                    finally:
                        swap(compiles)
            except BaseException as error:  # the user's: what a signal handler raises, or a listener
                leave_no_frame(error, called_nothing=True)
                raise
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                if token is not None:
                    compiles = swap(None)
                    try:
                        after(token, None, error)
                    finally:
                        swap(compiles)
                raise
            if token is not None:
                compiles = swap(None)
                try:
                    after(token, result, None)
                finally:
                    swap(compiles)
            return result
        except BaseException as error:
            leave_no_frame(error)
            raise

    tries_at_once(call)
    compiler.skip(_code(call))
    return call


def _code(function: Any) -> Any:
    return function.__code__


def uncompiled(
    function: Callable[..., object],
    compiler: Compiler,
    mark: QuietMark | None = None,
    code: int = 0,
    due: Callable[..., object] | None = None,
) -> Callable[..., None]:
    """`function` as a hook that compilers trace to nothing and never compile.

    With a `mark` it is a hook of optimizers. In an idle step, the one before `optimizer.step` (no `due`) only marks
    the phase, and the one after it ends the step, and calls `due` if something is.
    """
    traces, dynamo, swap, _ = compiler

    def hook(*args: Any) -> None:
        try:
            act = function
            if mark is not None and not dynamo() and mark.idle and mark.only == id(args[0]):
                if due is None:
                    mark.words[mark.at] = mark.step | code
                    return
                if not mark.pass_step(monotonic_ns()):
                    return
                act = due
            elif traces():
                return
            compiles = swap(None)
            try:
                act(*args)
            finally:
                swap(compiles)
        except BaseException as error:  # the user's: what a signal handler raises, or a listener
            leave_no_frame(error, called_nothing=True)
            raise

    tries_at_once(hook)
    compiler.skip(_code(hook))
    return hook
