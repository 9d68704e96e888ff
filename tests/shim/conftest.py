"""Commands started with and without gpumon, each with a runtime directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

SEEN = """
def seen():
    'What the agent of this process knows, from inside it.'
    import sys
    agent = sys.modules.get("gpumon_agent.agent")
    running = agent and agent.REGISTRY.agent
    models = [m.kind for m in running.picture() if type(m).__name__ == "Model"] if running else []
    return "watched " + ",".join(models) if running else "unwatched"
"""


@dataclass
class Commands:
    folder: Path
    environment: dict[str, str]

    def script(self, text: str, name: str = "train.py") -> str:
        return self.exact(SEEN + textwrap.dedent(text), name)

    def exact(self, text: str, name: str = "train.py") -> str:
        if "import torch" in text and not find_spec("torch"):
            pytest.skip("torch is not installed")
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def plain(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env={**self.environment, **extra}, capture_output=True, text=True, timeout=300
        )

    def watched(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return self.plain(sys.executable, "-m", "gpumon", "run", *words, **extra)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GPUMON_", "PYTHON"))}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["GPUMON_GOVERNOR"] = "off"
    environment["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="gm") as runtime:  # a socket's path has 107 bytes
        environment["XDG_RUNTIME_DIR"] = runtime
        yield Commands(tmp_path, environment)
