"""No module imports itself by way of others, wherever the imports are: at the top, in a function, for types alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"gpumon": ROOT / "gpumon", "gpumon_agent": ROOT / "agent" / "gpumon_agent"}


def modules() -> dict[str, Path]:
    found = {}
    for name, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = (name, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(name: str, known: dict[str, Path]) -> set[str]:
    path = known[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{module}.{alias.name}") in known else module for alias in node.names}
    return found & known.keys() - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_import_circle() -> None:
    known = modules()
    graph = {name: imported(name, known) for name in known}
    assert len(graph) > 300
    assert circle(graph) == []
