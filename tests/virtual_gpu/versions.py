"""Runs what depends on torch's own code with other versions of it, by hand: python tests/virtual_gpu/versions.py

Without arguments 2.4.1, 2.8.0 and the torch of this interpreter ("installed"); else the versions named, and what comes
after `--` goes to pytest. Each version gets an environment of its own with torch's CUDA wheel but none of the nvidia-*
wheels, kept in ``$XDG_CACHE_HOME/gpumon/torch`` for the next time (some 2 GB each).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
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

LEFT_OUT = ("torch", "numpy", "torch-gpumon", *ABOVE_TORCH)
"""What is installed by itself."""

OF_TORCH = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools")
OF_THOSE_ABOVE = ("packaging", "pyyaml", "regex", "safetensors", "tqdm", "typer")
NEWEST = ("huggingface-hub", "tokenizers")
BEFORE_TORCH_2_6 = ("huggingface-hub<1", "tokenizers<0.23")
"""transformers 5 is for torch 2.6 or newer."""

ASK = "import json; from importlib.metadata import requires as r; print(json.dumps([r('torch-gpumon'), r('torch')]))"


def interpreter(version: str) -> Path:
    """The Python of an environment with that torch and all that tests need, made if it is not there or lacks some."""
    if version == "installed":
        return Path(sys.executable)
    folder = cache_folder().parent / "torch" / version
    python = folder / "bin" / "python"
    complete = folder / "complete"
    number = tuple(map(int, version.split(".")[:2]))
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    alone = [f"torch=={version}", "accelerate", "transformers" if number >= (2, 6) else "transformers<5"]
    if not complete.exists():
        venv.create(folder, with_pip=True, clear=True)
    # anew each time: what the tests need may have changed since
    subprocess.run([*pip, "--no-deps", *alone, "-e", str(ROOT)], check=True)
    asked = subprocess.run([str(python), "-c", ASK], capture_output=True, text=True, check=True).stdout
    ours, torchs = ([each.partition(";") for each in requirements] for requirements in json.loads(asked))
    wanted = [what for what, _, when in ours if "extra" not in when or "test" in when]
    others = [each for each in wanted if re.split(r"[><=[]", each)[0] not in LEFT_OUT]
    triton = next(re.sub(r"[ ()]", "", what) for what, _, _ in torchs if what.startswith("triton"))
    needed = [*OF_TORCH, *OF_THOSE_ABOVE, *others, *(NEWEST if number >= (2, 6) else BEFORE_TORCH_2_6)]
    needed.append("numpy<2" if number < (2, 5) else "numpy")
    pins = ["-c", str(ROOT / "constraints.txt")] if number >= (2, 6) else []
    if not complete.exists() or complete.read_text().split() != needed:
        subprocess.run([*pip, "--no-deps", triton], check=True)
        subprocess.run([*pip, *pins, *needed], check=True)
        complete.write_text("\n".join(needed))
    return python


def main(arguments: list[str]) -> int:
    """The number of versions whose tests failed."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, more = arguments[:split], arguments[split + 1 :]
    failed = 0
    for version in versions or ["2.4.1", "2.8.0", "installed"]:
        python = interpreter(version)
        print(f"torch {version}", flush=True)
        workers = str(min(2, os.cpu_count() or 1))  # "auto" is none where files are named
        command = [str(python), "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider", *(more or TESTS)]
        environment = {**os.environ, "GPUMON_REQUIRE_VIRTUAL_GPU": "1"}
        if version != "installed":
            # the wheel alone is imported thanks to what stands in for the libraries that it lacks; no device is seen
            environment |= {**vgpu.environment(devices=0, python=str(python)), "GPUMON_OLDER_TORCH": "1"}
        failed += subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
