"""Hooks of idle steps, compiled (quiet_hooks.cpp). They take a quarter of the time that those in Python take.

In a step that is read they take *notes*: the allocator's figures at the end of each phase.

They read a call's arguments in the frame of `Module._call_impl`, and a tensor's shape in its TensorImpl: where both are
is found out once, and a forward of a model of ours must then give the right answers.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from types import CodeType
from typing import Any

import torch
from torch.nn.modules import module as modules

from gpumon_agent import compiled, frames
from gpumon_agent.guard import pass_on
from gpumon_agent.quiet_mark import (
    A_STEP,
    FITTING_MAX,
    IN_BACKWARD,
    IN_BETWEEN,
    IN_FORWARD,
    TIMES_MAX,
    Note,
    QuietMark,
    Shapes,
    phase_of,
)
from gpumon_agent.storages import impl_at
from gpumon_agent.wire import BOUND, FORWARD

CALL = modules.Module._call_impl.__code__
INNER = next((each for each in CALL.co_consts if isinstance(each, CodeType) and each.co_name == "inner"), None)
"""of the function in it that calls hooks"""
NOTES_MAX = 512
EVERY_MODULES = tuple(
    vars(modules)[f"_global_{name}_hooks"] for name in ("backward_pre", "backward", "forward", "forward_pre")
)
_FORWARD, _ENTER, _BEGIN, _CLOSE, _FINISH, _LEAVE = range(6)  # of `methods` in quiet_hooks.cpp
_PLAIN = (type(None), bool, int, float, str)
_SLOTS = 2 * FITTING_MAX  # a power of two
_HASH_BITS = 64
_FIGURES = 10
_NOTE_WORDS = 5 + _FIGURES
_Notes: Any = ctypes.c_int64 * (NOTES_MAX * _NOTE_WORDS)


class NativeMark(ctypes.Structure, QuietMark):
    """A QuietMark that C++ reads and writes, too."""

    _closed: int
    _fields_ = [
        ("_word_at", ctypes.c_void_p),
        ("step", ctypes.c_uint64),
        ("only", ctypes.c_uint64),
        ("left", ctypes.c_int64),
        ("due_ns", ctypes.c_int64),
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
        ("_closed_ns", ctypes.c_int64 * TIMES_MAX),
        ("_hashes", ctypes.c_uint64 * _SLOTS),  # 0: free
        ("_notes", _Notes),
    ]

    def __init__(self, hook: Any, take: Any, *, can_note: bool = False) -> None:
        """gpumon_hook and gpumon_take_notes of quiet_hooks.cpp."""
        ctypes.Structure.__init__(self)
        self._hook, self._take, self._can_note = hook, take, can_note
        self._known = 0  # of `_hashes`
        self._shapes: dict[int, tuple[tuple[int, ...], ...]] = {}  # by their hash
        self._taken = _Notes()
        self._words = memoryview(self._taken).cast("B").cast("q")
        self._put_in(array("Q", (0,)), 0)

    def _put_in(self, words: Any, at: int) -> None:
        self.words, self.at = words, at
        self._word_at = ctypes.addressof(ctypes.c_uint64.from_buffer(words, at * words.itemsize))

    def pass_step(self, now: int) -> bool:
        closed = self._closed
        self._closed_ns[min(closed, TIMES_MAX - 1)] = now
        self._closed = min(closed + 1, TIMES_MAX)
        self.passed = 0
        self.left -= 1
        self.step += A_STEP
        self.enter(IN_BETWEEN)
        return self.left <= 0 or now >= self.due_ns

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
        self._shapes.clear()

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

    def take_notes(self) -> Iterator[Note]:
        count = self._take(ctypes.byref(self), self._taken)
        words, shapes = self._words, self._shapes
        for at in range(0, count * _NOTE_WORDS, _NOTE_WORDS):
            code, t_ns, found, nbytes, disturbed, *figures = words[at : at + _NOTE_WORDS].tolist()
            read = (*figures, BOUND if disturbed else 0, None)
            yield phase_of(code), t_ns, read, (nbytes, shapes.get(found, ()))

    # ---------------------------------------------------------------------------------------------------- for the hooks

    def forwards(self, model: weakref.ref[Any]) -> Callable[[], bool]:
        made: Callable[[], bool] = self._made(_FORWARD, IN_FORWARD, model)
        return made

    def finishes(self, model: weakref.ref[Any]) -> Callable[[], bool]:
        made: Callable[[], bool] = self._made(_FINISH, IN_FORWARD, model)
        return made

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

    def _made(self, which: int, code: int = 0, argument: object = None) -> Any:
        return self._hook(which, self, ctypes.addressof(self), argument, code)


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
    library = compiled.load()
    if library is None:
        return None
    try:
        make = _maker(library)
    except (AttributeError, LookupError) as error:
        pass_on(error)
        return None
    if not _is_right(make()):
        return None
    return functools.partial(make, can_note=INNER is not None and _finishes(make()))


def _maker(library: ctypes.PyDLL) -> Callable[..., NativeMark]:
    """Raises LookupError if something is not where it is expected, AttributeError if the library lacks a function."""
    hook: Any = library.gpumon_hook
    hook.restype = ctypes.py_object
    hook.argtypes = [ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_uint64]
    size: Any = library.gpumon_mark_bytes
    size.restype = ctypes.c_uint64
    layout = frames.call_layout(CALL)
    if size() != ctypes.sizeof(NativeMark) or layout is None:
        raise LookupError("another layout")
    know: Any = library.gpumon_know
    know.restype = None
    know.argtypes = [ctypes.py_object, ctypes.c_int * 3, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    slots, array_in, array_at = layout
    take: Any = library.gpumon_take_notes
    take.restype = ctypes.c_int64
    take.argtypes = [ctypes.c_void_p, _Notes]
    objects = (CALL, INNER, "training", torch.Tensor, *_PLAIN, *EVERY_MODULES, *frames.CALL)
    know(objects, (ctypes.c_int * 3)(*slots), array_in, array_at, impl_at())
    return functools.partial(NativeMark, hook, take)


class _Asks(dict[Any, Any]):
    """A module's hook dict that only asks."""

    ask: Callable[[], bool]

    def __bool__(self) -> bool:
        self["answer"] = self.ask()
        return False


def _is_right(mark: NativeMark) -> bool:
    """Whether calls of a module of ours are told apart as they should be."""
    asks = _Asks()
    models = [torch.nn.Module(), torch.nn.Module()]
    for model in models:
        vars(model)["forward"] = lambda *_, **__: None
        vars(model)["_forward_pre_hooks"] = asks
    first, other = models
    asks.ask = mark.forwards(weakref.ref(first))
    square: Any
    square, row = torch.empty(3, 3, device="cpu"), torch.empty(5, device="cpu")
    mark.begin(7)
    mark.fit(((3, 3), (5,)))

    def answers(model: Any, *args: Any, **kwargs: Any) -> bool:
        modules.Module._call_impl(model, *args, **kwargs)  # a program may have replaced `__call__`
        return asks.pop("answer") is True

    with torch.enable_grad():
        knows = not answers(first, square, row)
        mark.idle = True
        knows = knows and answers(first, square, None, row=row) and answers(first, 1, square, row, "text")
        for args in [(row, square), (square,), (square, row, row), (square, row, b"")]:
            knows = knows and not answers(first, *args)
        knows = knows and not answers(first, square, row, more=row) and not answers(other, square, row)
    return knows and mark.passed == 2 and mark.read() == (7, FORWARD)


class _Finishes(_Asks):
    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __bool__(self) -> bool:
        self.answers.append(self.ask())
        return self.answers[-1]


def _finishes(mark: NativeMark) -> bool:
    """Whether torch asks for hooks where notes can be taken: before a forward, and after it."""
    model, finishes = torch.nn.Module(), _Finishes()
    vars(model)["forward"] = lambda *_: None
    vars(model)["_forward_hooks"] = finishes
    finishes.ask = mark.finishes(weakref.ref(model))
    mark.notes, mark._owner, mark.noted = True, get_ident(), NOTES_MAX  # there is no room for another note
    for running in (id(model), id(mark)):
        mark.root = running
        modules.Module._call_impl(model)
    mark.noted = 0
    return finishes.answers == [True, True, False]
