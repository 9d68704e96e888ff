"""How soon a scenario trains, beyond importing torch: `python benchmarks/scenario_start.py [NAME …]` (mlp, bert-large).

From the script's first line, torch imported, to the end of its first step and of the process's work, on the virtual
GPU. Budget: 5 s.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

from gpumon import virtual_gpu

ROUNDS = 5
SCENARIOS = Path(__file__).parents[1] / "tests"
TIMED = """
import runpy, sys, time
import torch
script, sys.argv = sys.argv[1], [sys.argv[1], "--steps", "1"]
sys.path[0] = script.rpartition("/")[0]
wall, cpu = time.perf_counter(), time.process_time()
runpy.run_path(script, run_name="__main__")
print(time.perf_counter() - wall, time.process_time() - cpu, file=sys.stderr)
"""


def main(names: list[str]) -> None:
    sys.path.insert(0, str(SCENARIOS))
    from scenarios.catalogue import BY_NAME

    print(f"{'scenario':<16}{'wall s':>10}{'least':>8}{'most':>8}{'CPU s':>10}")
    for name in names:
        environment = virtual_gpu.environment()
        try:
            told = [
                subprocess.run(
                    [sys.executable, "-c", TIMED, str(BY_NAME[name].path)],
                    env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                ).stderr.split()[-2:]
                for _ in range(ROUNDS)
            ]  # fmt: skip
        finally:
            virtual_gpu.remove_session(environment["VGPU_SESSION"])
        walls, cpus = ([float(each[i]) for each in told] for i in (0, 1))
        print(f"{name:<16}{median(walls):>10.2f}{min(walls):>8.2f}{max(walls):>8.2f}{median(cpus):>10.2f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["mlp", "bert-large"])
