"""Identity and sign of life of an agent, and the experiment trackers that its process uses."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import (
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
    Bytes,
    Count,
    Few,
    Index,
    LocalRankNumber,
    LocalRanks,
    Message,
    Named,
    Nanoseconds,
    Ordinal,
    Pid,
    RankNumber,
    Ranks,
    Seq,
    StepNumber,
    Text,
    clean,
    clean_argv,
    clean_fields,
)
from .masking import masked

TRACKERS_MAX = 16  # of a process; later ones are not told

Version = tuple[Annotated[int, Meta(ge=0, le=65_535)], Annotated[int, Meta(ge=0, le=65_535)]]


class Clock(Message, frozen=True):
    """One moment on both clocks: unix = unix_ns + (t_ns - monotonic_ns)."""

    monotonic_ns: Nanoseconds
    unix_ns: Nanoseconds


class Device(Message, frozen=True):
    """A device as torch sees it. `index` is torch's ordinal; the driver is matched by `uuid` only."""

    index: Ordinal
    uuid: Text | None  # as torch writes it, with "GPU-" or "MIG-"; None on CPU or if torch does not provide it
    name: Text
    total_bytes: Bytes | None
    kind: Text = "cuda"  # cuda | hip | cpu | mps | xpu | …

    def __post_init__(self) -> None:
        clean_fields(self, "uuid", "name", "kind")

    @property
    def label(self) -> str:
        """As torch writes it: "cuda:0", "cpu"."""
        return device_label(self.kind, self.index)


def device_label(kind: str, index: int) -> str:
    return kind if kind == "cpu" else f"{kind}:{index}"


class Hello(Message, frozen=True, tag="hello"):
    """The agent's process. The first event a viewer gets."""

    protocol: Version
    agent: Text  # version of gpumon-agent
    nonce: Text  # hex, unique to this agent: the identity of the stream
    name: Text  # the job's name: what the user gave, else the script's file name
    host: Text
    pid: Pid
    start_time: Count  # clock ticks since boot, field 22 of /proc/PID/stat; with boot_id it detects pid reuse
    boot_id: Text
    argv: Few
    python: Text
    clock: Clock
    backend: Text = ""  # cuda | hip | cpu | mps | xpu | …; empty until a model's device is known
    torch: Text | None = None
    devices: Annotated[tuple[Device, ...], Meta(max_length=64)] = ()
    rank: RankNumber | None = None
    local_rank: LocalRankNumber | None = None
    world_size: Ranks | None = None
    run_id: Text | None = None  # torchrun's or SLURM's job id: ranks that share it are one session
    settings: Named = msgspec.field(
        default_factory=dict
    )  # allocator configuration, governor, peaks mode, tracker: as text, to be shown
    node: Text | None = None  # torchrun's GROUP_RANK or SLURM_NODEID, if set
    local_world_size: LocalRanks | None = None
    restarts: Index | None = None  # TORCHELASTIC_RESTART_COUNT

    def __post_init__(self) -> None:
        clean_fields(self, "agent", "nonce", "name", "host", "boot_id", "python", "backend", "torch", "run_id", "node")
        msgspec.structs.force_setattr(self, "argv", clean_argv(self.argv))
        msgspec.structs.force_setattr(
            self, "settings", {clean(k): clean(v, TEXT_CHARS_MAX) for k, v in self.settings.items()}
        )


class PartOff(Message, frozen=True):
    """A part of the agent that failed too often and is switched off for the rest of the run."""

    part: Text
    error: Text  # class and message of its last failure
    where: Text = ""  # file.py:LINE in the agent
    t_ns: Nanoseconds = 0

    def __post_init__(self) -> None:
        clean_fields(self, "part", "where")
        clean_fields(self, "error", limit=2 * NAME_CHARS_MAX)


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Once a second: the process is alive, and what training does now."""

    t_ns: Nanoseconds
    step: StepNumber
    phase: Text
    phase_age_ns: Nanoseconds
    dropped: Count = 0  # events lost in the agent's queue since it began
    sample_every: Count = 1  # about one step in so many is read
    boundary_ns: Nanoseconds | None = None  # of older agents: their median cost of a boundary
    rss: Bytes | None = None
    devices: Annotated[tuple[Ordinal, ...], Meta(max_length=64)] = ()  # of the watched models
    off: Annotated[tuple[PartOff, ...], Meta(max_length=64)] = ()
    pinned: Bytes | None = None  # host memory pinned by torch's allocator; None: this torch does not report it
    number: Count | None = None  # seconds since the agent began; None: the history keeps no heartbeats
    cost: Count | None = None  # of the agent, in millionths of the mean step; None: not known
    cost_error: Count | None = None  # within so much of it, 19 times in 20; None: `cost` at most

    def __post_init__(self) -> None:
        clean_fields(self, "phase")


class Synced(Message, frozen=True, tag="synced"):
    """End of a snapshot: picture and history are complete; newer events come on LIVE."""

    seq: Seq  # of the newest event in the snapshot


class Tracker(Message, frozen=True):
    """One run of an experiment tracker that the training logs to. Texts are empty if the library has no such thing."""

    kind: Text  # wandb | mlflow | tensorboard | trackio | otlp
    run: Text = ""  # the library's id of the run
    name: Text = ""
    where: Text = ""  # tracking URI, folder or endpoint, without user and password
    project: Text = ""
    group: Text = ""
    entity: Text = ""
    mode: Text = ""  # W&B's: online | offline

    def __post_init__(self) -> None:
        clean_fields(self, "kind", "run", "name", "project", "group", "entity", "mode")
        msgspec.structs.force_setattr(self, "where", clean(next(masked((self.where,))), TEXT_CHARS_MAX))


class Trackers(Message, frozen=True, tag="trackers"):
    """All that the process has used so far. A newer one replaces the older."""

    folder: Text  # the process's current one, to which relative paths refer
    used: Annotated[tuple[Tracker, ...], Meta(max_length=TRACKERS_MAX)] = ()

    def __post_init__(self) -> None:
        clean_fields(self, "folder", limit=TEXT_CHARS_MAX)
