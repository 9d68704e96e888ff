"""Device profiles, and their description for the C side."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gpumon.virtual_gpu.sizes import parse

_MIB = 2**20

_MIG_EIGHTHS = {"1g": 1, "2g": 2, "3g": 4, "4g": 4, "7g": 8}
"""Memory of an instance with so many compute slices, in eighths of the board (NVIDIA's MIG user guide)."""

_MIG_FIT = {"1g": 7, "2g": 3, "3g": 2, "4g": 1, "7g": 1}


@dataclass(frozen=True)
class Profile:
    """One kind of device. Capacities as PyTorch prints them; drivers differ by up to 2 %."""

    name: str
    memory_gb: int
    """The size in the product's name, used in MIG profile names (3g.20gb of a 40 GB board)."""
    capacity_bytes: int
    compute_capability: tuple[int, int]
    processors: int
    l2_mib: int
    shared_kib: int
    """Shared memory per multiprocessor."""
    shared_block_kib: int
    """Maximum shared memory per block."""
    context_bytes: int = 450 * _MIB
    """What a process costs beside its allocator. An assumption, not measured: it depends on driver, CUDA version and
    lazy loading as much as on the device. Override it with ``context=``."""


def _profile(
    name: str, memory_gb: int, mib: int, capability: tuple[int, int], processors: int, l2: int, shared: int, block: int
) -> Profile:
    return Profile(f"Virtual {name}", memory_gb, mib * _MIB, capability, processors, l2, shared, block)


PROFILES: dict[str, Profile] = {
    "a100-80": _profile("A100-80GB", 80, 81050, (8, 0), 108, 40, 164, 163),
    "a100-40": _profile("A100-40GB", 40, 40339, (8, 0), 108, 40, 164, 163),
    "h100-80": _profile("H100-80GB", 80, 81008, (9, 0), 132, 50, 228, 227),
    "h200": _profile("H200", 141, 143155, (9, 0), 132, 60, 228, 227),
    "l4": _profile("L4", 24, 22564, (8, 9), 58, 48, 100, 99),
    "rtx4090": _profile("RTX 4090", 24, 24207, (8, 9), 128, 72, 100, 99),
    "t4": _profile("T4", 16, 14912, (7, 5), 40, 4, 64, 64),
    "v100-16": _profile("V100-16GB", 16, 16151, (7, 0), 80, 6, 96, 96),
    "v100-32": _profile("V100-32GB", 32, 32493, (7, 0), 80, 6, 96, 96),
    # Each of these beside where its capacity was read; "printed" is the total in PyTorch's out-of-memory errors, in
    # GiB with two decimals. Processors and caches: the same place, else NVIDIA's data sheets and tuning guides.
    "a10": _profile("A10", 24, 22516, (8, 6), 72, 6, 100, 99),  # deviceQuery, CUDA 12.2: 23609475072 bytes
    "a10g": _profile("A10G", 24, 22587, (8, 6), 80, 6, 100, 99),  # PyTorch 2.15's device properties: 22587MB
    "a6000": _profile("RTX A6000", 48, 48670, (8, 6), 84, 6, 100, 99),  # ultralytics/ultralytics#19084: 48670MiB
    "b200": _profile("B200", 180, 182630, (10, 0), 148, 126, 228, 227),  # pytorch/ao#4002: 178.35 GB, 126.5 MB of L2
    "gh200": _profile("GH200-480GB", 96, 97280, (9, 0), 132, 60, 228, 227),  # deviceQuery, 12.2: 102005473280 bytes
    "h100-nvl": _profile("H100-NVL", 94, 95334, (9, 0), 132, 60, 228, 227),  # printed: 93.10 GiB
    "l40s": _profile("L40S", 48, 45486, (8, 9), 142, 96, 100, 99),  # printed: 44.42 GiB, stepfun-ai/Step-Video-T2V#8
    "rtx3090": _profile("RTX 3090", 24, 24268, (8, 6), 82, 6, 100, 99),  # printed: 23.70 GiB, GaoLii/DSP#10
    "rtx5090": _profile("RTX 5090", 32, 32120, (12, 0), 170, 96, 100, 99),  # NVIDIA/nccl#1637: 33680457728 bytes
}

DEVICES = ", ".join(PROFILES)
"""The names in one line, for help and errors."""


def find(name: str) -> Profile:
    """The profile of that name; for a size ("16 GiB"), an A100 with that capacity.

    Raises ValueError with the known names.
    """
    if name in PROFILES:
        return PROFILES[name]
    try:
        capacity = parse(name)
    except ValueError:
        raise ValueError(f"{name!r} is not a device profile: choose from {DEVICES}, or a size, such as 16GiB") from None
    if capacity < _MIB:
        raise ValueError(f"{name!r} is a device of {capacity} bytes: write its unit, such as 16GiB")
    return replace(PROFILES["a100-80"], name=f"Virtual {name.strip()}", capacity_bytes=capacity)


def mig_names(profile: Profile) -> dict[str, str]:
    """MIG profiles of a board by full name ("3g.20gb") with their compute slices ("3g"); none before Ampere.

    NVIDIA's names round half up: an eighth of 141 GB is 18gb, a half 71gb.
    """
    if profile.compute_capability not in ((8, 0), (9, 0), (10, 0)):
        return {}
    return {f"{slices}.{(profile.memory_gb * eighths + 4) // 8}gb": slices for slices, eighths in _MIG_EIGHTHS.items()}


def instance(profile: Profile, mig: str) -> Profile:
    """One MIG instance of a board. Raises ValueError if the board has no such profile."""
    names = mig_names(profile)
    if mig not in names:
        known = f"choose from {', '.join(names)}" if names else "it cannot be split"
        raise ValueError(f"{profile.name} has no MIG profile {mig!r}: {known}")
    slices = names[mig]
    return replace(
        profile,
        name=f"{profile.name} MIG {mig}",
        capacity_bytes=profile.capacity_bytes * _MIG_EIGHTHS[slices] // 8 // _MIB * _MIB,
        processors=profile.processors // 8 * int(slices[0]),
    )


def specification(
    profiles: list[Profile], mig: str | None, memory_bytes: list[int] | None, context_bytes: int | None
) -> str:
    """VGPU_DEVICES for these boards, or for as many MIG instances of the first board. Raises ValueError."""
    if mig is not None:
        slices = re.match(r"\w+", mig)
        most = _MIG_FIT.get(slices[0] if slices else "", len(profiles))
        if len(profiles) > most:
            raise ValueError(f"{len(profiles)} instances of {mig} do not fit one board: {most} at most")
    fields = []
    for i, board in enumerate(profiles):
        device = board if mig is None else instance(board, mig)
        capacity = memory_bytes[min(i, len(memory_bytes) - 1)] if memory_bytes else device.capacity_bytes
        context = device.context_bytes if context_bytes is None else context_bytes
        place = (i, 0, capacity) if mig is None else (0, i + 1, board.capacity_bytes)
        hardware = (*device.compute_capability, device.processors, device.l2_mib)
        shared = (device.shared_kib, device.shared_block_kib)
        fields.append("|".join(map(str, (device.name, capacity, context, *hardware, *shared, *place))))
    return ";".join(fields)
