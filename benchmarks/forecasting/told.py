"""Runs a script with an agent and records the agent's events and a viewer's readings.

    python benchmarks/forecasting/told.py OUT SCRIPT ARGUMENT …

Like `gpumon record` next to `gpumon run`, but in one process: it takes the agent's events at each phase boundary, as
the transport does, reads the device, and sends the agent its memory budget. So a run can be forked from a process with
torch imported (tests' forks) and takes a second. With several ranks, each writes OUT with its number. Used by
benchmarks/forecast.py.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
from pathlib import Path

from gpumon import link
from gpumon.analysis.device_budget import available
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import agent as agents
from gpumon_agent import shim, wire
from gpumon_agent.hooks import model_discovery
from gpumon_agent.shape_model.outlook import Followed

READ_EVERY_S = 0.05


class Beside:
    """The agent's transport and the viewer, in the training thread."""

    def __init__(self, agent: agents.Agent) -> None:
        self._agent = agent
        self._drain = Followed(agent.recorder.drain, agent.outlooks.drained).drain
        self._store = SessionStore(StoreLimits(steps=32, host_samples=8), replaying=True)
        self._said: list[wire.Received] = []
        self._source = ""
        self._read_at = 0.0
        agent.transport.say = self.say  # type: ignore[method-assign]
        agent._flush_ring = self._turn

    def say(self, events: tuple[wire.Event | bytes, ...]) -> None:
        self._turn()
        for event in events:
            if not isinstance(event, bytes):
                self._put(event)

    def _turn(self) -> None:
        drained = self._drain()
        if drained and not self._source:
            picture = [e for e in self._agent.picture() if isinstance(e, (wire.Hello, wire.Model, wire.Module))]
            for event in picture:
                self._source = event.nonce if isinstance(event, wire.Hello) else self._source
                self._put(event)
        for seq, event in drained:
            self._put(event, seq)
        if drained and time.monotonic() - self._read_at > READ_EVERY_S:
            self._read()
        if drained and any(isinstance(event, wire.Step) for _, event in drained):
            self._tell()

    def _put(self, event: wire.Event, seq: int = -1) -> None:
        received = wire.Received(self._source or "nobody", time.time_ns(), event, seq)
        self._said.append(received)
        self._store.apply(received)

    def _read(self) -> None:
        import torch

        rank = self._store.rank(self._source, 0)
        if rank is None or not torch.cuda.is_initialized():
            return
        self._read_at = time.monotonic()
        readings = []
        for device in rank.hello.devices:
            if device.uuid is not None and device.kind == "cuda":
                began = time.monotonic_ns()
                free, total = torch.cuda.mem_get_info(device.index)
                reading = wire.DeviceReading(
                    device.uuid, total=total, free=free, used=total - free, began_ns=began, ended_ns=time.monotonic_ns()
                )
                readings.append(reading)
        host = wire.Host(rank.hello.host, time.monotonic_ns(), devices=tuple(readings))
        received = wire.Received(f"host:{rank.hello.host}", time.time_ns(), host)
        self._said.append(received)
        self._store.apply(received)

    def _tell(self) -> None:
        rank = self._store.rank(self._source, 0)
        if rank is None or not rank.steps:
            return
        for device in {phase.device for phase in rank.steps[-1].phases}:
            room = available(rank, device)
            if room is not None:
                self._agent.budget[device] = room

    def end(self, out: Path) -> None:
        self._agent.phases.finish()
        self._turn()
        rank = os.environ.get("RANK")
        path = out if rank is None else out.with_name(f"{out.stem}.{rank}{out.suffix}")
        with link.Recording(path, force=True) as recording:
            for received in self._said:
                recording.write(received)


def main() -> None:
    out, script = Path(sys.argv[1]), sys.argv[2]
    agent = agents.REGISTRY.agent = agents.Agent(publish=False)
    beside = Beside(agent)
    model_discovery.install(shim._ToAgent())
    atexit.register(beside.end, out)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
