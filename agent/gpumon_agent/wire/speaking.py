"""Who is speaking, and that it lives."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import TEXT_CHARS_MAX, Bytes, Few, Message, Text, clean, clean_argv, clean_fields


class Clock(Message, frozen=True):
    """One moment on both clocks: unix = unix_ns + (t_ns - monotonic_ns)."""

    monotonic_ns: int
    unix_ns: int


class Device(Message, frozen=True):
    """A device as torch sees it. `index` is torch's ordinal; NVML is matched by `uuid` only."""

    index: int
    uuid: Text | None  # as NVML spells it, "GPU-…" or "MIG-…"; None on CPU or when torch does not tell
    name: Text
    total_bytes: Bytes | None
    kind: Text = "cuda"  # cuda | hip | cpu | mps | xpu | …

    def __post_init__(self) -> None:
        clean_fields(self, "uuid", "name", "kind")


class Hello(Message, frozen=True, tag="hello"):
    """The process that speaks. First thing a viewer hears."""

    protocol: tuple[int, int]
    agent: Text  # version of gpumon-agent
    nonce: Text  # hex, unique to this agent's life: the identity of the stream
    name: Text  # the job's name: what the user gave, else the script's file name
    host: Text
    pid: int
    start_time: int  # clock ticks since boot, field 22 of /proc/PID/stat; with boot_id it outlives pid reuse
    boot_id: Text
    argv: Few
    python: Text
    clock: Clock
    backend: Text = ""  # cuda | hip | cpu | mps | xpu | …; empty until a model's device is known
    torch: Text | None = None
    devices: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    run_id: Text | None = None  # torchrun's or SLURM's id of the job: ranks with the same one are one session
    settings: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # allocator configuration, governor, peaks mode, tracker: as text, to be shown
    node: Text | None = None  # torchrun's GROUP_RANK or SLURM_NODEID, where the launcher tells
    local_world_size: int | None = None
    restarts: int | None = None  # TORCHELASTIC_RESTART_COUNT

    def __post_init__(self) -> None:
        clean_fields(self, "agent", "nonce", "name", "host", "boot_id", "python", "backend", "torch", "run_id", "node")
        msgspec.structs.force_setattr(self, "argv", clean_argv(self.argv))
        msgspec.structs.force_setattr(
            self, "settings", {clean(k): clean(v, TEXT_CHARS_MAX) for k, v in self.settings.items()}
        )


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Once a second: alive, and where training stands now."""

    t_ns: int
    step: int
    phase: Text
    phase_age_ns: int
    dropped: int = 0  # events lost in the agent's queue since it began
    sample_every: int = 1  # the governor's present rate
    boundary_ns: int | None = None  # the agent's own median cost of a boundary
    rss: Bytes | None = None
    devices: Annotated[tuple[int, ...], Meta(max_length=64)] = ()  # torch's ordinals that the watched models live on

    def __post_init__(self) -> None:
        clean_fields(self, "phase")


class Synced(Message, frozen=True, tag="synced"):
    """End of a snapshot: static picture and history are complete, what follows on LIVE is new."""

    seq: int  # of the newest event in the snapshot
