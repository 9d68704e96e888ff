"""The GPUMON_* environment variables and the values each takes. docs/environment.md says what they do."""

from __future__ import annotations

import os
from collections.abc import Mapping

from gpumon_agent.guard import say
from gpumon_agent.registry import REGISTRY

TAKES = {
    "GPUMON_AWAIT_VIEWER": "0|1",
    "GPUMON_GOVERNOR": "on|off",
    "GPUMON_HOLD_AFTER": "NUMBER",
    "GPUMON_NAME": "TEXT",
    "GPUMON_NATIVE": "on|off",
    "GPUMON_OOM_DIR": "FOLDER|off",
    "GPUMON_OOM_SNAPSHOT": "0|1",
    "GPUMON_OUTLOOK": "print",
    "GPUMON_PEAKS": "shadow|bounds",
    "GPUMON_SHIM": "on|off",
    "GPUMON_TRACK_CPU": "0|1",
}
"""A capital word: any text; NUMBER: a count of at most nine digits."""


def value(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """The variable's value. Empty if it is unset or invalid; an invalid value is reported, once."""
    why = problem(name, environment.get(name, ""))
    if why is None:
        return environment.get(name, "")
    if name not in REGISTRY.ignored_variables:
        REGISTRY.ignored_variables.add(name)
        say(f"{why}; it is ignored")
    return ""


def problem(name: str, text: str) -> str | None:
    """One sentence if the variable does not take `text`."""
    takes = TAKES[name]
    if not text or text in takes.split("|"):
        return None
    if takes == "NUMBER":
        fits = text.isascii() and text.isdigit() and len(text) <= 9
    else:
        fits = any(choice.isupper() for choice in takes.split("|"))
    return None if fits else f"{name} takes {takes.replace('|', ' or ')}, not {text[:40]!r}"
