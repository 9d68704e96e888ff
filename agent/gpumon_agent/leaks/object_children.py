"""The children of an object by its type, with labels for names.

Returned lists hold strong references: use them within one slice only.
"""

from __future__ import annotations

import builtins
import functools
import gc
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Size, Tensor, device, dtype

from gpumon_agent import frames, source_lines, wire
from gpumon_agent.frames import Place
from gpumon_agent.guard import pass_on
from gpumon_agent.naming import instance_dict, place

ATOM, TENSOR, SEQUENCE, DICT, DEQUE, SET, PAIRS, REFERENTS, CLASS, FUNCTION, BUILTIN, MODULE = range(12)
"""How an object's children are read. ATOM: no relevant children."""

Child = tuple[str, str, Any]
"""label ("[*]", ".values", ".closure(kept)"), kind of holder or "", object"""

_FUNCTIONS = (types.FunctionType,)
FRAMES = (types.FrameType,)
CACHE = type(functools.lru_cache(lambda: None))
_HAS_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: instances can hold references
_OURS = str(Path(__file__).parents[1])  # the whole package
_EXACT: dict[type, int] = {
    **dict.fromkeys(
        (
            int, float, complex, bool, str, bytes, bytearray, range, slice, memoryview, type(None), type(Ellipsis),
            type(NotImplemented), types.CodeType, types.GetSetDescriptorType,
            types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
            types.MemberDescriptorType, weakref.ref, weakref.KeyedRef, weakref.ProxyType, weakref.CallableProxyType,
            weakref.WeakMethod, Size, dtype, device, logging.Manager,  # hundreds of libraries' loggers
        ),
        ATOM,
    ),
    list: SEQUENCE,
    tuple: SEQUENCE,
    dict: DICT,
    deque: DEQUE,
    set: SET,
    frozenset: SET,
    types.FunctionType: FUNCTION,
    types.MethodType: PAIRS,
    types.BuiltinFunctionType: BUILTIN,
    types.MethodWrapperType: BUILTIN,
    types.GeneratorType: PAIRS,
    types.CoroutineType: PAIRS,
    types.AsyncGeneratorType: PAIRS,
    types.TracebackType: PAIRS,
    types.FrameType: PAIRS,
    types.CellType: PAIRS,
    functools.partial: PAIRS,
    CACHE: PAIRS,
    type: CLASS,
    types.ModuleType: MODULE,
}  # fmt: skip


PLAIN = frozenset(kind for kind, layout in _EXACT.items() if layout in (SEQUENCE, DICT, DEQUE, SET))
_CONTAINERS = tuple((kind, layout) for kind, layout in _EXACT.items() if kind in PLAIN)


def how(kind: type) -> int:
    known = _EXACT.get(kind)
    if known is not None:
        return known
    if issubclass(kind, Tensor):
        return TENSOR
    for base, found in _CONTAINERS:
        if issubclass(kind, base):  # includes our own hook dicts: they contain the user's hooks
            return found
    if issubclass(kind, type):
        return CLASS
    if issubclass(kind, (BaseException, functools.partial)):
        return PAIRS
    if issubclass(kind, types.ModuleType):
        return MODULE
    if not kind.__flags__ & _HAS_GC or issubclass(kind, (weakref.ref, int, float, str, bytes)):
        return ATOM
    if str(getattr(kind, "__module__", "")).partition(".")[0] == "gpumon_agent":
        return ATOM
    return REFERENTS


class Files:
    """Decides by module or file whether code is the user's: not Python's, an installed package's, or ours."""

    def __init__(self) -> None:
        self._modules: dict[str, bool] = {}
        self._files: dict[str, bool] = {}

    def users_module(self, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        known = self._modules.get(name)
        if known is None:
            top = name.partition(".")[0]
            known = self._modules.get(top)
            if known is None or (known and top != name):  # all submodules of an installed package are installed
                file = vars(sys.modules.get(name, builtins)).get("__file__")
                interactive = name == "__main__"  # no file in a notebook, nor with -c
                known = interactive or (isinstance(file, str) and self.users_file(file))
            self._modules[name] = known
        return known

    def users_file(self, file: str) -> bool:
        known = self._files.get(file)
        if known is None:
            known = self._files[file] = not (file.startswith(_OURS) or frames.is_installed(file))
        return known


def ours(code: types.CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


# ---------------------------------------------------------------------------------------------------------- children


def children(thing: Any) -> list[Child]:
    """Children of a PAIRS object, in an order that is stable while the object does not change."""
    kind = type(thing)
    if kind in _FUNCTIONS:
        return _of_function(thing)
    if kind in FRAMES:
        return _of_frame(thing)
    if kind is types.MethodType:
        return [(".__self__", "", thing.__self__), ("", "", thing.__func__)]
    if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
        held = thing.__self__
        return [] if isinstance(held, types.ModuleType) else [(".__self__", "", held)]
    if kind is types.GeneratorType:
        return [(".gi_frame", "generator", thing.gi_frame), ("", "", thing.gi_yieldfrom)]
    if kind is types.CoroutineType:
        return [(".cr_frame", "generator", thing.cr_frame), ("", "", thing.cr_await)]
    if kind is types.AsyncGeneratorType:
        return [(".ag_frame", "generator", thing.ag_frame), ("", "", thing.ag_await)]
    if kind is types.TracebackType:
        frame = thing.tb_frame
        return [
            (f".tb({frame.f_code.co_name}:{thing.tb_lineno})", "traceback", frame),
            ("", "", thing.tb_next),
        ]
    if kind is types.CellType:
        try:
            return [("", "", thing.cell_contents)]
        except ValueError as error:  # empty
            pass_on(error)
            return []
    if isinstance(thing, functools.partial):
        held = [(f".args[{at}]", "", each) for at, each in enumerate(thing.args)]
        return [(".func", "", thing.func), *held, (".keywords", "", thing.keywords)]
    if isinstance(thing, BaseException):
        return _of_exception(thing)
    return []


def again(thing: Any, at: int, identity: int) -> Any:
    """The child that had this position and id in the last slice, found without listing all children: resuming a walk
    must not use up the slice. None: list all children."""
    kind = type(thing)
    if kind is CACHE:
        return next((each for each in gc.get_referents(thing) if id(each) == identity), None)
    if kind in _FUNCTIONS:
        for cell in thing.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError as error:  # empty
                pass_on(error)
                continue
            if id(value) == identity:
                return value
    elif issubclass(kind, type):
        value = next(islice(vars(thing).values(), at, None), None)
        return value if id(value) == identity else None
    return None


def _of_function(function: Any) -> list[Child]:
    code = function.__code__
    if ours(code):
        return []
    found: list[Child] = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            found.append((f".closure({name})", "closure", cell.cell_contents))
        except ValueError as error:  # empty cell
            pass_on(error)
            continue
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    found += [(f".default({name})", "default", value) for name, value in zip(names, defaults, strict=False)]
    for name, value in (function.__kwdefaults__ or {}).items():
        found.append((f".default({name})", "default", value))
    if len(found) or code.co_filename[:1] != "<":
        # reading function.__dict__ would create it
        known = (function.__globals__, function.__kwdefaults__)
        for each in gc.get_referents(function):
            if type(each) is dict and each and not any(each is k for k in known) and "__builtins__" not in each:
                if "__import__" in each or each is function.__annotations__:
                    continue
                found += [(f".{name}", "attribute", value) for name, value in each.items() if name != "__wrapped__"]
                if "__wrapped__" in each:
                    found.append(("", "", each["__wrapped__"]))
    return found


def has_attributes(function: Any) -> bool:
    """Whether attributes were set on a function (`step.losses = []`); reads no `__dict__`, which would create one."""
    return any(
        type(each) is dict and each and each is not function.__globals__ and "__import__" not in each
        for each in gc.get_referents(function)
    )


def _of_exception(error: BaseException) -> list[Child]:
    return [
        ("", "", error.__traceback__),
        (".__cause__", "", error.__cause__),
        (".__context__", "", error.__context__ if error.__context__ is not error.__cause__ else None),
        (".args", "", error.args),
        ("", "", next((each for each in gc.get_referents(error) if type(each) is dict), None)),
    ]


def cached(cache: Any) -> tuple[list[Any], list[tuple[str, str]]]:
    """Children of a functools.lru_cache, and the (label, tag) of each: its dict, or with a `maxsize` its links. All are
    read in one piece, so the work per entry is minimal; with a `maxsize`, more than 2,000 entries are skipped."""
    function = getattr(cache, "__wrapped__", None)
    info = cache.cache_info()
    if info.maxsize is not None and info.currsize > _REMEMBERED_MAX:
        return [function], [("", "")]
    own = instance_dict(cache)
    if info.maxsize is None:
        found = [each for each in gc.get_referents(cache) if type(each) is dict and each is not own]
        word = ".cache"
    else:
        found = [
            each
            for each in gc.get_referents(cache)
            if each is not function and each is not own and type(each) is not type
        ]
        word = ".cache[*]"
    return [*found, function], [*[(word, "cache")] * len(found), ("", "")]


_REMEMBERED_MAX = 2_000
FEW = 4  # more hooks, or keys of one dict, share one name


def _of_frame(frame: types.FrameType) -> list[Child]:
    """A frame's local variables, in the order of its code object."""
    code = frame.f_code
    if ours(code):
        return []
    values = frames.variables(frame)
    names = (*code.co_cellvars, *code.co_varnames, *code.co_freevars)  # cellvars: used by closures
    return [(f".{name}", "", values[name]) for name in dict.fromkeys(names) if name in values]


def code_around(owner: Any) -> tuple[str | None, Callable[[str], Any]]:
    """The source file of `owner` (a frame, a module's globals or an instance), and a lookup of names used there."""
    if isinstance(owner, types.FrameType):
        known = {label.lstrip("."): value for label, _, value in _of_frame(owner)}
        return owner.f_code.co_filename, lambda name: known.get(name, owner.f_globals.get(name))
    if isinstance(owner, dict):  # a module's
        file = owner.get("__file__")
        return file if isinstance(file, str) else None, owner.get
    module = sys.modules.get(type(owner).__module__)
    file = getattr(module, "__file__", None)
    values = instance_dict(owner) or {}

    def of_self(name: str) -> Any:
        first, _, rest = name.partition(".")
        return values.get(rest) if first == "self" else vars(module).get(name)

    return file if isinstance(file, str) else None, of_self


def class_line(kind: type) -> Place | None:
    """The line of a class; before Python 3.13 the line of its first method. None: it has no methods."""
    first = vars(kind).get("__firstlineno__")  # since Python 3.13
    codes = [code for value in vars(kind).values() if (code := getattr(value, "__code__", None)) is not None]
    codes = [code for code in codes if isinstance(code, types.CodeType)]
    if not codes:
        return None
    code = min(codes, key=lambda each: each.co_firstlineno)
    return place(code, first if isinstance(first, int) else None)


def tensor_children(tensor: Any) -> list[Child]:
    """Hooks and attributes of a tensor. Tensors saved for backward are counted with its graph."""
    found: list[Child] = []
    for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
        if hooks:
            label = f".gradient hook{among(len(hooks))}"
            found += [(label, "hook", hook) for hook in list(hooks.values())]
    return found + [(f".{name}", "attribute", value) for name, value in attributes(tensor).items()]


def attributes(tensor: Any) -> dict[str, Any]:
    """Attributes set on a tensor (`parameter.norms = []`). Reading tensor.__dict__ would create it."""
    return next((each for each in gc.get_referents(tensor) if type(each) is dict), {})


def among(hooks: int) -> str:
    """A suffix: "[*]" if there are many hooks, which then share a label, else nothing."""
    return "[*]" if hooks > FEW else ""


# ------------------------------------------------------------------------------------------------------------- names


def attribute(owner: Any, child: Any) -> str | None:
    """The attribute under which the instance `owner` holds `child`, or None."""
    values = instance_dict(owner)
    if values is not None:
        for name, value in values.items():
            if value is child:
                return str(name)
    for kind in type(owner).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    if slot.__get__(owner) is child:
                        return name
                except AttributeError as error:  # not set
                    pass_on(error)
                    continue
    return None


class Name(NamedTuple):
    text: str
    kind: str
    where: Place | None
    function: str | None = None  # of the variable that `text` begins with

    @property
    def key(self) -> str:
        """Distinguishes equal variable names in different functions."""
        return f"{self.text}@{self.function}"

    def holder(self, count: int) -> wire.Holder:
        where = None if self.where is None else str(self.where)
        return wire.Holder(self.text, self.kind, where, count, self.function, source_lines.text(self.where))


PAIRED = frozenset(kind for kind, layout in _EXACT.items() if layout in (PAIRS, FUNCTION, BUILTIN))


def code_of(thing: Any) -> types.CodeType | None:
    kind = type(thing)
    if kind in _FUNCTIONS:
        code: types.CodeType = thing.__code__
        return code
    return thing.f_code if kind in FRAMES else None
