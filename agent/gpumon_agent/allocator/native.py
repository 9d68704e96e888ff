"""Reads the CUDA allocator through a C++ function (native.cpp), a quarter of the cost of torch's dict.

`torch._C._cuda_memoryStats` builds a dict of a hundred entries: 12 to 40 µs with the cold caches of a training step.
`c10::DeviceAllocator::getDeviceStats` (c10/core/CachingDeviceAllocator.h, since torch 2.9) returns the same numbers as
a struct. The function is compiled for the installed torch by `gpumon doctor --build` or `gpumon run`, never in a
training process, which only loads what it finds in the user's cache.

Known limitations. While private memory pools exist (CUDA graphs, `torch.cuda.MemPool`), the dict is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from gpumon_agent.guard import pass_on

SOURCE = Path(__file__).with_name("native.cpp")
RESET, CHECK = 1, 2
FAILED, READ, DISTURBED, POOLS = -1, 0, 1, 2

Figures: Callable[[], ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * 10
Peaks: Callable[[], ctypes.Array[ctypes.c_int64]] = ctypes.c_int64 * 29
Boundary = Callable[[int, "ctypes.Array[ctypes.c_int64]", "ctypes.Array[ctypes.c_int64]", int], int]
"""device, figures, peaks (raised), RESET | CHECK → READ, DISTURBED, POOLS or FAILED"""


def build_path(version: str, git_version: str) -> Path:
    """Where the build for this torch is kept: `$XDG_CACHE_HOME/gpumon/native`, by default under ~/.cache.

    Raises RuntimeError if the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "gpumon" / "native"
    digest = hashlib.sha256(f"{version} {git_version} {os.uname().machine} ".encode() + SOURCE.read_bytes())
    return folder / f"{version}-{digest.hexdigest()[:16]}.so"


def load() -> Boundary | None:
    """The function for this process's torch. None if it was not built, or if another user could have changed it.

    The file ends with a digest of the rest: the loader would end the training at a page that is missing (SIGBUS).
    """
    from torch import version

    try:
        path = build_path(version.__version__, version.git_version or "")
        if not (_is_ours(path) and _is_ours(path.parent) and is_whole(path.read_bytes())):
            return None
        found: Boundary = ctypes.PyDLL(str(path)).gpumon_boundary
    except (OSError, RuntimeError, AttributeError) as error:  # not there, no home, no memory, no such function
        pass_on(error)
        return None
    return found


def sealed(built: bytes) -> bytes:
    return built + hashlib.sha256(built).digest()


def is_whole(found: bytes) -> bool:
    return sealed(found[: -hashlib.sha256().digest_size]) == found


def _is_ours(path: Path) -> bool:
    about = path.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
