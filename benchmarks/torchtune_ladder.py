"""Torchtune's published peaks, one technique added after the other, beside the same on the virtual GPU, in 20 seconds.

`python benchmarks/torchtune_ladder.py [--write docs/physical-ladder.md]`
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from common import GIB, options, write

from gpumon import virtual_gpu
from gpumon.analysis.units import MINUS

TESTS = Path(__file__).parents[1] / "tests"
PUBLISHED = TESTS / "data" / "torchtune_ladder.csv"
TRAINING = TESTS / "physical" / "llama.py"
NOT_TRIED = "not tried: "
HEAD = """torchtune's README lists the peak of active memory of a full finetuning of Llama 3.2 3B (bf16, batch
2 × 4,096, one A100), with one technique added after the other. `tests/physical/llama.py` is that training in plain
torch, with the same tensors; it runs at full size on the virtual GPU. From the third row on the published runs are
compiled and ours are not, so their figures cannot be equal: there, only the direction of each step is compared. A step
is from the row before that was tried: the published one to Chunked Cross Entropy has that of Compile (−9.0) in it.
"""
FOOT = """## Inferred

- **Packed Dataset** is the only row whose configuration is complete. Attention there is flex attention; ours is
  `scaled_dot_product_attention` with a causal mask, which saves the same tensors.
- **Fuse optimizer step into backward** saves nothing in ours: the peak of that run is in the loss (25.83 GiB; backward
  25.21, optimizer 23.94), where the fp32 logits of each chunk stay until its backward, before there are gradients. Why
  the published run saves 1.8 GiB is not measured; compiled, the loss keeps less.

## Not tried

torchtitan's tables: FSDP2 on 8 to 512 GPUs with its selective checkpointing, which is not written anew here; many of
them are compiled, or in float8.
"""


class Rung(NamedTuple):
    technique: str
    published: float  # GiB
    words: str

    @property
    def tried(self) -> bool:
        return not self.words.startswith(NOT_TRIED)


def rungs() -> list[Rung]:
    with PUBLISHED.open() as file:
        return [Rung(row["technique"], float(row["active_gib"]), row["words"]) for row in csv.DictReader(file)]


def measured(words: str) -> float:
    """GiB."""
    environment = virtual_gpu.environment(profile="a100-80")
    try:
        command = [sys.executable, str(TRAINING), *words.split()]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    finally:
        virtual_gpu.remove_session(environment["VGPU_SESSION"])
    return int(done.stdout) / GIB


def lines(published: Sequence[Rung], found: Sequence[float | None]) -> Iterator[str]:
    """A step's change is from the last row that was tried."""
    yield "| technique | published, GiB | here, GiB | difference | published step | step here | same direction |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    before: tuple[float, float] | None = None
    for rung, ours in zip(published, found, strict=True):
        if ours is None:
            yield f"| {rung.technique} | {rung.published:.1f} | {rung.words} | | | | |"
            continue
        steps = ["", "", ""]
        if before is not None:
            theirs, own = rung.published - before[0], ours - before[1]
            same = theirs * own > 0 and round(own, 1) != 0
            steps = [_signed(theirs, 1), _signed(own, 1), "yes" if same else "no"]
        apart = f"{_signed(100 * (ours / rung.published - 1), 1)} %"
        yield f"| {rung.technique} | {rung.published:.1f} | {ours:.2f} | {apart} | {' | '.join(steps)} |"
        before = rung.published, ours


def _signed(number: float, digits: int) -> str:
    return f"{number:+.{digits}f}".replace("-", MINUS)


def main() -> None:
    args = options(__doc__, write=True).parse_args()
    published = rungs()
    found = [measured(rung.words) if rung.tried else None for rung in published]
    machine = f"Measured on the virtual GPU (a100-80), torch {version('torch')}"
    write("Torchtune's ladder", f"{HEAD}\n" + "\n".join(lines(published, found)) + f"\n\n{FOOT}", args.write, machine)


if __name__ == "__main__":
    main()
