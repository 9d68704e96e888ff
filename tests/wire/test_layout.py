"""The wire's layout as it was frozen: `python tests/wire/test_layout.py` writes today's, for a new major version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from gpumon_agent import wire

FROZEN = Path(__file__).parents[1] / "data" / f"wire-{wire.PROTOCOL_MAJOR}.0.json"
ROOTS = (wire.Packet, wire.Received, wire.Request, wire.Reply)


def layout() -> dict[str, Any]:
    """Each message that travels: its tag, and its fields in order, a default beside those that have one."""
    found: dict[str, Any] = {}
    for root in ROOTS:
        _visit(inspect.type_info(root), found)
    return dict(sorted(found.items()))


def _visit(kind: Any, found: dict[str, Any]) -> str:
    """How `kind` is written here; the Structs below it are added to `found`."""
    match kind:
        case inspect.StructType():
            name = kind.cls.__name__
            if name not in found:
                assert kind.array_like, f"{name} travels by the names of its fields"
                found[name] = fields = {"tag": kind.tag, "fields": []}
                for field in kind.fields:
                    written = [field.name, _visit(field.type, found)]
                    if not field.required:
                        written.append("" if field.default is inspect.NODEFAULT else repr(field.default))
                    fields["fields"].append(written)
            return name
        case inspect.UnionType():
            return " | ".join(_visit(each, found) for each in kind.types)
        case inspect.VarTupleType() | inspect.ListType():
            return f"[{_visit(kind.item_type, found)} …]{_bounds(kind)}"
        case inspect.TupleType():
            return f"[{', '.join(_visit(each, found) for each in kind.item_types)}]"
        case inspect.DictType():
            return f"{{{_visit(kind.key_type, found)}: {_visit(kind.value_type, found)}}}{_bounds(kind)}"
        case inspect.LiteralType():
            return " or ".join(map(repr, sorted(kind.values, key=str)))
        case inspect.Metadata():
            return _visit(kind.type, found)
        case inspect.EnumType():
            return " or ".join(repr(each.value) for each in kind.cls)
        case _:
            return type(kind).__name__.removesuffix("Type").lower() + _bounds(kind)


def _bounds(kind: Any) -> str:
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    bounds = [f"{name} {getattr(kind, name)}" for name in names if getattr(kind, name, None) is not None]
    return f" ({', '.join(bounds)})" if bounds else ""


def _unbounded(field: list[str]) -> list[str]:
    """Without its bounds: they keep nonsense out, and may become narrower without a new major version."""
    return [re.sub(r" \([^)]*\)", "", part) for part in field]


_LACKS_BOUNDS = re.compile(
    r"\b(?:int|float)\b(?! \(g[et] -?[\d.]+, l[et] )|\bstr\b(?! \(max)|…\](?! \(max)|\}(?! \(max)"
)


def test_every_number_text_and_list_has_bounds() -> None:
    """Nothing may reach a screen that no screen was made for: a number too large, a list too long, NaN."""
    messages = layout().items()
    unbound = [
        (name, field) for name, message in messages for field in message["fields"] if _LACKS_BOUNDS.search(field[1])
    ]
    assert not unbound


def test_what_was_frozen_is_as_it_was_and_what_came_later_has_defaults() -> None:
    today = layout()
    for name, before in json.loads(FROZEN.read_text()).items():
        now = today.get(name)
        assert now is not None, f"{name} is gone"
        assert now["tag"] == before["tag"], name
        count = len(before["fields"])
        for field, was in zip(now["fields"], before["fields"], strict=False):
            if " | " in was[1] and name in ("Packet", "Received"):  # kinds of events may come, none goes
                assert set(was[1].split(" | ")) <= set(field[1].split(" | ")), name
                continue
            assert _unbounded(field) == _unbounded(was), f"{name}.{was[0]}"
        assert len(now["fields"]) >= count, name
        assert all(len(field) == 3 for field in now["fields"][count:]), f"{name}: a new field needs a default"


def test_no_text_or_list_may_be_longer_than_viewers_of_the_frozen_version_accept() -> None:
    today = layout()
    longest = re.compile(r"max_length (\d+)")
    for name, before in json.loads(FROZEN.read_text()).items():
        for field, was in zip(today[name]["fields"], before["fields"], strict=False):
            for now, then in zip(longest.findall(field[1]), longest.findall(was[1]), strict=False):
                assert int(now) <= int(then), f"{name}.{was[0]}"


@pytest.mark.parametrize(
    ("flag", "bit"),
    [
        ("SAMPLED", 1), ("INFERRED", 2), ("BOUND", 4), ("SKIPPED", 8), ("RECOMPUTED", 16), ("OVERLAPPED", 32),
        ("ABORTED", 64), ("MERGED", 128), ("RECORDED", 256), ("TRAINS", 512), ("PROTOCOL_MINOR", 1),
        ("FRAME_BYTES_MAX", 65_536),
    ],
)  # fmt: skip
def test_numbers_that_agents_and_viewers_of_other_versions_share(flag: str, bit: int) -> None:
    """Recordings have them too: a flag that moves gives old files another meaning."""
    assert getattr(wire, flag) == bit


def _as_told_later(event: wire.Event) -> list[Any]:
    told: list[Any] = msgspec.msgpack.decode(wire.encode_event(event))
    return told


@pytest.mark.parametrize("recorded", [False, True])
def test_an_event_of_a_later_kind_keeps_its_place_and_takes_none_with_it(recorded: bool) -> None:
    phase = wire.Phase(3, "forward", 0, 0, 10, 5, 1, 1, 2, None)
    later = ["weather", "sunny", 21]
    encode = msgspec.msgpack.encode
    if recorded:
        read = wire.decode_received(encode(["ab", 7, later, 5, False]))
        assert read == wire.Received("ab", 7, wire.Unread("weather"), 5)
        assert wire.decode_received(wire.encode_received(read)) == read
        return
    packet = wire.decode_frame(wire.LIVE + encode([5, False, [_as_told_later(phase), later, _as_told_later(phase)]]))
    assert packet == wire.Packet(5, False, (phase, wire.Unread("weather"), phase))


def test_an_unsound_event_is_refused_alone_and_keeps_its_number() -> None:
    sound, unsound = wire.Notice(1, "x"), ["phase", "three"]
    packet = wire.decode_frame(wire.LIVE + msgspec.msgpack.encode([5, False, [unsound, _raw(sound), unsound]]))
    assert packet.events[1] == sound
    for refused in (packet.events[0], packet.events[2]):
        assert isinstance(refused, wire.Unread)
        assert refused.kind == "phase"
        assert "at least length 7, got 2" in (refused.why or "")
    read = wire.decode_received(msgspec.msgpack.encode(["ab", 7, unsound, 5, False]))
    assert read.seq == 5
    assert read.event == packet.events[0]
    assert wire.decode_received(wire.encode_received(read)) == read


def test_an_unsound_hello_is_no_agent() -> None:
    with pytest.raises(wire.WireError, match="could not be read"):
        wire.decode_frame(wire.LIVE + msgspec.msgpack.encode([-1, False, [["hello", [1, 0], 7]]]))


def _raw(event: wire.Event) -> msgspec.Raw:
    return msgspec.Raw(wire.encode_event(event))


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(what, ensure_ascii=False)}" for name, what in layout().items()]
    FROZEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
