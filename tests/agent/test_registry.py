"""No module of the agent keeps anything that changes: one registry does, and resets it in a forked child."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import pytest

import gpumon_agent
from gpumon_agent.registry import Registry

CHANGES = (
    list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter,
    WeakSet, WeakKeyDictionary, WeakValueDictionary,
)  # fmt: skip
LIBRARIES = (".debug_server.page", ".keras", ".lightning", ".transformers")  # each of them imports its library


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(gpumon_agent.__path__, "gpumon_agent."):
        if not found.name.endswith(("__main__", "sitecustomize", *LIBRARIES)):
            yield importlib.import_module(found.name)


def mutable(module: ModuleType) -> list[str]:
    """Containers of the module that are not written as constants."""
    return [
        f"{module.__name__}.{name}"
        for name, value in vars(module).items()
        if type(value) in CHANGES and not name.isupper() and not name.startswith("__")
    ]


def test_modules_hold_constants_only() -> None:
    pytest.importorskip("torch")
    assert [name for module in modules() for name in mutable(module)] == []


def test_no_function_rebinds_a_name_of_its_module_and_one_handler_runs_in_a_fork() -> None:
    handlers = []
    for path in sorted(Path(gpumon_agent.__file__).parent.rglob("*.py")):
        source = path.read_text()
        assert not [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Global)], path
        handlers += [path.name] * source.count("register_at_fork(")
    assert handlers == ["registry.py"]


class Told:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def in_child(self) -> None:
        self.said.append(self.name)


def test_a_forked_child_records_nothing_before_anything_else() -> None:
    registry, said = Registry(), list[str]()
    kept: list[Any] = [Told(name, said) for name in ("tracker", "transport", "agent", "loads", "recorder")]
    tracker, transport, registry.agent, registry.loads, recorder = kept
    registry.trackers.append(tracker)
    registry.transports.add(transport)
    registry.recorders.add(recorder)
    registry.in_child()
    assert said == ["recorder", "agent", "loads", "transport", "tracker"]
    assert not registry.transports
