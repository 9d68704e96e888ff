"""The only frame of ours between a caller and a watched torch function.

The name of this file is intended. `warnings.warn(..., stacklevel=2)` in the watched function means its caller. Python
skips a frame when its file's name contains both "importlib" and "_bootstrap" (`warnings._is_internal_frame`, 3.10 to
3.14), so it skips ours and names the user's line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from gpumon_agent.guard import leave_no_frame, tries_at_once

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
    idle: Callable[[], int] | None = None,
    noted: Callable[[], bool] = bool,
) -> Any:
    """A function that calls `original` between `before` and `after`, but not while `idle()`. If that is 2, `after` is
    called unless `noted()` at the end is enough.

    A frame that runs between two graphs of a compiled function would be compiled too. So the compiler is active in
    `original`, but not in `before` and `after`.
    """
    _, dynamo, swap, _ = compiler

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            token = None
            passed = 0
            try:
                # a compiler that traces this sees only the original
                passed = 0 if idle is None or dynamo() else idle()
                if not passed and not inert():
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
                if token is not None or passed == 2:
                    compiles = swap(None)
                    try:
                        after(token, None, error)
                    finally:
                        swap(compiles)
                raise
            if token is not None or (passed == 2 and not noted()):
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
    idle: Callable[[Any], int] | None = None,
    due: Callable[[], object] = int,
) -> Callable[..., None]:
    """`function` as a hook that compilers trace to nothing and never compile.

    `idle`: called first, with the hook's first argument. If that is enough it returns 1, or 2: call `due`.
    """
    traces, dynamo, swap, _ = compiler

    def hook(*args: Any) -> None:
        try:
            passed = 0 if idle is None or dynamo() else idle(args[0])
            if passed == 1 or (not passed and traces()):
                return
            compiles = swap(None)
            try:
                if passed:
                    due()
                else:
                    function(*args)
            finally:
                swap(compiles)
        except BaseException as error:  # the user's: what a signal handler raises, or a listener
            leave_no_frame(error, called_nothing=True)
            raise

    tries_at_once(hook)
    compiler.skip(_code(hook))
    return hook
