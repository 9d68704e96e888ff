"""Loads what was compiled for the installed torch: the agent's C++ functions.

`gpumon doctor --build` or `gpumon run` compiles them, never a training process, which only loads what it finds in the
user's cache. Without them the agent does the same in Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from pathlib import Path

from gpumon_agent import environment
from gpumon_agent.guard import pass_on

_HERE = Path(__file__).parent
SOURCES = (
    _HERE / "allocator" / "native.cpp",
    _HERE / "attribution" / "storages.cpp",
    _HERE / "hooks" / "quiet_hooks.cpp",
)


def build_path(version: str, git_version: str) -> Path:
    """Where the build for this torch is kept: `$XDG_CACHE_HOME/gpumon/native`, by default under ~/.cache.

    Raises RuntimeError if the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "gpumon" / "native"
    digest = hashlib.sha256(f"{version} {git_version} {os.uname().machine} ".encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return folder / f"{version}-{digest.hexdigest()[:16]}.so"


def load() -> ctypes.PyDLL | None:
    """The functions for this process's torch. None: not wanted, not built, or another user could have changed them.

    The file ends with a digest of the rest: the loader would end the training at a page that is missing (SIGBUS).
    """
    from torch import version

    if environment.value("GPUMON_NATIVE") == "off":
        return None
    try:
        path = build_path(version.__version__, version.git_version or "")
        if not (_is_ours(path) and _is_ours(path.parent) and is_whole(path.read_bytes())):
            return None
        return ctypes.PyDLL(str(path))
    except (OSError, RuntimeError) as error:  # not there, no home, no memory
        pass_on(error)
        return None


def sealed(built: bytes) -> bytes:
    return built + hashlib.sha256(built).digest()


def is_whole(found: bytes) -> bool:
    return sealed(found[: -hashlib.sha256().digest_size]) == found


def _is_ours(path: Path) -> bool:
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
