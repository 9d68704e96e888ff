"""Sessions of arbitrary messages within the wire's types, extreme values included: for tests of whatever reads them."""

from __future__ import annotations

import copy
import os
import signal
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, get_args

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from msgspec import inspect
from watched import Run

from gpumon_agent import wire

SOURCE = "ab12"
NAMES = (
    "forward",
    "backward",
    "optimizer",
    "between",
    "load",
    "eval",
    "AdamW",
    "ddp",
    "fsdp2",
    "growth",
    "oom",
    "cuda",
)
HARM = ("\x1b]52;c;aGk=\x07", "\x1b[2J", "\x9b31m", "\u202egpj.exe", "\u2066", "\x00", "\r", "\n", "\x7f", "\ud7ff")
SAME = {"source": SOURCE, "nonce": SOURCE, "host": "box", "uuid": "GPU-1"}
KINDS = [kind for kind in get_args(wire.Event) if kind is not wire.Hello]

texts = (
    st.sampled_from(NAMES)
    | st.sampled_from(HARM)
    | st.text(max_size=12)
    | st.sampled_from(("", "x" * wire.TEXT_CHARS_MAX, "\N{PILE OF POO}" * 200, "\u0301" * 100, "\u4e00" * 200))
)


TIMES = int(os.environ.get("GPUMON_FUZZ_TIMES", "1"))


def examples(count: int) -> settings:
    """For tests that take whatever there may be."""
    return settings(
        max_examples=count * TIMES,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def _numbers(low: int, high: int) -> st.SearchStrategy[int]:
    usual = [n for n in (0, 1, 2, 3, 100, 1 << 20, 1 << 30, 1 << 40) if low <= n <= high]
    return st.sampled_from(usual) | st.sampled_from((low, high, high - 1)) | st.integers(low, high)


def _of(kind: Any, name: str) -> st.SearchStrategy[Any]:
    """Values of a type as msgspec describes it, as msgpack holds them."""
    match kind:
        case inspect.Metadata():
            return _of(kind.type, name)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            if name in ("device", "model", "revision", "index", "part", "pid"):  # mostly one and the same
                return st.sampled_from((0, 0, 0, 1)) | _numbers(kind.ge, kind.le)
            if name == "parts":
                return st.sampled_from((1, 1, 2)) | _numbers(kind.ge, kind.le)
            if name in ("step", "seq"):
                return st.integers(0, 6) | _numbers(kind.ge, kind.le)
            return _numbers(kind.ge, kind.le if kind.le is not None else kind.lt - 1)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le)
        case inspect.StrType():
            return st.just(SAME[name]) | st.just(SAME[name]) | texts if name in SAME else texts
        case inspect.BytesType():
            return st.binary(max_size=min(kind.max_length, 16))
        case inspect.VarTupleType():
            return st.lists(_of(kind.item_type, name.removesuffix("s")), max_size=min(kind.max_length, 4))
        case inspect.TupleType():
            return st.tuples(*(_of(each, name) for each in kind.item_types))
        case inspect.DictType():
            return st.dictionaries(_of(kind.key_type, name), _of(kind.value_type, name), max_size=3)
        case inspect.UnionType():
            return st.one_of([_of(each, name) for each in kind.types])
        case inspect.StructType():
            return message(kind.cls)
        case _:
            raise NotImplementedError(kind)


def message(cls: type) -> st.SearchStrategy[Any]:
    """A message as msgpack holds it: an array, its tag first."""
    described = inspect.type_info(cls)
    assert isinstance(described, inspect.StructType)
    fields = [_of(field.type, field.name) for field in described.fields]
    tag = [] if described.tag is None else [st.just(described.tag)]
    return st.tuples(*tag, *fields)


def decoded(source: str, unix_ns: int, event: Any, seq: int) -> wire.Received:
    """Through the codec, as everything that reaches a session goes."""
    return wire.decode_received(msgspec.msgpack.encode([source, unix_ns, event, seq, False]))


@st.composite
def sessions(draw: st.DrawFn, events: int = 30) -> list[wire.Received]:
    """A process that says hello, and then anything."""
    hello = list(draw(message(wire.Hello)))
    hello[1] = (wire.PROTOCOL_MAJOR, 0)
    unix_ns = draw(st.sampled_from((1_700_000_000_000_000_000, 0, (1 << 62) - 1000, -(1 << 62))))
    said = [hello, draw(message(wire.Model))]
    said += draw(st.lists(st.sampled_from(KINDS).flatmap(message), min_size=1, max_size=events))
    numbered = {cls.__struct_config__.tag for cls in get_args(wire.NumberedEvent)}
    made: list[wire.Received] = []
    for number, event in enumerate(said):
        made.append(decoded(SOURCE, unix_ns + number, event, number if event[0] in numbered else -1))
    return made


def _whole_run() -> list[list[Any]]:
    """A run that says everything there is to say, each message as msgpack holds it."""
    run = Run(shrink=64, rank=0, world_size=2).hello().modules(blocks=1)
    run.host().steps(0, 6).layers(5).host().step(6)
    run.census(6).census(7, number=1).checkpoint().segments(7).notice("a notice").beat(7)
    outlook = wire.Outlook(7, 0, run.t_ns, 2 << 30, 1 << 30, 3 << 30, "backward", "fits", 1 << 30, 1 << 20, ((8, 16),))
    run.say(outlook, numbered=True)
    run.say(wire.Snapshot(run.t_ns, 7, "/tmp/snapshot.pickle", 1 << 20))
    oom = wire.Oom(
        7, "forward", 0, run.t_ns, 1 << 30, 1 << 37, 1 << 29, 1 << 36, 1 << 36, "out of memory", "train.py:1"
    )
    run.say(oom, numbered=True)
    run.synced().host().goodbye("exception", 7, "forward", "OutOfMemoryError: CUDA out of memory.")
    return [msgspec.msgpack.decode(wire.encode_received(received)) for received in run.events]


WHOLE_RUN = _whole_run()
TAGGED = {kind.__struct_config__.tag: kind for kind in get_args(wire.Event)}


@st.composite
def changed_runs(draw: st.DrawFn, changes: int = 8) -> list[wire.Received]:
    """A sound run in which some fields hold whatever their types allow: in one message, or in all of its kind."""
    run = copy.deepcopy(WHOLE_RUN)
    for _ in range(draw(st.integers(1, changes))):
        tag = draw(st.sampled_from(sorted({received[2][0] for received in run})))
        described = inspect.type_info(TAGGED[tag])
        assert isinstance(described, inspect.StructType)
        at = draw(st.integers(0, len(described.fields) - 1))
        if (tag, described.fields[at].name) == ("hello", "protocol"):
            continue
        value = draw(_of(described.fields[at].type, described.fields[at].name))
        alike = [received[2] for received in run if received[2][0] == tag and len(received[2]) > at + 1]
        if not draw(st.booleans()):
            alike = [draw(st.sampled_from(alike))]
        for event in alike:
            event[at + 1] = value
    if draw(st.booleans()):
        del run[-draw(st.integers(1, 8)) :]  # it goes on
    return [decoded(source, unix_ns, event, seq) for source, unix_ns, event, seq, *_ in run]


def harm_in(text: str) -> list[str]:
    """What of a text a terminal would act on: control and bidirectional characters, all but the end of a line."""
    return [f"U+{ord(c):04X}" for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """An endless loop fails here, with the place where it was."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
