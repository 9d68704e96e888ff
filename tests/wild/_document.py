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

Real training loops against the libraries from PyPI, in `tests/wild/cases/`: random weights, made-up data, a few steps
each with torch 2.15 on the virtual GPU. `GPUMON_GOVERNOR=off`: every step is read in full. No case knows gpumon. Each
counts its own forwards, backwards and steps, runs once bare and once under `gpumon dryrun`, and the two are compared.

`python tests/wild/_document.py [NAME …]` runs cases and writes this page; rows of cases that are not named stay.
`pytest -m long tests/wild` checks the same; what fails there for a known reason is in `tests/wild/catalogue.py`.

- **model**: parameters of the models that were found, on all ranks together; "≠" where they are not those that the
  case trains.
- **phases**: steps as told / as counted, "≠" where forwards, backwards, evaluations or optimizer steps differ. A
  forward that no call of a module shows (`model.forward(x)`, a method of another name) is inferred from its backward.
- **unexplained**: the highest share of allocated that the ledger cannot name at the end of a phase, from step 5 on.
- **estimate**: the largest error of the estimated peak from step 5 on; evaluations count where the first steps of the
  kind had them. **forecast**: the median error of what a step says of the next one's peak. Kernels do nothing here, so
  what depends on values is not tested.
- **bytes**: whether the dry run's peak is the bare run's, to the byte.
- **wrong**: the checks that fail. A case without a row has not been run to its end yet.
- Of several ranks each figure is the worst one's. "–": not told.

| case | with | model | phases | unexplained | estimate | forecast | bytes | findings | wrong |
|---|---|---|---|---|---|---|---|---|---|
"""

PUBLIC = """
## Public scripts

The scripts themselves, unmodified, at the commit that is named, run by hand with
`python tests/wild/public.py FOLDER [NAME …]`, where FOLDER holds clones of the repositories; what a script would
download is made up. Counted from outside (`tests/wild/_public_truth.py`): a forward is one of a module with parameters
that is called from outside every other one; of an agent that has a critic and an actor, each of the two. Two things are
no windows of their own and lie between others: a part of the model that is called by itself (`model.decode(x)` in a
variational autoencoder), and a target network, which no optimizer updates and which stays in training mode.

What `sequence-parallel` does not explain is 800 bytes: the input of a collective whose result nobody has waited for
yet. `word-language-by-hand` updates its parameters without an optimizer: gpumon finds its model, says that it counts
no step, and how to mark one; the row after it is the same script with that line. The environments of `cleanrl-ppo`
and `cleanrl-sac` are two: of four actions a virtual GPU reads back what the memory held, which the environment
refuses, and of one value `all()` is not true there, which `torch.distributions` refuses.

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
