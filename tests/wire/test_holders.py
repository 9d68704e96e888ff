"""A holder in fields, also where an agent from before the fields sent a sentence."""

from __future__ import annotations

import msgspec
import pytest

from gpumon_agent import wire


def decoded(*fields: object) -> wire.Holder:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=wire.Holder)


@pytest.mark.parametrize(
    ("name", "kind", "variable", "container", "function"),
    [
        ("losses[*][0] in main()", "local", "losses", "losses", "main"),
        ("Trainer.store[*][0][0] in train()", "attribute", "Trainer.store", "", "train"),
        ("losses[*]", "global", "losses", "losses", None),
        ("reference cycle of node.kept in main()", "cycle", "node.kept", "node.kept", "main"),
        ("d['a in b'][*]", "global", "d", "d['a in b']", None),
    ],
)  # fmt: skip
def test_a_sentence_of_an_older_agent_is_read_as_fields(name, kind, variable, container, function):
    older = decoded(name, kind, "train.py:12", 3)
    assert (older.variable, older.function, older.text) == (variable, function, name)
    newer = decoded(older.name, kind, "train.py:12", 3, function)
    assert newer == older
    assert newer.text == name
    if "[0]" not in name:
        assert older.container == container


def test_what_grows_is_found_within_what_is_held():
    held = wire.Holder("log.handlers[*].records[*].args[0]", "local", None, 1, "main")
    assert (held.container, held.attribute) == ("log.handlers[*].records", "args[0]")
