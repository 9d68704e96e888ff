"""The roots of a census: running functions, modules, models, hooks, other threads. The user's own names come first."""

from __future__ import annotations

import builtins
import contextvars
import functools
import re
import sys
import threading
from collections.abc import Iterable
from types import CodeType, FrameType, ModuleType
from typing import Any

from gpumon_agent.frames import Place
from gpumon_agent.leaks.bounded_containers import source
from gpumon_agent.leaks.heap_walker import Root
from gpumon_agent.leaks.object_children import Files, ours
from gpumon_agent.naming import place, stored_at

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    "_global_module_registration_hooks", "_global_parameter_registration_hooks", "_global_buffer_registration_hooks",
)  # fmt: skip


def of_the_user(files: Files, modules: Iterable[str]) -> list[Root]:
    """Running functions of this thread (outermost first), their modules and the main one, then other user modules.

    `modules`: names of known user modules; the walk finds more.
    """
    stack = [frame for frame in _stack(None) if files.users_file(frame.f_code.co_filename)][::-1]
    main = sys.modules.get("__main__")
    namespaces: dict[int, Root] = {}
    if main is not None:
        namespaces[id(vars(main))] = of_module("__main__")
    frames = []
    for frame in stack:
        code = frame.f_code
        key = id(frame.f_globals)
        if key not in namespaces:
            name = frame.f_globals.get("__name__")
            if isinstance(name, str) and vars(sys.modules.get(name, _EMPTY)) is frame.f_globals:
                namespaces[key] = of_module(name)
            else:  # run by exec or runpy: no module has these globals
                namespaces[key] = Root(
                    functools.partial(_globals_of, None, id(frame), code), named=True, where=_line_in_module(None, code)
                )
        if code.co_name != "<module>":
            frames.append(of_frame(frame, None))
    others = [
        of_module(name)
        for name in modules
        if name != "__main__" and (space := _namespace(name)) is not None and id(space) not in namespaces
    ]
    del stack
    return [*frames, *namespaces.values(), *others]


def beside(files: Files, objects: Iterable[tuple[str, Any]]) -> list[Root]:
    """The other roots: `objects` (name, weak reference), frames of other threads and of installed packages, global
    module hooks, the last and the handled exceptions, context variables, builtins, and threads."""
    found = [Root(reference, prefix=name, kind="attribute") for name, reference in objects]
    for ident in sys._current_frames():
        own = ident == threading.get_ident()
        # no for loop: its variable would end up holding this very frame, a cycle that keeps all callers' tensors alive
        found += [
            of_frame(frame, None if own else ident)
            for frame in list(_stack(None if own else ident))[::-1]
            if not ours(frame.f_code)
            and not (own and files.users_file(frame.f_code.co_filename))
            and frame.f_code.co_name != "<module>"
        ]
    hooks = sys.modules.get("torch.nn.modules.module")
    return [
        *found,
        *(
            Root(functools.partial(getattr, sys, name, None), prefix=f"sys.{name}", kind="traceback")
            for name in ("last_exc", "last_value", "last_traceback")
        ),
        Root(_handled, prefix="the exception being handled", kind="traceback"),
        *(Root(functools.partial(getattr, hooks, name, None), prefix=name, kind="hook") for name in _GLOBAL_HOOKS),
        *(
            Root(functools.partial(_in_context, variable.name), prefix=f"{variable.name}.get()")
            for variable in contextvars.copy_context()
        ),
        Root(lambda: vars(builtins), prefix="builtins.", named=True),
        Root(lambda: threading._active, prefix="threads", kind="attribute"),  # type: ignore[attr-defined]
    ]


def of_module(name: str) -> Root:
    main = name == "__main__"
    code = None
    if main:
        frame = next((f for f in list(_stack(None)) if f.f_code.co_name == "<module>"), None)
        if frame is not None and frame.f_globals is vars(sys.modules["__main__"]):
            code = frame.f_code
    return Root(
        functools.partial(_namespace, name),
        prefix="" if main else f"{name.rpartition('.')[2]}.",
        named=True,
        module=name,
        where=_line_in_module(name, code),
    )


def of_frame(frame: FrameType, ident: int | None) -> Root:
    code = frame.f_code
    own = ""
    if code.co_varnames[:1] == ("self",):
        own = str(getattr(code, "co_qualname", "self")).rpartition(".")[0]  # since Python 3.11

    def where(name: str) -> Place:
        return place(code, stored_at(code, name))

    return Root(
        functools.partial(_frame, ident, id(frame), code),
        function=code.co_name,
        kind="local",
        own=own or "self",
        where=where,
    )


# ------------------------------------------------------------------------------------- found again, slice after slice


_EMPTY = ModuleType("empty")


def _in_context(name: str) -> Any:
    """The value of a context variable of this thread; no Python object leads to it."""
    return next((value for variable, value in contextvars.copy_context().items() if variable.name == name), None)


def _namespace(name: str) -> dict[str, Any] | None:
    module = sys.modules.get(name)
    return vars(module) if isinstance(module, ModuleType) else None


def _globals_of(ident: int | None, identity: int, code: CodeType) -> dict[str, Any] | None:
    frame = _frame(ident, identity, code)
    return None if frame is None else frame.f_globals


def _frame(ident: int | None, identity: int, code: CodeType) -> FrameType | None:
    """The frame with this id and code. Ids of finished frames are reused, even by the frame of this function: a wrong
    match would make a cycle that keeps all callers' tensors alive until the collector runs."""
    return next((frame for frame in _stack(ident) if id(frame) == identity and frame.f_code is code), None)


def _stack(ident: int | None) -> Iterable[FrameType]:
    """Frames, innermost first. `ident`: another thread's; None: the current thread."""
    frame = sys._getframe(1) if ident is None else sys._current_frames().get(ident)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _handled() -> BaseException | None:
    return sys.exc_info()[1]


def _line_in_module(name: str | None, code: CodeType | None) -> Any:
    """A function from a module variable to the line that first assigns it, in the running code or else the source."""

    def where(variable: str) -> Place | None:
        if code is not None:
            line = stored_at(code, variable)
            if line is not None:
                return place(code, line)
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        return _in_source(file, variable) if isinstance(file, str) else None

    return where


def _in_source(file: str, variable: str) -> Place | None:
    lines, name = source(file), re.escape(variable)
    for pattern in (rf"{name}[ \t]*(:[^=\n]+)?=", rf"(?:def|class)[ \t]+{name}\b"):
        for number, line in enumerate(lines, 1):
            if re.match(pattern, line):
                return Place(file, number)
    return None
