"""What an agent tells of a script, without a socket: every message in order, and what is found of it.

Run as a script it runs another one as the shim would, with an agent that publishes nothing:

    python told.py OUT SCRIPT ARGUMENT …

OUT then holds one message after another, each after its length in four bytes.
"""

from __future__ import annotations

import atexit
import runpy
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpumon.analysis import Finding
    from gpumon_agent import wire


def told(gpu: Any, folder: Path, script: Path, *args: str, **environment: str) -> Iterator[wire.Received]:
    """The messages of a script that ran to its end on a virtual GPU, in a process forked from one that has torch."""
    out = folder / f"{script.stem}.told"
    env = {**gpu.environment, "GPUMON_GOVERNOR": "off", **environment}
    ended = gpu.forks.run([__file__, str(out), str(script), *args], env, folder, timeout=300)
    assert ended.codes == (0,), ended.err
    from gpumon_agent import wire

    raw, at = out.read_bytes(), 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        yield wire.decode_received(raw[at + 4 : at + 4 + length])
        at += 4 + length


def looks(messages: Iterator[wire.Received]) -> Iterator[tuple[int, tuple[Finding, ...]]]:
    """The step, and what is found as it closes or as a census or a checkpoint tells something."""
    from gpumon.analysis import Reporter
    from gpumon.session.store import SessionStore
    from gpumon_agent import wire

    store, reporter = SessionStore(), Reporter()
    step = 0
    for received in messages:
        store.apply(received)
        rank = store.rank(received.source, 0)
        if rank is not None and isinstance(received.event, (wire.Step, wire.Census, wire.Checkpoint)):
            step = received.event.step if isinstance(received.event, wire.Step) else step
            yield step, reporter.rank(rank).findings


def findings(messages: Iterator[wire.Received]) -> tuple[tuple[Finding, ...], dict[str, Finding]]:
    """Those of the end, and by code every one that ever was."""
    ever: dict[str, Finding] = {}
    newest: tuple[Finding, ...] = ()
    for _, newest in looks(messages):
        ever.update({each.code: each for each in newest})
    return newest, ever


def _tell(out: str, script: str, *args: str) -> None:
    from gpumon_agent import agent as agents
    from gpumon_agent import shim, wire
    from gpumon_agent.hooks import model_discovery

    agent = agents.REGISTRY.agent = agents.Agent(publish=False)
    said: list[tuple[int, wire.Event]] = []

    def say(events: tuple[wire.Event, ...]) -> None:
        said.extend(agent.recorder.drain())
        said.extend((-1, event) for event in events)

    agent.transport.say = say  # type: ignore[method-assign]
    model_discovery.install(shim._ToAgent())

    def dump() -> None:
        agent.phases.finish()
        say(())
        picture = [event for event in agent.picture() if isinstance(event, (wire.Hello, wire.Model, wire.Module))]
        source = picture[0].nonce if picture and isinstance(picture[0], wire.Hello) else "nobody"
        with Path(out).open("wb") as file:
            for seq, event in (*((-1, each) for each in picture), *said):
                message = wire.encode_received(wire.Received(source, getattr(event, "t_ns", 0), event, seq))
                file.write(struct.pack("<I", len(message)) + message)

    atexit.register(dump)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _tell(*sys.argv[1:])
