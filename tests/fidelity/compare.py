"""Runs the scenarios on a physical GPU and on a virtual one of its capacity, compares every figure, writes the page.

`python tests/fidelity/compare.py` writes benchmarks/virtual-gpu-fidelity.md from tests/fidelity/measured.json;
`pytest -m gpu` measures, on a machine with a GPU, then writes both. A scenario nobody measured says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios.catalogue import SCENARIOS, Scenario

PAGE = Path(__file__).parents[2] / "benchmarks" / "virtual-gpu-fidelity.md"
MEASURED = Path(__file__).with_name("measured.json")
RECORDINGS = Path(__file__).parents[1] / "data"
RECORDED = ("gpt-bf16", "checkpointing-non-reentrant", "tensor-leak-list", "outlier-batch")
"""Scenarios that `pytest -m gpu` also records, for replay in CI."""
GPUMON = (sys.executable, "-m", "gpumon")
TIMEOUT_S = 300
PROFILES = {"9.0": "h200", "8.9": "l4", "8.0": "a100-80", "7.5": "t4", "7.0": "v100-16"}
"""Compute capability → the virtual device that behaves like it; cuBLAS's workspace depends on it."""
HEAD = """# The virtual GPU beside a physical one

The same torch runs each scenario of [scenarios.md](../docs/scenarios.md) on a virtual and a physical GPU of the same
capacity. At the end of each phase the allocator's figures are compared: allocated and reserved with their peaks,
active, inactive split, requested, blocks, segments, retries. "figures" is their number, "differ" how many are not equal
to the byte. A scenario that was never run on a physical GPU says "not yet measured".

`tests/fidelity/compare.py` writes this page; `pytest -m gpu` fills it in on a machine with a GPU.
"""
FOOT = """
## Two figures that are known only rounded

Before there were scenarios, two figures were read after the backward of a six-layer GPT of 312.5 MiB under DDP and
AdamW: 1567.6 MiB (`gradient_as_bucket_view=False`) and 1251.2 MiB (`True`). The script and its batch were not kept. The
figures are `memory_allocated`, which includes the rest of a block that is not split (up to 1 MiB in blocks of more than
1 MiB). 5 and 4 times the weights are 1562.4 and 1249.9 MiB; the remaining 5.2 and 1.3 MiB are such rests. They depend
on the order in which activations of which size were freed before.

388 combinations were tried to reproduce both figures: some 70 ways to write the model (GPT-2 of transformers,
`nn.TransformerEncoder`, `nn.MultiheadAttention`, fused or separate projections; dropout, masks, a final norm or none),
made on the device or moved to it, with batches of 64 to 8,192 tokens. They ran on this virtual GPU and on the program
with which the figures were read; where both were tried, they agreed.

- 1251.2 MiB is the result of 88 of 106 runs of a model of 312.47 MiB that was moved to the device and got 1,024 or
  2,048 tokens, with the logits freed. With `gradient_as_bucket_view=False` the same runs give 1564.4 to 1574.5 MiB.
- 1567.6 MiB was the result three times (with 1251.1, twice, and with 1253.7), never together with 1251.2; the nearest
  together with it is 1567.7.

So the pair is not reproduced to the byte. Without the rests, as requested bytes, both figures are
(`tests/scenarios/test_ranks.py`).

## What differs without a physical GPU

To test `pytest -m gpu` itself, 13 of its scenarios were run with a virtual device in place of the physical one, torch
2.15.0. The figures of 11 were equal to the byte. Those of `ddp-gloo` and `ddp-gloo-clean` were not: which of the two
ranks held 22 MiB more in the phase `load` changed from run to run, and with it 54 of 374 figures (171 for
`ddp-gloo-clean`). For these two a difference says nothing about the physical GPU.
"""


@dataclass(frozen=True)
class Difference:
    """One figure that is not the same on both."""

    where: str
    physical: int | None
    virtual: int | None

    @property
    def size(self) -> int:
        return abs((self.physical or 0) - (self.virtual or 0))

    def __str__(self) -> str:
        return f"{self.where}: physical {self.physical}, virtual {self.virtual}"


def measure(scenario: Scenario, environment: dict[str, str]) -> dict[str, int]:
    """Every figure that the scenario reports, by where it stands. Raises AssertionError if it ends wrongly."""
    completed = subprocess.run(
        scenario.command("--report", *scenario.capacity),
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (completed.returncode != 0) == bool(scenario.fails), completed.stdout + completed.stderr
    assert scenario.fails in completed.stderr, completed.stderr
    lines = [json.loads(line) for line in completed.stdout.splitlines() if line.startswith('{"')]
    return dict(figures(lines))


def record(scenario: Scenario, path: Path, environment: dict[str, str], steps: int = 30) -> None:
    """Train under `gpumon run` and write what `gpumon record` receives to `path`, for replay without a GPU."""
    train = scenario.command("--steps", steps, "--sleep", "0.1", *scenario.capacity)
    with subprocess.Popen([*GPUMON, "run", "--name", scenario.name, *train], env=environment) as training:
        while True:
            recorder = subprocess.run(
                [*GPUMON, "record", "--force", str(path), scenario.name],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            if recorder.returncode == 0:
                return
            assert training.poll() is None, recorder.stderr
            time.sleep(0.1)


def figures(lines: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    """Where a figure stands, such as `rank 0, step 3, backward 0, allocated`, and its value."""
    for line in lines:
        if "phases" not in line or "open" in line:
            continue
        indices: dict[str, int] = {}
        for entry in line["phases"]:
            index = indices[entry["phase"]] = indices.get(entry["phase"], -1) + 1
            for name, value in entry.items():
                if name != "phase":
                    yield f"rank {line.get('rank', 0)}, step {line['step']}, {entry['phase']} {index}, {name}", value


def compare(physical: dict[str, int], virtual: dict[str, int]) -> list[Difference]:
    """What is not the same, the largest first; a figure that only one has differs."""
    places = [*physical, *(place for place in virtual if place not in physical)]
    differing = [
        Difference(place, physical.get(place), virtual.get(place))
        for place in places
        if physical.get(place) != virtual.get(place)
    ]
    return sorted(differing, key=lambda difference: -difference.size)


def virtual_environment(device: dict[str, Any], devices: int) -> dict[str, str]:
    """Virtual devices like the physical one. Raises gpumon.virtual_gpu.BuildUnavailable."""
    from gpumon import virtual_gpu

    return virtual_gpu.environment(
        devices=devices, profile=PROFILES[device["capability"]], memory=f"{device['total'] // 2**20}MiB"
    )


def physical_device() -> dict[str, Any] | None:
    """What the first physical GPU is, read in a process of its own; None where there is none."""
    script = """
import json, torch
if torch.cuda.is_available():
    import pynvml
    pynvml.nvmlInit()
    properties = torch.cuda.get_device_properties(0)
    print(json.dumps({"name": properties.name, "total": properties.total_memory, "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}", "torch": torch.__version__,
        "driver": pynvml.nvmlSystemGetDriverVersion()}))
"""
    completed = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    device: dict[str, Any] | None = json.loads(completed.stdout) if completed.stdout.strip() else None
    return device


def row(scenario: Scenario, measured: dict[str, Any]) -> str:
    result = measured.get("scenarios", {}).get(scenario.name)
    if scenario.virtual_only:
        cells = ["virtual only", "", ""]
    elif result is None:
        cells = ["not yet measured", "", ""]
    else:
        cells = [f"{result['figures']:,}", f"{result['differ']:,}", result["largest"]]
    return f"| {' | '.join((scenario.name, *cells))} |"


def page() -> str:
    """The whole page, from what was measured so far."""
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    machine = "not yet measured"
    if measured:
        device = measured["device"]
        machine = (
            f"{device['name']}, {device['total'] / 2**30:.1f} GiB, driver {device['driver']}, torch {device['torch']}"
        )
    rows = "\n".join(row(scenario, measured) for scenario in SCENARIOS)
    head = "| scenario | figures | differ | largest difference |\n|---|---|---|---|"
    return f"{HEAD}\nPhysical GPU: {machine}\n\n{head}\n{rows}\n{FOOT}"


if __name__ == "__main__":
    PAGE.write_text(page())
