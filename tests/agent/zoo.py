"""Thirty and more ways in which a script keeps tensors: each of a length of its own, and the name a census should give.

They live where this module puts them; the lines that are asked for are marked in its source with `# line: KEY`. It is
longer than other files, for each way stands for itself.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

COUNT = 12
LENGTHS: dict[str, int] = {}
EXPECTED: dict[str, tuple[str, str]] = {}
"""key → (name, kind)"""


def tensors(key: str, name: str, kind: str, *, count: int = COUNT) -> list[Tensor]:
    """Tensors of a length that no other kind has; the census has to call their holder `name`."""
    LENGTHS[key] = length = 1_000 + len(LENGTHS)
    EXPECTED[key] = name, kind
    return [torch.zeros(length) for _ in range(count)]


RENEWED: list[Tensor] = []
HISTORY = tensors("global list", "zoo.HISTORY[*]", "global")  # line: global list
BY_STEP = dict(enumerate(tensors("global dict", "zoo.BY_STEP[*]", "global", count=40)))
BY_NAME = {"loss": tensors("dict of lists", "zoo.BY_NAME['loss'][*]", "global")}
RECENT = collections.deque(tensors("deque", "zoo.RECENT[*]", "bounded"), maxlen=100)
ENDLESS = collections.deque(tensors("deque without end", "zoo.ENDLESS[*]", "global"), maxlen=10**9)
DISTINCT = set(tensors("set", "zoo.DISTINCT[*]", "global"))
PAIRS = [(each, 1) for each in tensors("tuples", "zoo.PAIRS[*][0]", "global")]
TRIMMED = tensors("trimmed", "zoo.TRIMMED[*]", "trimmed")
ONE = tensors("one global", "zoo.ONE", "global", count=1)[0]
DEFAULTS: collections.defaultdict[str, list[Tensor]] = collections.defaultdict(list)
DEFAULTS["a"] += tensors("defaultdict", "zoo.DEFAULTS['a'][*]", "global")
KEYS = dict.fromkeys(tensors("dict keys", "zoo.KEYS.keys()[*]", "global"), 0)


def append(value: Tensor) -> None:
    TRIMMED.append(value)
    if len(TRIMMED) > 100:
        TRIMMED.pop(0)


class Meter:
    """Metrics kept on the class and on the instance."""

    SEEN = tensors("class variable", "Meter.SEEN[*]", "class")

    def __init__(self) -> None:
        self.values = tensors("attribute", "zoo.METER.values[*]", "attribute")
        self.by_name = {"accuracy": tensors("attribute dict", "zoo.METER.by_name['accuracy'][*]", "attribute")}


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept = tensors("slots", "zoo.SLOTTED.kept[*]", "attribute")


@dataclasses.dataclass
class Record:
    """One entry of a log."""

    step: int
    value: Tensor


class Node:
    """A linked list."""

    def __init__(self, value: Tensor, after: Node | None) -> None:
        self.value, self.after = value, after


METER = Meter()
SLOTTED = Slotted()
RECORDS = [Record(0, each) for each in tensors("dataclasses", "zoo.RECORDS[*].value", "attribute")]
NAMESPACE = types.SimpleNamespace(deep={"er": [tensors("deep", "zoo.NAMESPACE.deep['er'][0][*]", "attribute")]})


NUMBERED = types.SimpleNamespace()
for at, each in enumerate(tensors("numbered", "zoo.NUMBERED.out*", "attribute")):
    setattr(NUMBERED, f"out{at}", each)


def closure() -> Callable[[Tensor], None]:
    kept = tensors("closure", "zoo.KEEP.closure(kept)[*]", "closure")

    def keep(value: Tensor) -> None:  # line: closure
        kept.append(value)

    return keep


KEEP = closure()
APPEND = tensors("bound method", "zoo.APPEND.__self__[*]", "global").append
METHOD = Slotted.__init__
METHOD_OF = types.MethodType(lambda self: None, tensors("method", "zoo.METHOD_OF.__self__[*]", "global"))
PARTIAL = functools.partial(print, tensors("partial", "zoo.PARTIAL.args[0][*]", "global"))
PARTIAL_NAMED = functools.partial(
    print, end=tensors("partial keyword", "zoo.PARTIAL_NAMED.keywords['end'][*]", "global")
)


def with_default(value: Any, kept: list[Tensor] = tensors("default", "zoo.with_default.default(kept)[*]", "default")):  # noqa: B008
    kept.append(value)


def with_keyword(*, kept: list[Tensor] = tensors("keyword", "zoo.with_keyword.default(kept)[*]", "default")) -> None:  # noqa: B008
    del kept


def with_attribute() -> None:
    """A function that keeps what it made, on itself."""


with_attribute.kept = tensors("function attribute", "zoo.with_attribute.kept[*]", "attribute")  # type: ignore[attr-defined]


@functools.cache
def unbounded(key: int) -> Tensor:
    return torch.zeros(LENGTHS["lru_cache"])


tensors("lru_cache", "zoo.unbounded.cache[*]", "cache", count=0)
for at in range(COUNT):
    unbounded(at)


@functools.lru_cache(maxsize=64)
def bounded(key: int) -> Tensor:
    return torch.zeros(LENGTHS["bounded lru_cache"])


tensors("bounded lru_cache", "zoo.bounded.cache[*]", "cache", count=0)
for at in range(COUNT):
    bounded(at)


def generator() -> Iterator[None]:
    pending = tensors("generator", "zoo.GENERATOR.gi_frame.pending[*]", "generator")  # line: generator
    while True:
        yield
        del pending[:0]


GENERATOR = generator()
next(GENERATOR)


def fail() -> None:
    batch = tensors("traceback", "zoo.ERRORS[0].tb(fail:", "traceback")
    raise RuntimeError(len(batch))


ERRORS = []
try:
    fail()
except RuntimeError as error:
    ERRORS.append(error)

ARGUMENTS = RuntimeError(*tensors("exception arguments", "zoo.ARGUMENTS.args[*]", "global"))
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
LOCAL = threading.local()


class Ema:
    """A shadow of the weights, kept by hand."""

    def __init__(self) -> None:
        self.shadow = dict(zip("abcdefghijkl", tensors("EMA", "zoo.EMA.shadow[*]", "attribute"), strict=True))


EMA = Ema()


class Buffer(list):
    """A replay buffer that is a list."""


REPLAY = Buffer(tensors("subclass of list", "zoo.REPLAY[*]", "global"))
REPLAY.extra = tensors("attribute of a list", "zoo.REPLAY.extra[*]", "attribute")


class Log(dict):
    """A log that is a dict."""


LOG = Log(train=tensors("subclass of dict", "zoo.LOG['train'][*]", "global"))
LOG.extra = tensors("attribute of a dict", "zoo.LOG.extra[*]", "attribute")
Pair = collections.namedtuple("Pair", ["step", "value"])
NAMED = [Pair(0, each) for each in tensors("named tuples", "zoo.NAMED[*].value", "global")]
tensors("structured results", "zoo.RESULTS[*][", "global", count=0)
RESULTS = [  # made in C, and unknown to the collector
    torch.topk(torch.zeros(LENGTHS["structured results"]), LENGTHS["structured results"]) for _ in range(COUNT)
]
COPIES = [nn.Linear(1, 1) for _ in range(COUNT)]
for copy, weight in zip(COPIES, tensors("copies of a model", "zoo.COPIES[*].weight", "module"), strict=True):
    copy.weight = nn.Parameter(weight)
BUILTIN_ITERATOR = iter(tensors("iterator", "zoo.BUILTIN_ITERATOR.<list_iterator>[*]", "attribute"))
HEAD: Node | None = None
for each in tensors("linked list", "zoo.HEAD.after….value", "attribute"):
    HEAD = Node(each, HEAD)
sys.kept_by_sys = tensors("sys", "sys.kept_by_sys[*]", "global")  # type: ignore[attr-defined]


def hooked(model: nn.Module) -> None:
    """Hooks on the watched model that keep what they see."""
    outputs = tensors("forward hook", "forward hook closure(outputs)[*]", "hook")
    gradients = tensors("gradient hook", "gradient hook closure(gradients)[*]", "hook")
    seen = tensors("a hook each", "0.forward pre-hook[*].default(kept)", "hook")

    def keep_output(module: nn.Module, args: Any, output: Tensor) -> None:
        del outputs[COUNT:]

    def keep_gradient(gradient: Tensor) -> None:
        del gradients[COUNT:]

    model.register_forward_hook(keep_output)
    next(model.parameters()).register_hook(keep_gradient)
    model[0].bias.norms = tensors("attribute of a parameter", ".norms[*]", "attribute")  # type: ignore[index]
    for each in seen:
        next(iter(model.children())).register_forward_pre_hook(lambda module, args, kept=each: None)


def line(key: str) -> str:
    """file.py:LINE of the line that is marked with `key`."""
    lines = Path(__file__).read_text().splitlines()
    return f"zoo.py:{next(at for at, text in enumerate(lines, 1) if text.endswith(f'# line: {key}'))}"


def around(step: Callable[[], object], times: int) -> None:
    """Calls `step` from a function that keeps tensors in its variables."""
    local_list = tensors("local", "local_list[*] in around()", "local")  # line: local
    cell = tensors("cell", "cell[*] in around()", "local")  # line: cell
    namespace = globals()  # no name of what is in it

    def inner() -> None:
        argument = cell
        step()
        del argument

    for _ in range(times):
        inner()
    del local_list, namespace


class Holdall:
    """Tensors in every kind of container, let go of and made anew by `renew`."""

    def __init__(self) -> None:
        self.references: list[weakref.ref[Tensor]] = []
        self.fill()

    def fill(self) -> None:
        def new() -> Tensor:
            tensor = torch.zeros(2)
            self.references.append(weakref.ref(tensor))
            return tensor

        def generate(value: Tensor) -> Iterator[Tensor]:
            while True:
                yield value

        self.items = [new() for _ in range(40)]
        self.by_key = {str(at): [new()] for at in range(40)}
        self.nested = {"a": {"b": ({"c": new()},)}}
        self.deque = collections.deque(new() for _ in range(10))
        self.distinct = {new() for _ in range(10)}
        self.closure = (lambda value: lambda: value)(new())
        self.generator = generate(new())
        next(self.generator)
        self.partial = functools.partial(print, new())
        self.records = [Record(0, new()) for _ in range(10)]
        try:
            raise ValueError(new())
        except ValueError as error:
            self.error = error.with_traceback(None)

    def renew(self) -> bool:
        """Whether everything of before is gone."""
        names = [name for name in vars(self) if name != "references"]
        for name in names:
            delattr(self, name)
        all_gone = all(reference() is None for reference in self.references)
        self.references.clear()
        self.fill()
        return all_gone
