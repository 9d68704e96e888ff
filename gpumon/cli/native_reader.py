"""Compiles the agent's C++ (its reader of the allocator, hooks) for the installed torch, into the user's cache."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gpumon.cli.printing import say
from gpumon_agent import compiled

OLDEST_TORCH = (2, 9)
"""has c10::getDeviceAllocator (pytorch#138222)"""
PATIENCE_S = 60.0
_LOADS = """import sys, torch, ctypes
each = ctypes.PyDLL(sys.argv[1])
each.gpumon_boundary, each.gpumon_hook, each.gpumon_read"""


class NotBuilt(Exception):
    """There is no native reader; the message says why."""


class NotNeeded(NotBuilt):
    """There is no allocator to read: no torch, or one without a GPU."""


def find() -> tuple[Path, bool]:
    """Where the reader for this torch is kept, and whether it is there. Raises NotBuilt if it can have none."""
    folder, version, git_version = _torch()
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        raise NotBuilt(f"the native reader needs torch 2.9 or newer, and this is {version}")
    if not list((folder / "lib").glob("libc10_[ch]*.so")):
        raise NotNeeded(f"torch {version} supports only the CPU: there is no CUDA allocator to read")
    try:
        path = compiled.build_path(version, git_version)
        return path, path.exists() and compiled.is_whole(path.read_bytes())
    except (RuntimeError, OSError) as error:
        raise NotBuilt(f"the native reader has no place to be kept in ({error})") from error


def compiler() -> str:
    found = os.environ.get("CXX") or "g++"
    if shutil.which(found) is None:
        raise NotBuilt(f"the native reader is compiled on this machine, and {found} was not found; set CXX")
    return found


def build(*, again: bool = True) -> Path:
    """The reader's file, compiled in two to three seconds if it is not there. Raises NotBuilt.

    `again`: also if the compiler has failed before.
    """
    path, there = find()
    if there:
        return path
    failed = path.with_suffix(".failed")
    if failed.exists() and not again:
        raise NotBuilt(f"it could not be compiled before ({failed})")
    command = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=path.parent) as private:
            made = Path(private) / path.name
            try:
                _compile(command, made)
            except NotBuilt:
                failed.touch()
                raise
            made.write_bytes(compiled.sealed(made.read_bytes()))
            made.chmod(0o700)
            made.rename(path)
            failed.unlink(missing_ok=True)
    except OSError as error:
        raise NotBuilt(f"the native reader cannot be built in {path.parent} ({error.strerror})") from error
    return path


def _compile(compiler: str, target: Path) -> None:
    """And loads it once, in a process of its own."""
    folder, version, _ = _torch()
    if sys.stderr.isatty():
        say(f"gpumon: compiling its hooks and its reader of the allocator for torch {version}, once", err=True)
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    for command in (
        [compiler, *flags, *map(str, compiled.SOURCES), "-lc10", "-o", str(target)],
        [sys.executable, "-c", _LOADS, str(target)],
    ):
        try:
            ran = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotBuilt(f"compiling the native reader took longer than {PATIENCE_S:.0f} s") from error
        if ran.returncode:
            errors = [line for line in ran.stderr.decode("utf-8", "replace").splitlines() if "rror" in line]
            why = errors[0].strip() if errors else f"exit code {ran.returncode}"
            raise NotBuilt(f"the native reader could not be compiled for torch {version} ({why})")


def _torch() -> tuple[Path, str, str]:
    """Folder, version and git version of the torch this Python would import; it is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotNeeded("this Python has no torch")
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text()
    except OSError as error:
        raise NotBuilt(f"this Python's torch has no version ({error})") from error
    version, commit = (
        re.search(rf"^{name}\b.*?=\s*'([^']+)'", text, re.MULTILINE) for name in ("__version__", "git_version")
    )
    return folder, version[1] if version else "", commit[1] if commit else ""
