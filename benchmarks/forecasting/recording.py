"""How benchmarks/forecast.py makes its recordings: as a user would, or from forked processes that record themselves.

`beside` runs `gpumon record` next to `gpumon run`. With the governor off every step has peaks, even on a busy machine
where the governor would skip most of these short steps. `told` forks a process that has already imported torch; the
agent and the recorder run inside it (told.py), with the governor off. It takes a second or two per run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from forks import Forks

from gpumon import virtual_gpu as vgpu

ROOT = Path(__file__).parents[2]
TELLER = Path(__file__).with_name("told.py")
CONTEXT = "450MiB"
SMALL = "1024MiB"
LONGEST_S = 240


class Recordings:
    """Recordings in a folder; existing ones are reused."""

    def __init__(self, folder: Path, *, only_kept: bool = False) -> None:
        self._folder = folder
        self._only_kept = only_kept
        self._forks = Forks(sys.executable)

    def close(self) -> None:
        self._forks.close()

    def _kept(self, name: str, ranks: int = 1) -> tuple[list[Path], bool]:
        """Paths of its recordings, one file per rank, and whether all of them are done."""
        stem = "".join(c if c.isalnum() else "-" for c in name)
        names = [f"{stem}.gpumon"] if ranks == 1 else [f"{stem}.{rank}.gpumon" for rank in range(ranks)]
        files = [self._folder / name for name in names]
        return files, self._only_kept or all(file.exists() for file in files)

    def beside(self, name: str, memory: str | None, command: Sequence[str], governed: bool) -> list[Path]:
        (file,), done = self._kept(name)
        if done:
            return [file] if file.exists() else []
        environment = vgpu.environment(devices=1, profile="a100-40", memory=memory, context=CONTEXT)
        job = f"forecast-{os.getpid()}-{len(list(self._folder.iterdir()))}"
        environment |= {"GPUMON_NAME": job, "GPUMON_OOM_DIR": "off"}
        if not governed:
            environment["GPUMON_GOVERNOR"] = "off"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        training = subprocess.Popen(
            [sys.executable, "-m", "gpumon", "run", *command], env=environment, cwd=ROOT, **quiet
        )
        try:
            end = time.monotonic() + LONGEST_S
            while training.poll() is None and time.monotonic() < end:
                done_recording = subprocess.run(
                    [sys.executable, "-m", "gpumon", "record", "--force", str(file), job],
                    env=environment, cwd=ROOT, timeout=LONGEST_S, check=False, **quiet,
                )  # fmt: skip
                if not done_recording.returncode:
                    break
            training.wait(60)
        except subprocess.TimeoutExpired:
            return []
        finally:
            training.kill()
            vgpu.remove_session(environment["VGPU_SESSION"])
        return [file] if file.exists() else []

    def told(self, name: str, memory: str | None, command: Sequence[str], ranks: int = 1) -> list[Path]:
        files, done = self._kept(name, ranks)
        if done:
            return [file for file in files if file.exists()]
        environment = vgpu.environment(devices=ranks, profile="a100-40", memory=memory, context=CONTEXT)
        environment |= {"GPUMON_GOVERNOR": "off", "GPUMON_OOM_DIR": "off", "GPUMON_NAME": "forecast"}
        out = self._folder / f"{files[0].name.split('.')[0]}.gpumon"
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._forks.run(
                    [str(TELLER), str(out), *command], environment, Path(folder), ranks=ranks, timeout=LONGEST_S
                )
            finally:
                vgpu.remove_session(environment["VGPU_SESSION"])
        return [file for file in files if file.exists()]
