"""The environment in which a command sees virtual GPUs, and the names of the sessions that share them."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from gpumon.virtual_gpu.build import build
from gpumon.virtual_gpu.sizes import parse

PROFILES = ("a100-80", "a100-40", "h100-80", "h200", "l4", "rtx4090", "t4", "v100-16", "v100-32")
_MIB = 2**20


def new_session() -> str:
    """A session name that nobody else has."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def session_file(session: str) -> Path:
    """The table through which a session's processes and NVML readers see one set of devices."""
    return Path(f"/dev/shm/vgpu.{os.getuid()}.{session}")


def remove_session(session: str) -> None:
    """Remove a session's table; processes that still run keep the one they have."""
    session_file(session).unlink(missing_ok=True)


def environment(
    devices: int = 1,
    profile: str | Sequence[str] = "a100-80",
    memory: int | str | None = None,
    context: int | str | None = None,
    session: str | None = None,
    python: str = sys.executable,
) -> dict[str, str]:
    """The environment to start any command in, so that it sees ``devices`` virtual GPUs.

    ``profile`` is one name for all devices or one for each; ``memory`` replaces the profile's capacity and ``context``
    the bytes each process costs a device beside its allocator (bytes, or text such as ``16GiB``). Processes of one
    ``session`` share devices and see each other in NVML; without a name the session is a new one. ``python`` is the
    interpreter whose torch will run. Builds the virtual GPU if needed. Raises Unavailable or ValueError.
    """
    profiles = [profile] if isinstance(profile, str) else list(profile)
    for name in profiles:
        if name not in PROFILES:
            raise ValueError(f"{name!r} is not a device profile: choose from {', '.join(PROFILES)}")
    if not 0 <= devices <= 16:
        raise ValueError(f"{devices} devices: choose 0 to 16")
    name = session or new_session()
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ValueError(f"{name!r} is not a session name: use letters, digits, '-', '_' and '.'")
    folder = build(python)
    variables = {
        **os.environ,
        "VGPU_SESSION": name,
        "VGPU_DEVICES": str(devices),
        "VGPU_PROFILE": ",".join(profiles),
        "LD_PRELOAD": _prepend(f"{folder}/libcuda.so.1:{folder}/libnvidia-ml.so.1", "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _prepend(str(folder), "LD_LIBRARY_PATH"),
    }
    if memory is not None:
        variables["VGPU_MEM_MIB"] = str(parse(memory) // _MIB)
    if context is not None:
        variables["VGPU_CTX_MIB"] = str(parse(context) // _MIB)
    return variables


def _prepend(value: str, variable: str) -> str:
    present = os.environ.get(variable)
    return f"{value}:{present}" if present else value
