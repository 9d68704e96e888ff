"""What a sampled step costs the training thread, by its task, with BERT-large's loop: medians and maxima.

python -m gpumon.virtual_gpu run -n 1 -p a100-40 -- python benchmarks/sampled_step.py [STEPS]

Every step is sampled, so that the tasks take turns; the first sixteen, whose caches are cold, are told apart. Thread
time is the work itself; the wall clock has what else the machine did meanwhile.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from gpumon_agent import agent as agents
from gpumon_agent import governor, wire
from gpumon_agent.attribution import accounts

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "scenarios"))

COLD = 16
TIMED = ("inputs", "_walk", "boundary", "close_step")


def timed(spent: list[int]) -> None:
    """Wraps what a sampled step calls."""
    for name in TIMED:
        original = getattr(accounts.Accounts, name)

        def wrapper(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            thread, wall = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                spent[0] += time.thread_time_ns() - thread
                spent[1] += time.perf_counter_ns() - wall

        setattr(accounts.Accounts, name, wrapper)


def main(steps: int) -> None:
    bert_large = importlib.import_module("bert_large")
    governor.STEP_SHARE = 1000.0
    governor.SAMPLED_STEP_NS = 10**12
    vars(accounts)["SAMPLED_STEP_NS"] = 10**12  # nothing rests: this measures, whatever it costs
    spent = [0, 0]
    timed(spent)
    agent = agents._agent = agents.Agent("benchmark", publish=False)
    model = bert_large.build().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    agent.adopt(model, optimizer)
    found: defaultdict[tuple[bool, str], list[tuple[float, float]]] = defaultdict(list)
    for step in range(steps):
        tokens = torch.randint(100, 30000, (4, 512)).cuda()
        labels = torch.randint(2, (4,)).cuda()
        loss = F.cross_entropy(model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del tokens, labels, loss
        ledgers = [event for _, event in agent.recorder.drain() if isinstance(event, wire.Ledger)]
        walked = any(each.activations is not None for each in ledgers if each.phase == wire.FORWARD)
        tasks = ["walk"] * walked + ["peak"] * any(each.peak for each in ledgers)
        found[step >= COLD, " and ".join(tasks) or "neither"].append((spent[0] / 1e6, spent[1] / 1e6))
        spent[:] = [0, 0]
    agent.leave("stopped")
    print("steps        task           thread time, ms: median  max   wall clock, ms: median  max")
    for (warm, task), costs in sorted(found.items()):
        thread, wall = (sorted(each) for each in zip(*costs, strict=True))
        row = f"{len(costs):4} {'warm' if warm else 'cold':<7} {task:<14} {thread[len(thread) // 2]:23.1f}"
        print(f"{row} {thread[-1]:5.1f} {wall[len(wall) // 2]:23.1f} {wall[-1]:5.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 80)
