"""Runs this folder's tests with other versions of torch, by hand: python tests/virtual_gpu/versions.py 2.4.1 2.8.0

Each version gets an environment of its own with torch's CUDA wheel but none of the nvidia-* wheels, kept in
``$XDG_CACHE_HOME/gpumon/torch`` for the next time (some 2 GB each).
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from gpumon.virtual_gpu.building import cache_folder

HERE = Path(__file__).parent
DEPENDENCIES = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "nvidia-ml-py"]


def interpreter(version: str) -> Path:
    """The Python of an environment with that torch, made if it is not there."""
    folder = cache_folder().parent / "torch" / version
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        numpy = "numpy<2" if tuple(map(int, version.split(".")[:2])) < (2, 5) else "numpy"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", f"torch=={version}"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *DEPENDENCIES, numpy], check=True)
        (folder / "complete").touch()
    return python


def main(versions: list[str]) -> int:
    """The number of versions whose tests failed."""
    failed = 0
    for version in versions:
        environment = {
            **os.environ,
            "GPUMON_VIRTUAL_GPU_PYTHON": str(interpreter(version)),
            "GPUMON_REQUIRE_VIRTUAL_GPU": "1",
        }
        print(f"torch {version}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE)]
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["2.4.1", "2.8.0"]))
