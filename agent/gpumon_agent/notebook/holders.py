"""What holds a tensor in a notebook, in the words of IPython, and how to let go of it.

IPython keeps a cell's value as `Out[7]`, `_7` and `_` (and once more out of sight), and Python keeps the last
exception, whose frames hold their variables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from gpumon_agent.frames import Place
from gpumon_agent.leaks.heap_walker import Root
from gpumon_agent.leaks.object_children import Name

VARIABLE, OUTPUT, RUNNING, TRACEBACK, OTHER = range(5)
"""Kinds of holders, in the order in which they are told."""
NO_NAME = "no variable leads to it"
TEMPORARY = "no variable: temporary, or in a reference cycle"
GRAPH_OF = "the graph of "
FRAMES_MAX = 100  # of an exception and those before it
_OF_CYCLES = "`import gc; gc.collect()`, if it is in a reference cycle"
_ROOT = re.compile(r"Out\[\d+\]|\w+")
_IN_FRAME = re.compile(r"frame (\d+)\.?(.*)", re.DOTALL)
_SHOWN = ("_", "__", "___")


class Held(NamedTuple):
    text: str
    kind: int
    root: str  # the variable, or the traceback, that it begins with


class _Frame(NamedTuple):
    """Of the last exception, or one that it was raised from. `of`: what holds the traceback."""

    frame: FrameType
    line: int
    of: str


class Holders:
    """The names of one notebook. Holds its objects, so only while a view is made.

    `running`: the cell is still running.
    """

    def __init__(self, shell: Any, *, running: bool) -> None:
        self._none = TEMPORARY if running else NO_NAME
        space, hidden = shell.user_ns, shell.user_ns_hidden
        self._shell = shell
        self._variables = {
            name: value for name, value in space.items() if name not in hidden or hidden[name] is not value
        }
        outputs: dict[str, Any] = {f"Out[{number}]": value for number, value in (space.get("_oh") or {}).items()}
        shown = {id(value) for value in outputs.values()}
        for name, value in space.items():
            numbered = name[:1] == "_" and name[1:].isdecimal() and id(value) not in shown
            if name not in self._variables and (numbered or name in _SHOWN):
                outputs[name] = value
        self._outputs = outputs
        hook = shell.displayhook
        self._unseen = {f"get_ipython().displayhook.{name}": getattr(hook, name, None) for name in _SHOWN}
        last = getattr(shell, "last_execution_result", None)
        self._unseen["get_ipython().last_execution_result.result"] = getattr(last, "result", None)
        self._frames = list(_frames())

    def roots(self) -> tuple[list[Root], list[Root]]:
        """Of a walk of the heap, in the order in which a holder is to be named: what comes before the functions that
        are running, and what comes after them."""
        shown = [
            Root(lambda: self._variables, named=True, module="__main__"),
            Root(lambda: self._outputs, named=True),
        ]
        kept = [
            *(Root(partial(self._frame, at), prefix=f"frame {at}") for at in range(len(self._frames))),
            Root(lambda: self._unseen, named=True),
        ]
        return shown, kept

    def _frame(self, at: int) -> FrameType:
        return self._frames[at].frame

    def of(self, names: Iterable[Name]) -> tuple[Held, ...]:
        """The holders with these names, and those that hold the same object; one of each variable."""
        found: dict[tuple[int, str], Held] = {}
        for name in sorted(names, key=lambda name: ("*" in name.text, "keys()" in name.text)):
            held = self._held(name)
            found.setdefault((held.kind, held.root or held.text), held)
            owner = self._outputs if held.kind == OUTPUT else self._variables
            if held.kind in (VARIABLE, OUTPUT) and held.root in owner:
                rest = held.text.removeprefix(held.root)
                for kind, space in ((VARIABLE, self._variables), (OUTPUT, self._outputs)):
                    for other, value in space.items():
                        if value is owner[held.root]:
                            found.setdefault((kind, other), Held(f"{other}{rest}", kind, other))
        seen = [each for each in found.values() if not each.text.startswith("get_ipython().")] or list(found.values())
        seen.sort(key=lambda each: each.kind)
        return tuple(seen) or (Held(self._none, OTHER, ""),)

    def _held(self, name: Name) -> Held:
        text = name.text
        inside = _IN_FRAME.fullmatch(text)
        if inside is not None:
            frame, line, of = self._frames[int(inside[1])]
            code = frame.f_code
            where = self._place(Place(code.co_filename, line))
            return Held(f"{inside[2]} in {code.co_name}(), {where}, held by {of}", TRACEBACK, of)
        if name.function is not None:
            where = "" if name.where is None else f", {self._place(name.where)}"
            return Held(f"{text} in {name.function}(){where}", RUNNING, "")
        first = _ROOT.match(text)
        root = "" if first is None else first[0]
        if root in self._outputs:
            return Held(text, OUTPUT, root)
        return Held(text, VARIABLE if root in self._variables else OTHER, root)

    def _place(self, where: Place) -> str:
        named: Callable[[str], tuple[str, str] | None] | None = getattr(self._shell.compile, "format_code_name", None)
        cell = named(where.path) if named is not None else None  # since IPython 8: ("Cell", "In[7]")
        number = "" if cell is None else re.sub(r"\D", "", cell[1])
        return f"cell {number} line {where.line}" if number else f"{Path(where.path).name} line {where.line}"

    def hint(self, held: tuple[Held, ...]) -> str:
        """How to free what these hold; empty if it is enough to delete variables."""
        hints: dict[str, None] = {}
        variables = {each.root: self._variables[each.root] for each in held if each.kind == VARIABLE}
        outputs = [each.root for each in held if each.kind == OUTPUT]
        if outputs:
            value = self._outputs[outputs[0]]
            names = [name for name, other in variables.items() if other is value]
            variables = {name: other for name, other in variables.items() if other is not value}
            names += [f"_{root[4:-1]}" for root in outputs if self._shell.user_ns.get(f"_{root[4:-1]}") is value]
            names += [root for root in outputs if root in _SHOWN]
            hints[f"`%xdel {names[0]}`" if names else f"`del {outputs[0]}`"] = None
        for each in held:
            if each.kind == TRACEBACK:
                hints["`%gpumon forget`"] = None
            elif each.text == NO_NAME:
                hints[_OF_CYCLES] = None
        if hints and variables:
            hints[f"`del {', '.join(variables)}`"] = None
        return ", ".join(hints)


def _frames() -> Iterator[_Frame]:
    """Innermost exception first. IPython's own frames lead to everything in the notebook, so they are left out."""
    of, entry = "sys.last_traceback", getattr(sys, "last_traceback", None)
    error, left = getattr(sys, "last_value", None), FRAMES_MAX
    value, met = "sys.last_value", set()
    while left:
        while entry is not None and left:
            left -= 1
            module = str(entry.tb_frame.f_globals.get("__name__", ""))
            if module.partition(".")[0] not in ("IPython", "ipykernel") and entry.tb_frame not in met:
                met.add(entry.tb_frame)
                yield _Frame(entry.tb_frame, entry.tb_lineno, of)
            entry = entry.tb_next
        if error is None:
            return
        chain = "__cause__" if error.__cause__ is not None else "__context__"
        error, value = getattr(error, chain), f"{value}.{chain}"
        left -= 1
        entry, of = getattr(error, "__traceback__", None), f"{value}.__traceback__"
