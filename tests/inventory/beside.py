"""Runs a scenario and prints, at each of its reading points, the owners' bytes beside what the allocator was asked for.

The agent has found the model, as under `gpumon run`; it publishes nothing: python beside.py SCENARIO ARGS…
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from gpumon_agent import agent as agents
from gpumon_agent import shim
from gpumon_agent.hooks import model_discovery

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"


def main() -> None:
    sys.argv = sys.argv[1:]
    scenario = SCENARIOS / sys.argv[0]
    sys.path.insert(0, str(SCENARIOS))
    import _report
    import torch

    agent = agents.REGISTRY.agent = agents.Agent(publish=False)
    model_discovery.install(shim._ToAgent())

    def look(report: _report.Report, phase: str, **_: Any) -> None:
        if torch.cuda.is_initialized():
            device = torch.device("cuda", torch.cuda.current_device())
            if phase == "between" and torch.distributed.is_initialized():
                time.sleep(0.5)  # NCCL's watchdog keeps the buckets from before the rebuild until it looks again
            owners = agent.inventory.owners(device)
            requested = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
            rank = int(os.environ.get("RANK", "0"))
            line = {"rank": rank, "phase": phase, **owners._asdict(), "rest": requested - sum(owners)}
            os.write(1, f"{json.dumps(line)}\n".encode())  # whole, beside the other ranks'
        original(report, phase)

    original = _report.Report.__call__
    _report.Report.__call__ = look  # type: ignore[method-assign,assignment]
    runpy.run_path(str(scenario), run_name="__main__")


if __name__ == "__main__":
    main()
