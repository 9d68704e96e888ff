"""Makes the traceback of an exception in a model's forward look as it would without hooks.

With hooks, `Module._call_impl` calls the forward from `inner`, which adds a frame to the traceback. Our always-called
forward hook runs while torch handles the exception, and torch re-raises it with the traceback that we set.
Known limitation: torch calls no hook for KeyboardInterrupt and SystemExit.
"""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, TracebackType

from torch.nn import Module
from torch.nn.modules import module as modules

from gpumon_agent.guard import set_traceback

_CALL = Module._call_impl.__code__
_GLOBAL = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def as_without_hooks(module: Module) -> None:
    """Call it in an always-called hook of `module`. Does nothing if the user has hooks."""
    error = sys.exc_info()[1]
    entry = None if error is None else error.__traceback__
    if error is None or entry is None or _users_hooks(module):
        return
    inner, caller = entry.tb_next, entry.tb_frame
    code = caller.f_code
    if inner is None or code is not _CALL:
        return
    if inner.tb_frame.f_code in code.co_consts:  # `inner`; torch 2.4 has none
        inner = inner.tb_next
    place = _direct_call(code)
    if place is None:
        return
    set_traceback(error, TracebackType(inner, caller, *place))


def _users_hooks(module: Module) -> bool:
    own = (hook for name in ("_forward_hooks", "_forward_pre_hooks") for hook in getattr(module, name).values())
    others = module._backward_hooks or getattr(module, "_backward_pre_hooks", None)
    everywhere = (getattr(modules, f"_global_{name}", None) for name in _GLOBAL)
    return bool(others) or any(True for _ in own) or any(everywhere)


@functools.cache
def _direct_call(code: CodeType) -> tuple[int, int] | None:
    """Offset and line of `Module._call_impl`'s call without hooks, its first call with *args."""
    offset = next((i.offset for i in dis.get_instructions(code) if i.opname == "CALL_FUNCTION_EX"), None)
    if offset is None:
        return None
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return None if line is None else (offset, line)
