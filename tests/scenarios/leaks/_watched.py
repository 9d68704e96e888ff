"""Runs a script as the shim would, with an agent that publishes nothing: what it would have told goes to OUT.

    python _watched.py OUT SCRIPT ARGUMENT …

OUT holds one message after another, each after its length in four bytes, in the order in which they were said.
"""

from __future__ import annotations

import atexit
import runpy
import struct
import sys
from pathlib import Path

from gpumon_agent import agent as agents
from gpumon_agent import find, shim, wire


def main(out: str, script: str, *args: str) -> None:
    agent = agents._agent = agents.Agent(publish=False)
    told: list[tuple[int, wire.Event]] = []

    def say(events: tuple[wire.Event, ...]) -> None:
        told.extend(agent.recorder.drain())
        told.extend((-1, event) for event in events)

    agent.publisher.say = say  # type: ignore[method-assign]
    find.install(shim._ToAgent())

    def dump() -> None:
        agent.phases.finish()
        say(())
        picture = [event for event in agent.picture() if isinstance(event, (wire.Hello, wire.Model, wire.Module))]
        source = picture[0].nonce if picture and isinstance(picture[0], wire.Hello) else "nobody"
        with Path(out).open("wb") as file:
            for seq, event in (*((-1, each) for each in picture), *told):
                message = wire.encode_received(wire.Received(source, getattr(event, "t_ns", 0), event, seq))
                file.write(struct.pack("<I", len(message)) + message)

    atexit.register(dump)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
