"""Writes docs/scenarios.md from the catalogue: `python tests/scenarios/_document.py`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios.catalogue import CONTEXT_MIB, PLAIN, WRONG, Scenario

PAGE = Path(__file__).parents[2] / "docs" / "scenarios.md"
HEAD = f"""# Scenarios

Real training scripts in `tests/scenarios/`, on which gpumon is tested. Each runs by itself, such as
`python tests/scenarios/gpt.py --steps 20`; with `--report` it prints the allocator's own figures at the end of each
phase, one JSON line a step. Scripts for two ranks are started by torchrun. `--clean` runs a scenario's clean twin: the
same script without the fault. Of a device of 1 GiB, a context of {CONTEXT_MIB} MiB is not available to the allocator.

This page is written by `tests/scenarios/_document.py` from `tests/scenarios/catalogue.py`.
"""


def row(scenario: Scenario) -> str:
    command = " ".join((f"{scenario.script}.py", *scenario.args))
    needs = [f"{scenario.ranks} ranks"] if scenario.ranks > 1 else []
    needs += [f"{scenario.memory_mib} MiB device"] if scenario.memory_mib else []
    needs += ["NCCL without peers"] if scenario.virtual_only else []
    raises = [f"`{code}`" for code in scenario.raises] + ([scenario.fails] if scenario.fails else [])
    twin = "`--clean`" if scenario.has_twin else ""
    cells = (scenario.name, f"`{command}`", scenario.shows, ", ".join(needs), ", ".join(raises), twin)
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, scenarios in (("Ordinary training", PLAIN), ("Something wrong", WRONG)):
        parts.append(f"## {title}\n")
        parts.append("| name | script | shows | needs | raises | twin |\n|---|---|---|---|---|---|")
        parts.append("\n".join(map(row, scenarios)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
