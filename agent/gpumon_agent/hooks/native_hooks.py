"""Hooks of idle steps, compiled (quiet_hooks.cpp). They take a quarter of the time that those in Python take.

In a step that is read they take *notes*: the allocator's figures at the end of each phase.

They read a call's arguments in the frame of `Module._call_impl`, and a tensor's shape in its TensorImpl: where both are
is found out once, and a forward of a model of ours must then give the right answers.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import sysconfig
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch.nn.modules import module as modules

from gpumon_agent import compiled, frames
from gpumon_agent.guard import pass_on
from gpumon_agent.noted import NOTE_WORDS, Taken
from gpumon_agent.quiet_mark import (
    A_STEP,
    FITTING_MAX,
    IN_BACKWARD,
    IN_BETWEEN,
    IN_FORWARD,
    NEVER_NS,
    TIMES_MAX,
    Hooks,
    QuietMark,
    Shaped,
    Shapes,
)
from gpumon_agent.storages import impl_at
from gpumon_agent.wire import FORWARD

CALL = modules.Module._call_impl.__code__
INNER = next((each for each in CALL.co_consts if isinstance(each, CodeType) and each.co_name == "inner"), None)
"""of the function in it that calls hooks"""
NOTES_MAX = 1024
ENDS_MAX = 64  # read before Python takes them
EVERY_MODULES = tuple(
    vars(modules)[f"_global_{name}_hooks"] for name in ("backward_pre", "backward", "forward", "forward_pre")
)
_ENTER, _BEGIN, _CLOSE, _LEAVE = range(4)  # of `methods` in quiet_hooks.cpp
_PLAIN = (type(None), bool, int, float, str)
_SLOTS = 2 * FITTING_MAX  # a power of two
_HASH_BITS = 64
_Whole: Any = ctypes.c_int64 * 3


class NativeMark(ctypes.Structure, QuietMark):
    """A QuietMark that C++ reads and writes, too."""

    _closed: int
    _ended: int
    _fields_ = [
        ("_word_at", ctypes.c_void_p),
        ("_called_at", ctypes.c_void_p),
        ("heard", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("only", ctypes.c_uint64),
        ("left", ctypes.c_int64),
        ("due_ns", ctypes.c_int64),
        ("ends_due_ns", ctypes.c_int64),
        ("passed", ctypes.c_int64),
        ("_closed", ctypes.c_int64),
        ("idle", ctypes.c_bool),
        ("evaluates", ctypes.c_bool),
        ("notes", ctypes.c_bool),
        ("engine", ctypes.c_bool),
        ("stepping", ctypes.c_bool),
        ("root", ctypes.c_uint64),
        ("_owner", ctypes.c_uint64),
        ("_device", ctypes.c_int64),
        ("_peaks", ctypes.c_void_p),
        ("noted", ctypes.c_int64),
        ("ends_every_ns", ctypes.c_int64),
        ("_ends_device", ctypes.c_int64),
        ("_ended", ctypes.c_int64),
        ("_ends", ctypes.c_int64 * (3 * ENDS_MAX)),
        ("_closed_ns", ctypes.c_int64 * TIMES_MAX),
        ("_hashes", ctypes.c_uint64 * _SLOTS),  # 0: free
        ("_notes", ctypes.c_int64 * (NOTES_MAX * NOTE_WORDS)),
    ]

    def __init__(self, library: _Library, *, can_note: bool = False) -> None:
        ctypes.Structure.__init__(self)
        self._library, self._can_note = library, can_note
        self._known = 0  # of `_hashes`
        self._shapes: Shaped = {}
        self._whole = _Whole()
        self.ends_due_ns, self._ends_device = NEVER_NS, -1
        self._put_in(array("Q", (0, 0)), 0, 1)

    def _put_in(self, words: Any, at: int, called_at: int) -> None:
        self._word_at, self._called_at = (  # first: those before are freed below
            ctypes.addressof(ctypes.c_uint64.from_buffer(words, each * words.itemsize)) for each in (at, called_at)
        )
        QuietMark._put_in(self, words, at, called_at)

    def pass_step(self, now: int) -> bool:
        closed = self._closed
        self._closed_ns[min(closed, TIMES_MAX - 1)] = now
        self._closed = min(closed + 1, TIMES_MAX)
        self.passed = 0
        self.left -= 1
        self.step += A_STEP
        self.enter(IN_BETWEEN)
        return self._is_due(now)

    @property
    def times(self) -> Sequence[int]:
        return list(self._closed_ns[: self._closed])

    @property
    def uncounted(self) -> int:
        return self._closed

    @property
    def closed_ns(self) -> int:
        newest: int = self._closed_ns[self._closed - 1]
        return newest

    def forget_times(self) -> None:
        self._closed = 0

    # ---------------------------------------------------------------------------------------- what is allocated at ends

    def read_ends(self, every_ns: int, device: int | None) -> None:
        QuietMark.read_ends(self, every_ns, device)
        self._ends_device = -1 if device is None else device

    @property
    def reads_ends(self) -> bool:
        return self._ends_device >= 0

    def take_ends(self) -> Iterator[tuple[int, int, int, int]]:
        count, self._ended = self._ended, 0
        taken = self._ends[: 3 * count]
        return zip(taken[::3], repeat(self._ends_device), taken[1::3], taken[2::3], strict=False)

    # -------------------------------------------------------------------------------- shapes of batches known to fit

    def fit(self, shapes: Shapes) -> None:
        if self._known >= FITTING_MAX:
            self.forget_shapes()
        at, found = self._find(shapes)
        if not self._hashes[at]:
            self._hashes[at] = found
            self._known += 1
            self._shapes[_signed(found)] = tuple(map(tuple, shapes))

    def fits(self, shapes: Shapes) -> bool:
        at, _ = self._find(shapes)
        return bool(self._hashes[at])

    def forget_shapes(self) -> None:
        ctypes.memset(self._hashes, 0, ctypes.sizeof(self._hashes))
        self._known = 0
        self._shapes = {}  # notes that were taken keep theirs

    def _find(self, shapes: Shapes) -> tuple[int, int]:
        """(where their hash is, or would be put; their hash)"""
        found = hashed(number for shape in shapes for number in (len(shape), *shape)) or 1
        at = found * _SLOTS >> _HASH_BITS
        while self._hashes[at] not in (0, found):
            at = (at + 1) % _SLOTS
        return at, found

    # --------------------------------------------------------------------------------------------------------- notes

    def can_note(self) -> bool:
        return self._can_note

    def begin_notes(self, device: int, peaks: Any) -> None:
        self._device, self._peaks = device, ctypes.addressof(peaks)
        self._held = peaks  # in memory
        self._owner = get_ident()
        self.root, self.engine, self.stepping = 0, False, False
        self.notes = True

    def take_notes(self) -> Taken:
        words = self._library.take_notes(ctypes.byref(self), self._whole)
        phases, steps, alike = self._whole
        return Taken(words, phases, steps, alike, self._shapes)

    # ---------------------------------------------------------------------------------------------------- for the hooks

    def kind_of_hooks(self, python: type[Hooks]) -> type[Hooks]:
        return self._library.kind(python)

    def ask(self, hooks: Any, model: weakref.ref[Any], *, begins: bool) -> None:
        hooks.bound = self._bound(IN_FORWARD, model, begins=begins)
        self._library.bind(hooks, hooks.bound)

    def ask_no_more(self, hooks: Any) -> None:
        self._library.bind(hooks, None)

    def enters(self, code: int) -> Callable[[], int]:
        made: Callable[[], int] = self._made(_ENTER, code)
        return made

    def leaves(self) -> Callable[[], bool]:
        made: Callable[[], bool] = self._made(_LEAVE, IN_BACKWARD)
        return made

    def begins(self, code: int) -> Callable[[Any], bool]:
        made: Callable[[Any], bool] = self._made(_BEGIN, code)
        return made

    def closes(self) -> Callable[[Any], int]:
        made: Callable[[Any], int] = self._made(_CLOSE)
        return made

    def _made(self, which: int, code: int = 0) -> Any:
        return self._library.hook(which, self._bound(code))

    def _bound(self, code: int, model: object = None, *, begins: bool = False) -> Any:
        return self._library.bound(self, ctypes.addressof(self), model, code, begins)


def hashed(numbers: Iterable[int]) -> int:
    """As FNV-1a, but of 64-bit words, and with a multiplier that mixes the upper bits well (Knuth, TAOCP 6.4)."""
    found = 0xCBF29CE484222325
    for number in numbers:
        found = (found ^ number) * 0x9E3779B97F4A7C15 & (1 << _HASH_BITS) - 1
    return found


def _signed(word: int) -> int:
    return word - (1 << _HASH_BITS) if word >> _HASH_BITS - 1 else word


def load() -> Callable[[], NativeMark] | None:
    """Makes marks. None: the functions were not built, or cannot be used here."""
    if sysconfig.get_config_var("Py_GIL_DISABLED") or modules._has_any_global_hook():  # they would see our modules
        return None
    found = compiled.load()
    if found is None:
        return None
    try:
        library = _Library(found)
    except (AttributeError, LookupError) as error:
        pass_on(error)
        return None
    if not _is_right(NativeMark(library)):
        return None
    can_note = INNER is not None and _finishes(NativeMark(library))
    return functools.partial(NativeMark, library, can_note=can_note)


class _Library:
    """The functions of quiet_hooks.cpp."""

    def __init__(self, found: ctypes.PyDLL) -> None:
        """Raises LookupError if something is not where it is expected, AttributeError if a function is missing."""
        self.hook = _function(found.gpumon_hook, ctypes.py_object, ctypes.c_int, ctypes.py_object)
        about = (ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_uint64, ctypes.c_bool)
        self.bound = _function(found.gpumon_bound, ctypes.py_object, *about)
        self.bind = _function(found.gpumon_bind, None, ctypes.py_object, ctypes.py_object)
        self.take_notes = _function(found.gpumon_take_notes, ctypes.py_object, ctypes.c_void_p, _Whole)
        self._derive = _function(found.gpumon_hook_dict, ctypes.py_object, ctypes.py_object)
        self._kinds: dict[type, Any] = {}
        size = _function(found.gpumon_mark_bytes, ctypes.c_uint64)
        layout = frames.call_layout(CALL)
        same = (size(), _Asks.__basicsize__) == (ctypes.sizeof(NativeMark), OrderedDict.__basicsize__)
        if not same or layout is None:
            raise LookupError("another layout")
        slots, array_in, array_at = layout
        know = _function(found.gpumon_know, None, ctypes.py_object, ctypes.c_int * 3, *[ctypes.c_int] * 4)
        objects = (CALL, INNER, "training", torch.Tensor, *_PLAIN, *EVERY_MODULES, *frames.CALL, "asks")
        know(objects, (ctypes.c_int * 3)(*slots), array_in, array_at, impl_at(), OrderedDict.__basicsize__)

    def kind(self, python: type[Hooks]) -> type[Hooks]:
        """A subclass whose bool() C++ answers. A compiler that traces it finds that of `python`."""
        if python not in self._kinds:
            kind = self._kinds[python] = self._derive((python,))
            (attributes,) = gc.get_referents(vars(kind))  # a class's own setattr would replace what C++ does
            attributes["__bool__"] = python.__bool__  # type: ignore[attr-defined]
            kind.__doc__ = python.__doc__  # also makes Python forget what it has looked up in the class
        made: type[Hooks] = self._kinds[python]
        return made


def _function(found: Any, result: Any, *arguments: Any) -> Any:
    found.restype, found.argtypes = result, list(arguments)
    return found


class _Asks(OrderedDict[int, Any]):
    """A module's hook dict whose bool() C++ answers, or this."""

    bound: object = None
    asked = False

    def asks(self) -> bool:
        self.asked = True
        return False

    __bool__ = asks


def _is_right(mark: NativeMark) -> bool:
    """Whether calls of a module of ours are told apart as they should be."""
    hooks = mark.kind_of_hooks(_Asks)({0: None})
    models = [torch.nn.Module(), torch.nn.Module()]
    for model in models:
        vars(model)["forward"] = lambda *_, **__: None
        vars(model)["_forward_pre_hooks"] = hooks
    first, other = models
    mark.ask(hooks, weakref.ref(first), begins=True)
    square: Any
    square, row = torch.empty(3, 3, device="cpu"), torch.empty(5, device="cpu")
    mark.begin(7)
    mark.fit(((3, 3), (5,)))

    def answers(model: Any, *args: Any, **kwargs: Any) -> bool:
        hooks.asked = False
        modules.Module._call_impl(model, *args, **kwargs)  # a program may have replaced `__call__`
        return not hooks.asked

    with torch.enable_grad():
        knows = not answers(first, square, row)
        mark.idle = True
        knows = knows and answers(first, square, None, row=row) and answers(first, 1, square, row, "text")
        for args in [(row, square), (square,), (square, row, row), (square, row, b"")]:
            knows = knows and not answers(first, *args)
        knows = knows and not answers(first, square, row, more=row) and not answers(other, square, row)
    return knows and mark.passed == 2 and mark.read() == (7, FORWARD)


class _Asked(OrderedDict[int, Any]):
    """A module's hook dict that knows where torch asks it for its bool()."""

    def __init__(self) -> None:
        super().__init__()
        self.by: list[CodeType] = []

    def __bool__(self) -> bool:
        self.by.append(sys._getframe(1).f_code)
        return len(self.by) == 1


class _Finishes(_Asks):
    """One that knows whether torch looks for hooks to call."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return ()


def _finishes(mark: NativeMark) -> bool:
    """Whether torch asks for hooks where notes can be taken, before a forward and after it, and C++ answers right."""
    model, asked, hooks = torch.nn.Module(), _Asked(), mark.kind_of_hooks(_Finishes)({0: None})
    vars(model)["forward"] = lambda *_: None
    vars(model)["_forward_hooks"] = asked
    modules.Module._call_impl(model)
    vars(model)["_forward_hooks"] = hooks
    mark.ask(hooks, weakref.ref(model), begins=False)
    mark.idle = mark.notes = True
    mark._owner, mark.noted = get_ident(), NOTES_MAX  # there is no room for another note
    looks = []
    for running in (id(model), id(mark)):
        mark.root = running
        modules.Module._call_impl(model)
        looks.append(hooks.looks)
    mark.noted = 0
    return asked.by == [CALL, INNER] and looks == [1, 1] and not hooks.asked
