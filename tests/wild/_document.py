"""Runs cases and writes what came of each into docs/compatibility.md: `python tests/wild/_document.py [NAME …]`.

Rows of cases that are not run stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "_shared"))

from wild._run import Seen, run
from wild.catalogue import BY_NAME, CASES
from wild.test_wild import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
HEAD = """# Compatibility

Real training loops against the libraries from PyPI, in `tests/wild/cases/`: random weights, synthetic data, a few steps
each with torch 2.15 on the virtual GPU. `GPUMON_GOVERNOR=off`: every step is read in full. No case uses gpumon. Each
counts its own forwards, backwards and steps, and runs once without gpumon and once under `gpumon dryrun`; the two are
compared.

`python tests/wild/_document.py [NAME …]` runs cases and writes this page; rows of other cases stay. `pytest -m long
tests/wild` checks the same; known failures are listed in `tests/wild/catalogue.py`.

- **model**: parameters of the models that gpumon found, on all ranks together; "≠" if the case trains others.
- **phases**: steps by gpumon / by the case, "≠" if forwards, backwards, evaluations or optimizer steps differ. A
  forward without a call of the module (`model.forward(x)`, a method of another name) is inferred from its backward.
- **unexplained**: the highest share of allocated without a known owner at the end of a phase, from step 5 on.
- **estimate**: the largest error of the estimated peak, from step 5 on. A step's peak is taken with or without its
  evaluations, whichever is closer. **forecast**: the median error of a step's forecast of the next peak. Kernels
  compute nothing here, so nothing that depends on values is tested.
- **bytes**: whether the peaks of both runs are equal to the byte.
- **wrong**: the checks that fail. A case without a row has not been run completely yet.
- With several ranks each figure is the worst of them. "–": not known.

| case | with | model | phases | unexplained | estimate | forecast | bytes | findings | wrong |
|---|---|---|---|---|---|---|---|---|---|
"""

PUBLIC = """
## Public scripts

Unmodified scripts at the named commits, run by hand with `python tests/wild/public.py FOLDER [NAME …]`, where FOLDER
holds clones of the repositories; data that a script would download is synthetic. Phases are counted from outside
(`tests/wild/_public_truth.py`): a forward is an outermost call of a module with parameters; an actor and a critic count
separately. Two things are not phases and belong to `between`: a part of the model that is called by itself
(`model.decode(x)` in a variational autoencoder), and a target network that no optimizer updates and that stays in
training mode.

The 800 unexplained bytes of `sequence-parallel` are the input of a collective that has not been waited for yet.
`word-language-by-hand` updates its parameters without an optimizer: gpumon finds its model, says that it counts no
steps, and how to mark them; the next row is the same script with such a mark. `cleanrl-ppo` and `cleanrl-sac` run two
environments: with four actions, the virtual GPU reads back whatever the memory contained, which the environment
rejects; with a single value `all()` is false there, which `torch.distributions` rejects.

| script | repository | command | with | model | phases | unexplained | estimate | forecast | bytes | findings | wrong |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def row(seen: Seen) -> str:
    """One line of the table."""
    wrong = failed(seen)
    ranks = seen.ranks
    counted = "/".join(str(rank.truth["steps"]) for rank in ranks[:1]) or "–"
    told = "/".join(sorted({str(len(rank.steps)) for rank in ranks})) or "–"
    found = sorted({f"{model['parameters']:,}" for rank in ranks for model in rank.models.values()})
    cells = (
        seen.case.name,
        seen.versions,
        ", ".join(found) + (" ≠" if "models" in wrong else ""),
        f"{told} / {counted}" + (" ≠" if {"phases", "evals"} & wrong else ""),
        percent(rank.unexplained for rank in ranks),
        percent(rank.estimate for rank in ranks),
        percent(rank.forecast for rank in ranks),
        "no" if "to_the_byte" in wrong else "yes",
        ", ".join(f"`{code}`" for code in sorted(seen.findings)),
        ", ".join(sorted(wrong)),
    )
    return f"| {' | '.join(cells)} |"


def failed(seen: Seen) -> set[str]:
    """The names of the checks that fail."""
    names = set()
    for check in CHECKS:
        try:
            check(seen)
        except AssertionError:
            names.add(check.__name__)
    return names


def percent(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known, key=abs):.2f} %" if known else "–"


def write(rows: dict[str, str]) -> None:
    """The page with these rows, and the others as they were, in the catalogue's order."""
    cases, public, scripts = PAGE.read_text().partition(PUBLIC)
    before = {line.split(" | ")[0].removeprefix("| "): line for line in cases.splitlines() if line.startswith("| ")}
    every = before | rows
    PAGE.write_text(HEAD + "".join(f"{every[case.name]}\n" for case in CASES if case.name in every) + public + scripts)


if __name__ == "__main__":
    for name in sys.argv[1:] or BY_NAME:
        write({name: row(run(BY_NAME[name]))})
