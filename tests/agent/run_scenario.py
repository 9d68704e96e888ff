"""Runs a scenario as the shim would, with an agent that publishes nothing; writes what it recorded to OUT.RANK."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

from gpumon_agent import agent as agents
from gpumon_agent import shim, wire
from gpumon_agent.hooks import model_discovery


def main(out: str, script: str, *args: str) -> None:
    agent = agents.REGISTRY.agent = agents.Agent(publish=False)
    model_discovery.install(shim._ToAgent())

    def dump() -> None:
        agent.phases.finish()
        events = [event for _, event in agent.recorder.drain()]
        answer = {
            "phases": [
                {
                    **{name: getattr(e, name) for name in ("step", "phase", "index", "flags", "device")},
                    **{name: getattr(e, name) for name in ("allocated", "allocated_peak", "reserved", "reserved_peak")},
                    **{name: getattr(e, name) for name in ("active", "inactive_split", "requested", "retries", "ooms")},
                }
                for e in events
                if isinstance(e, wire.Phase)
            ],
            "steps": [{"step": e.step, "skipped": e.skipped} for e in events if isinstance(e, wire.Step)],
            "ooms": [{"phase": e.phase, "requested": e.requested} for e in events if isinstance(e, wire.Oom)],
            "failures": [name for name, count in agent.guard.failures.items() if count],
        }
        Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(answer))

    atexit.register(dump)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
