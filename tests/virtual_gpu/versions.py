"""Runs what depends on torch's own code with other versions of it, by hand: python tests/virtual_gpu/versions.py

Without arguments 2.4.1, 2.8.0 and the torch of this interpreter ("installed"); else the versions named, and what comes
after `--` goes to pytest. Each version gets an environment of its own with torch's CUDA wheel but none of the nvidia-*
wheels, kept in ``$XDG_CACHE_HOME/gpumon/torch`` for the next time (some 2 GB each).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import requires
from pathlib import Path

from gpumon import virtual_gpu as vgpu
from gpumon.virtual_gpu.building import cache_folder

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/virtual_gpu",
    "tests/scenarios",
    "tests/inventory",
    "tests/agent",
    "tests/oom/test_walk.py",
    "tests/analysis/test_simulator.py",
    "tests/analysis/test_optimizers.py",
)
ABOVE_TORCH = ("accelerate", "transformers")
"""They ask for torch, and so for the wheels beside it."""

OF_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
OF_THOSE_ABOVE = ("huggingface-hub", "packaging", "pyyaml", "regex", "safetensors", "tokenizers", "tqdm", "typer")


def interpreter(version: str) -> Path:
    """The Python of an environment with that torch and all that tests need, made if it is not there."""
    if version == "installed":
        return Path(sys.executable)
    folder = cache_folder().parent / "torch" / version
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        asked = [each.partition(";") for each in requires("torch-gpumon") or ()]
        wanted = [what for what, _, when in asked if "extra" not in when or "'test'" in when]
        others = [each for each in wanted if re.split(r"[><=[]", each)[0] not in ("torch", "numpy", *ABOVE_TORCH)]
        numpy = "numpy<2" if tuple(map(int, version.split(".")[:2])) < (2, 5) else "numpy"
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pins = ["-c", str(ROOT / "constraints.txt")] if numpy == "numpy" else []
        alone = [f"torch=={version}", *ABOVE_TORCH]
        subprocess.run([*pip, "--no-deps", *alone], check=True)
        subprocess.run([*pip, *pins, *OF_TORCH, *OF_THOSE_ABOVE, *others, numpy], check=True)
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        (folder / "complete").touch()
    return python


def main(arguments: list[str]) -> int:
    """The number of versions whose tests failed."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, more = arguments[:split], arguments[split + 1 :]
    failed = 0
    for version in versions or ["2.4.1", "2.8.0", "installed"]:
        python = interpreter(version)
        print(f"torch {version}", flush=True)
        command = [str(python), "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", *(more or TESTS)]
        environment = {**os.environ, "GPUMON_REQUIRE_VIRTUAL_GPU": "1"}
        if version != "installed":
            # the wheel alone is imported thanks to what stands in for the libraries that it lacks; no device is seen
            environment |= {**vgpu.environment(devices=0, python=str(python)), "GPUMON_OLDER_TORCH": "1"}
        failed += subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
