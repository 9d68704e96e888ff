"""Names for what an object holds and for places in code, as the user would write them."""

from __future__ import annotations

import dis
import types
from typing import Any

from torch.nn import Module

from gpumon_agent.frames import Place
from gpumon_agent.guard import pass_on
from gpumon_agent.registry import REGISTRY

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
"""Dicts of modules and optimizers → (text in names, kind of holder)."""
HOOK_DICTS = frozenset(name for name, (_, tag) in _MODULE_DICTS.items() if tag == "hook")


def instance_dict(owner: Any) -> dict[str, Any] | None:
    try:
        values = object.__getattribute__(owner, "__dict__")
    except AttributeError as error:
        pass_on(error)
        return None
    return values if isinstance(values, dict) else None


def dict_words(owner: Any, name: str) -> tuple[str, str]:
    """(label, tag) of the attribute `name`."""
    words = _MODULE_DICTS.get(name)
    if words is not None and (isinstance(owner, Module) or name in HOOK_DICTS):
        return words
    return f".{name}", "attribute"


def place(code: types.CodeType, line: int | None = None) -> Place:
    return Place(code.co_filename, code.co_firstlineno if line is None else line)


def stored_at(code: types.CodeType, name: str) -> int | None:
    """The line on which `code` first assigns the variable `name`; None for an argument.

    Cost: 1 µs an instruction, the first time for each code.
    """
    known = REGISTRY.stored_lines
    lines = known.get(code)
    if lines is None:
        lines = known[code] = {}
        starts = dict(dis.findlinestarts(code))
        line = None
        for each in dis.get_instructions(code):
            line = starts.get(each.offset, line)
            if each.opname in _STORES:
                for stored in each.argval if isinstance(each.argval, tuple) else (each.argval,):
                    lines.setdefault(stored, line)
                    if each.opname == _STORES_FIRST:
                        break
    return lines.get(name)


_STORES_FIRST = "STORE_FAST_LOAD_FAST"
_STORES = (
    "STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL", "STORE_FAST_STORE_FAST", _STORES_FIRST,
)  # fmt: skip
