"""The examples of docs/json.md, made from a recorded session: `python tests/_shared/json_examples.py` writes them.

The session is example_run.py on a virtual A100 (40 GB) cut to 2,000 MiB, recorded with `gpumon record` while
GPUMON_GOVERNOR=off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpumon import link
from gpumon.export.objects import Objects

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "tests" / "data" / "json-example.gpumon"
PAGE = ROOT / "docs" / "json.md"
BLOCK = re.compile(r"(<!-- example: (\w+) -->\n```json\n)(.*?)(\n```)", re.DOTALL)


def objects() -> Iterator[dict[str, Any]]:
    """Every object of the recorded session."""
    stream = Objects(replaying=True)
    for received in link.replay(RECORDING):
        for stated in stream.take(received):
            yield stated.object


def examples() -> dict[str, dict[str, Any]]:
    """One object a kind: the newest, and of steps the newest with the driver's lines in its ledger."""
    chosen: dict[str, dict[str, Any]] = {}
    for each in objects():
        kind = each["type"]
        if kind == "step" and each["ledger"]["context"] is None:
            continue
        chosen[kind] = each
    return chosen


def page(text: str) -> str:
    """The page with its examples as they should be."""
    made = examples()
    return BLOCK.sub(lambda found: found[1] + pretty(made[found[2]]) + found[4], text)


def pretty(obj: dict[str, Any]) -> str:
    """A line a field, small things on one line."""
    parts = []
    for name, value in obj.items():
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > 100 and isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {_wrapped(item)}" for item in value) + "]"
        elif len(text) > 100 and isinstance(value, dict):
            text = _wrapped(value)
        parts.append(f'"{name}": {text}')
    return "{" + ",\n ".join(parts) + "}"


def _wrapped(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    lines, line = [], ""
    for piece in re.split(r"(?<=,) (?=[\"{])", text):
        if line and len(line) + len(piece) > 108:
            lines.append(line)
            line = ""
        line = f"{line} {piece}" if line else piece
    return "\n   ".join([*lines, line])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
