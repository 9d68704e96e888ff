"""How a person would name what an object holds, and a place in code."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from opcode import opmap, opname
from pathlib import Path
from typing import Any

from torch.nn import Module

from gpumon_agent.guard import pass_on

_MODULE_DICTS = {
    "_parameters": ("", "module"),
    "_buffers": ("", "module"),
    "_modules": ("", ""),
    "_forward_hooks": (".forward hook", "hook"),
    "_forward_pre_hooks": (".forward pre-hook", "hook"),
    "_backward_hooks": (".backward hook", "hook"),
    "_backward_pre_hooks": (".backward pre-hook", "hook"),
    "_state_dict_hooks": (".state_dict hook", "hook"),
    "_state_dict_pre_hooks": (".state_dict pre-hook", "hook"),
    "_load_state_dict_post_hooks": (".load_state_dict hook", "hook"),
    "_load_state_dict_pre_hooks": (".load_state_dict pre-hook", "hook"),
    "_optimizer_step_post_hooks": (".step hook", "hook"),
    "_optimizer_step_pre_hooks": (".step pre-hook", "hook"),
}
"""A module's and an optimizer's own dicts → the words that stand for them, and the kind of holder they make."""
HOOK_DICTS = frozenset(name for name, (_, tag) in _MODULE_DICTS.items() if tag == "hook")


def instance_dict(owner: Any) -> dict[str, Any] | None:
    try:
        values = object.__getattribute__(owner, "__dict__")
    except AttributeError as error:
        pass_on(error)
        return None
    return values if isinstance(values, dict) else None


def dict_words(owner: Any, name: str) -> tuple[str, str]:
    """(label, tag) of an attribute that is called `name`."""
    words = _MODULE_DICTS.get(name)
    if words is not None and (isinstance(owner, Module) or name in HOOK_DICTS):
        return words
    return f".{name}", "attribute"


def place(code: types.CodeType, line: int | None = None) -> str:
    return f"{Path(code.co_filename).name}:{code.co_firstlineno if line is None else line}"


def stored_at(code: types.CodeType, name: str) -> int | None:
    """The line on which `code` first gives the variable `name` a value; an argument has none."""
    key = code.co_filename, code.co_firstlineno, code.co_name, code.co_varnames
    lines = _lines_stored.get(key)
    if lines is None:
        if len(_lines_stored) >= _CODES_MAX:
            _lines_stored.clear()
        lines = _lines_stored[key] = {}
        for line, stored in _stores(code):
            lines.setdefault(stored, line)
    return lines.get(name)


_CODES_MAX = 256
_lines_stored: dict[tuple[str, int, str, tuple[str, ...]], dict[str, int | None]] = {}
_EXTENDED = opmap["EXTENDED_ARG"]


def _stores(code: types.CodeType) -> Iterator[tuple[int | None, str]]:
    lines = [(start, line) for start, _, line in code.co_lines() if line is not None]
    at = -1
    argument = 0
    raw = code.co_code
    cells = (*code.co_varnames, *(each for each in code.co_cellvars if each not in code.co_varnames), *code.co_freevars)
    if sys.version_info < (3, 11):
        cells = (*code.co_cellvars, *code.co_freevars)
    for offset in range(0, len(raw), 2):
        operation = raw[offset]
        argument = argument << 8 | raw[offset + 1]
        if operation == _EXTENDED:
            continue
        stored = _STORES.get(operation)
        if stored is not None:
            while at + 1 < len(lines) and lines[at + 1][0] <= offset:
                at += 1
            line = lines[at][1] if at >= 0 else None
            if stored == "fast":
                yield line, code.co_varnames[argument] if argument < len(code.co_varnames) else cells[argument]
            elif stored == "deref":
                yield line, cells[argument]
            elif stored == "fast fast":
                yield line, code.co_varnames[argument >> 4]
                yield line, code.co_varnames[argument & 15]
            elif stored == "fast load":
                yield line, code.co_varnames[argument >> 4]
            else:
                yield line, code.co_names[argument]
        argument = 0


_STORES = {
    number: kind
    for name, kind in (
        ("STORE_FAST", "fast"),
        ("STORE_DEREF", "deref"),
        ("STORE_NAME", "name"),
        ("STORE_GLOBAL", "name"),
        ("STORE_FAST_STORE_FAST", "fast fast"),
        ("STORE_FAST_LOAD_FAST", "fast load"),
    )
    if (number := opmap.get(name)) is not None and opname
}
