"""Agents in processes of their own, in a runtime directory of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TALKER = Path(__file__).with_name("talker.py")


class Agent:
    """A talker, asked and answering line by line."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(TALKER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.pid = self.process.pid
        answer = self._read()
        self.endpoint: str = answer["endpoint"]
        self.socket = Path(self.endpoint.removeprefix("ipc://"))

    def ask(self, command: str) -> Any:
        self.tell(command)
        return self._read()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stderr(self) -> str:
        """What it said by the end; ends it."""
        return self.process.communicate(timeout=60)[1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory where this test's agents have their sockets. Its path is short: a socket's may be 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="gm"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder / "gpumon"
    shutil.rmtree(folder)


@pytest.fixture
def start(runtime: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents; `start(name="a.py", rank=0)`, `env={...}` for its environment."""
    agents: list[Agent] = []

    def start(env: dict[str, str] | None = None, **options: Any) -> Agent:
        agents.append(Agent(options, env or {}))
        return agents[-1]

    yield start
    for agent in agents:
        agent.end()
