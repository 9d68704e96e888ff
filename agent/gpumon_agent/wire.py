"""The messages an agent and its viewers exchange: typed Structs, one codec, no sockets and no torch.

A frame is a topic (`LIVE`; `SNAPSHOT` or `GLANCE` and the asking viewer's nonce) followed by one msgpack `Packet`. A
packet carries events. Events that belong to the stream of the run (`Phase`, `Step`, `Ledger`, ...) are numbered by the
agent's recorder; a gap in the numbers means events were dropped. Events that describe (`Hello`, `Model`,
`Module`, `Layers`, `Heartbeat`, ...) carry no number: the newest one replaces the older.

Bytes are ints. A figure that is not known is None, never 0. Clocks: `*_ns` are the agent's monotonic clock unless
the name says `unix`; `Hello.clock` relates the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

PROTOCOL_MAJOR = 0
PROTOCOL_MINOR = 1

LIVE = b"d"
SNAPSHOT = b"s"  # asks for picture, history, Synced. No topic is a prefix of another: ZeroMQ matches by prefix
GLANCE = b"g"  # asks for Hello, Heartbeat, Synced only: what a listing shows
NONCE_BYTES = 8
FRAME_BYTES_MAX = 64 * 1024
EVENT_BYTES_MAX = FRAME_BYTES_MAX - 256  # topic, nonce and the packet's own header
NAME_CHARS_MAX = 120
LAYERS_PER_PART = 48  # with names as long as they may be, four bytes a character, still within a frame
TEXT_CHARS_MAX = 4096  # messages of exceptions, commands

Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Bytes = Annotated[int, Meta(ge=0)]
Few = Annotated[tuple[Text, ...], Meta(max_length=512)]
Shape = Annotated[tuple[int, ...], Meta(max_length=16)]


class WireError(Exception):
    """A frame that is not ours, or not sound. The text is one sentence for a person."""


class ProtocolMismatch(WireError):
    """The other side speaks another major version of this protocol."""


def clean(text: str, limit: int = NAME_CHARS_MAX) -> str:
    """Printable characters only, at most `limit` of them (the last one an ellipsis where something was cut)."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_argv(argv: Iterable[str], limit: int = 4 * TEXT_CHARS_MAX) -> tuple[str, ...]:
    """The command, cleaned and cut after `limit` characters in all, so that it fits a frame in any alphabet."""
    kept: list[str] = []
    room = limit
    for argument in argv:
        if room < 1 or len(kept) == 511:
            kept.append("…")
            break
        kept.append(clean(argument, min(room, TEXT_CHARS_MAX)))
        room -= len(kept[-1]) + 1
    return tuple(kept)


def _clean_fields(message: Struct, *names: str, limit: int = NAME_CHARS_MAX) -> None:
    for name in names:
        value = getattr(message, name)
        if value is not None:
            msgspec.structs.force_setattr(message, name, clean(value, limit))


class _Message(Struct, frozen=True, array_like=True):
    """Base of every wire message. New fields go last and have defaults; a field's type never changes."""


# ---------------------------------------------------------------------------------------------- who is speaking


class Clock(_Message, frozen=True):
    """One moment on both clocks: unix = unix_ns + (t_ns - monotonic_ns)."""

    monotonic_ns: int
    unix_ns: int


class Device(_Message, frozen=True):
    """A device as torch sees it. `index` is torch's ordinal; NVML is matched by `uuid` only."""

    index: int
    uuid: Text | None  # as NVML spells it, "GPU-…" or "MIG-…"; None on CPU or when torch does not tell
    name: Text
    total_bytes: Bytes | None
    kind: Text = "cuda"  # cuda | hip | cpu | mps | xpu | …

    def __post_init__(self) -> None:
        _clean_fields(self, "uuid", "name", "kind")


class Hello(_Message, frozen=True, tag="hello"):
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
    settings: dict[str, str] = {}  # allocator configuration, governor, peaks mode, tracker: as text, to be shown

    def __post_init__(self) -> None:
        _clean_fields(self, "agent", "nonce", "name", "host", "boot_id", "python", "backend", "torch", "run_id")
        msgspec.structs.force_setattr(self, "argv", clean_argv(self.argv))
        msgspec.structs.force_setattr(
            self, "settings", {clean(k): clean(v, TEXT_CHARS_MAX) for k, v in self.settings.items()}
        )


# ------------------------------------------------------------------------------------------- what is being trained


class Optimizer(_Message, frozen=True):
    """An optimizer as far as memory is concerned."""

    kind: Text  # class name
    parameters: int  # elements it updates
    parameter_bytes: Bytes
    state_bytes: Bytes | None = None  # measured; None before its first step
    foreach: bool | None = None  # as the step will run, torch's own default resolved; None: cannot be told
    fused: bool | None = None
    settings: dict[str, str] = {}  # betas, amsgrad, momentum …: what changes the bytes

    def __post_init__(self) -> None:
        _clean_fields(self, "kind")
        msgspec.structs.force_setattr(self, "settings", {clean(k): clean(v) for k, v in self.settings.items()})


class Parallel(_Message, frozen=True):
    """How the model is spread over ranks."""

    kind: Text  # ddp | fsdp1 | fsdp2 | data_parallel
    world_size: int | None = None
    bucket_bytes: Annotated[tuple[Bytes, ...], Meta(max_length=4096)] = ()  # DDP: per bucket, as they are now
    rebuilt: bool | None = None  # DDP rebuilds its buckets after the first iteration
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None

    def __post_init__(self) -> None:
        _clean_fields(self, "kind")


class Model(_Message, frozen=True, tag="model"):
    """A watched model. A new `revision` of the same `model` index replaces the older, its modules too."""

    model: int
    revision: int
    name: Text
    kind: Text  # class name
    parameters: int  # elements, tied ones once
    trainable: int
    parameter_bytes: Bytes  # storage bytes, tied ones once
    trainable_bytes: Bytes
    buffer_bytes: Bytes
    modules: int  # how many Module messages belong to this revision
    devices: tuple[int, ...] = ()
    optimizers: Annotated[tuple[Optimizer, ...], Meta(max_length=64)] = ()
    parallel: Parallel | None = None
    found: bool = False  # the agent found it by itself; False: handed to watch()

    def __post_init__(self) -> None:
        _clean_fields(self, "name", "kind")


class Module(_Message, frozen=True, tag="module"):
    """One module that owns parameters or buffers directly (not those of its children)."""

    model: int
    revision: int
    path: Text
    kind: Text
    parameters: int
    parameter_bytes: Bytes
    trainable_bytes: Bytes
    buffer_bytes: Bytes
    shared_with: Text | None = None  # path of the module that counts the shared (tied) parameters

    def __post_init__(self) -> None:
        _clean_fields(self, "path", "kind", "shared_with")


# ------------------------------------------------------------------------------------------------ the run's stream

SAMPLED = 1  # the ledger of this moment was read too
INFERRED = 2  # the boundary was not seen but concluded (`model.encode()` shows no forward)
BOUND = 4  # peaks are upper bounds: another thread allocated in the window between read and reset, or no reset
SKIPPED = 8  # the scaler skipped this optimizer step
RECOMPUTED = 16  # a forward was recomputed inside this backward (activation checkpointing)
OVERLAPPED = 32  # several threads ran phases on this device: peaks cannot be told apart and are None
ABORTED = 64  # the phase ended by an exception
MERGED = 128  # several occurrences folded into one, after `PHASES_PER_STEP_MAX`

PHASES_PER_STEP_MAX = 256

LOAD, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, EVAL = "load", "forward", "backward", "optimizer", "between", "eval"
GRAPH_REPLAY = "graph replay"  # of a CUDA graph: what runs in it is not seen, and its peak is not counted


class Phase(_Message, frozen=True, tag="phase"):
    """One device's allocator as a phase closed. Byte fields are torch's, of the same names.

    Windows tile the step: a phase begins where the one before it on the same device ended. `allocated_peak` and
    `reserved_peak` are the maxima within the window.
    """

    step: int
    phase: Text
    index: int  # nth occurrence of this phase in this step
    device: int
    t_ns: int  # when it closed
    duration_ns: int
    allocated: Bytes | None = None
    allocated_peak: Bytes | None = None
    reserved: Bytes | None = None
    reserved_peak: Bytes | None = None
    active: Bytes | None = None
    inactive_split: Bytes | None = None
    requested: Bytes | None = None
    allocations: int | None = None  # live blocks
    retries: int | None = None  # num_alloc_retries, since the process began
    ooms: int | None = None  # num_ooms, likewise
    flags: int = 0
    rss: Bytes | None = None  # host memory of the process, where the backend is the CPU

    def __post_init__(self) -> None:
        phase = self.phase
        if not (phase.isascii() and phase.isprintable() and len(phase) <= NAME_CHARS_MAX):  # made at every boundary
            _clean_fields(self, "phase")


class Step(_Message, frozen=True, tag="step"):
    """An iteration closed: at the end of `optimizer.step`."""

    step: int
    t_ns: int
    duration_ns: int
    input_bytes: Bytes | None = None  # of the tensors handed to the root's forward, all micro-batches together
    input_shapes: Annotated[tuple[Shape, ...], Meta(max_length=64)] = ()
    skipped: bool = False
    phases: int | None = None  # how many Phase events belong to it, over all devices


class Ledger(_Message, frozen=True, tag="ledger"):
    """Bytes by owner on one device, at the end of a phase (or, `peak`, at the step's peak). Storage bytes, unrounded.

    None: not looked at this time. What no line names is for the reader to derive: requested minus the lines.
    """

    step: int
    phase: Text
    index: int
    device: int
    allocated: Bytes | None
    requested: Bytes | None
    reserved: Bytes | None
    weights: Bytes | None = None
    buffers: Bytes | None = None
    gradients: Bytes | None = None
    optimizer: Bytes | None = None
    buckets: Bytes | None = None
    inputs: Bytes | None = None
    activations: Bytes | None = None
    temporaries: Bytes | None = None
    workspaces: Bytes | None = None
    checkpoints: Bytes | None = None
    peak: bool = False
    module: Text | None = None  # at a peak: the module that was running
    other_models: Bytes | None = None  # weights and buffers of models that nobody watches: an EMA, a teacher
    hidden: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()  # who keeps bytes where nobody can look: by name

    def __post_init__(self) -> None:
        _clean_fields(self, "phase", "module")
        if self.hidden:
            msgspec.structs.force_setattr(self, "hidden", tuple(clean(name) for name in self.hidden))


class Layer(_Message, frozen=True):
    """What one module keeps on one device beside its parameters and buffers (those are in its `Module`).

    Its own only, not its children's; storage bytes, each storage counted by one module.
    """

    path: Text  # "" is the root itself
    kind: Text
    gradients: Bytes | None = None
    optimizer: Bytes | None = None
    activations: Bytes | None = None  # None where the graph was not walked

    def __post_init__(self) -> None:
        _clean_fields(self, "path", "kind")


class Layers(_Message, frozen=True, tag="layers"):
    """A model module by module, in a step that was sampled: gradients and state at its end, activations as its forward
    ended. Modules that keep nothing are left out. Newer parts with the same model and device replace the older.
    """

    model: int
    device: int
    step: int
    part: int  # counted from 0
    parts: int
    layers: Annotated[tuple[Layer, ...], Meta(max_length=LAYERS_PER_PART)]
    elsewhere: Bytes | None = None  # activations of no module of this model: the loss's, say; with the last part


class Sized(_Message, frozen=True):
    """A parameter by its size. `width`: bytes an element."""

    path: Text
    shape: Shape
    width: int
    trainable: bool = True

    def __post_init__(self) -> None:
        _clean_fields(self, "path")


class Oom(_Message, frozen=True, tag="oom"):
    """The allocator is about to raise OutOfMemoryError (torch's own observer, before the exception)."""

    step: int
    phase: Text
    device: int
    t_ns: int
    requested: Bytes  # of the allocation that failed
    total: Bytes | None = None
    free: Bytes | None = None
    allocated: Bytes | None = None
    reserved: Bytes | None = None
    message: Text = ""
    where: Text | None = None  # file.py:LINE of the user's code
    module: Text | None = None  # path of the module that ran
    same_size: Annotated[tuple[Sized, ...], Meta(max_length=16)] = ()  # parameters for which as much is asked for
    report: Text | None = None  # the file on the agent's machine that tells more

    def __post_init__(self) -> None:
        _clean_fields(self, "phase", "where", "module")
        _clean_fields(self, "message", "report", limit=TEXT_CHARS_MAX)


class Notice(_Message, frozen=True, tag="notice"):
    """The agent says something of itself: a hook it switched off, a rarer sampling, what it cannot see."""

    t_ns: int
    text: Text
    step: int | None = None

    def __post_init__(self) -> None:
        _clean_fields(self, "text", limit=TEXT_CHARS_MAX)


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """The process ends, or (`lost`, written by the viewer's side) was found gone without a word."""

    reason: Text  # finished | exception | signal | lost | stopped (the agent was asked to stop; training goes on)
    t_ns: int
    step: int | None = None
    phase: Text | None = None
    detail: Text = ""  # "ValueError: …", "SIGTERM"

    def __post_init__(self) -> None:
        _clean_fields(self, "reason", "phase")
        _clean_fields(self, "detail", limit=TEXT_CHARS_MAX)


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
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
        _clean_fields(self, "phase")


class Synced(_Message, frozen=True, tag="synced"):
    """End of a snapshot: static picture and history are complete, what follows on LIVE is new."""

    seq: int  # of the newest event in the snapshot


# --------------------------------------------------------------------------- the viewer's own readings of the host


class DeviceProcess(_Message, frozen=True):
    pid: int
    bytes: Bytes | None  # None: the driver does not tell (containers, WDDM)
    name: Text | None = None

    def __post_init__(self) -> None:
        _clean_fields(self, "name")


class DeviceReading(_Message, frozen=True):
    """One physical device as its driver sees it. None with a sentence in `why`."""

    uuid: Text
    name: Text | None = None
    total: Bytes | None = None
    free: Bytes | None = None
    used: Bytes | None = None
    processes: Annotated[tuple[DeviceProcess, ...], Meta(max_length=4096)] | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    why: dict[str, str] = {}  # field name → why it is None
    began_ns: int | None = None  # between which moments of the machine's monotonic clock memory and processes were read
    ended_ns: int | None = None

    def __post_init__(self) -> None:
        _clean_fields(self, "uuid", "name")
        msgspec.structs.force_setattr(self, "why", {clean(k): clean(v) for k, v in self.why.items()})


class ChildProcess(_Message, frozen=True):
    pid: int
    name: Text
    rss: Bytes | None = None

    def __post_init__(self) -> None:
        _clean_fields(self, "name")


class ProcessReading(_Message, frozen=True):
    """A watched process as the operating system sees it."""

    pid: int
    rss: Bytes | None = None
    cpu_percent: float | None = None
    threads: int | None = None
    children: Annotated[tuple[ChildProcess, ...], Meta(max_length=4096)] = ()


class Host(_Message, frozen=True, tag="host"):
    """What the viewer reads beside the agent: NVML and psutil. A message, so that recordings hold it too."""

    host: Text
    t_ns: int  # the viewer's monotonic clock
    driver: Text | None = None
    devices: Annotated[tuple[DeviceReading, ...], Meta(max_length=64)] = ()
    processes: Annotated[tuple[ProcessReading, ...], Meta(max_length=1024)] = ()
    memory_total: Bytes | None = None
    memory_available: Bytes | None = None
    why: Text | None = None  # why there are no devices: "NVML is not installed", "the driver does not answer"

    def __post_init__(self) -> None:
        _clean_fields(self, "host", "driver")
        _clean_fields(self, "why", limit=TEXT_CHARS_MAX)


NumberedEvent = Phase | Step | Ledger | Oom | Notice | Goodbye
Event = Hello | Model | Module | Phase | Step | Ledger | Oom | Notice | Goodbye | Heartbeat | Synced | Host | Layers


def layers(
    model: int, device: int, step: int, each: Iterable[Layer], elsewhere: int | None = None
) -> tuple[Layers, ...]:
    """The messages that carry the layers of one model: at least one, each small enough for a frame."""
    every = tuple(each)
    starts = range(0, max(1, len(every)), LAYERS_PER_PART)
    return tuple(
        Layers(
            model, device, step, part, len(starts), every[at : at + LAYERS_PER_PART],
            elsewhere if part == len(starts) - 1 else None,
        )
        for part, at in enumerate(starts)
    )  # fmt: skip


class Packet(_Message, frozen=True):
    """What one frame carries. Its numbered events are consecutive from `seq`; -1: none of them is numbered."""

    seq: int
    replayed: bool
    events: Annotated[tuple[Event, ...], Meta(max_length=4096)]


class Received(_Message, frozen=True):
    """One event as it reached a viewer: what `link` yields, what a recording stores, what a session applies."""

    source: Text  # Hello.nonce of the agent; "host:NAME" for the viewer's own readings
    unix_ns: int  # the receiver's clock
    event: Event
    seq: int = -1
    replayed: bool = False

    def __post_init__(self) -> None:
        _clean_fields(self, "source")


# ---------------------------------------------------------------------------------------------------- the one codec


class _RawPacket(_Message, frozen=True):
    seq: int
    replayed: bool
    events: list[msgspec.Raw]


_encoder = msgspec.msgpack.Encoder()
_packet_decoder = msgspec.msgpack.Decoder(Packet)
_received_decoder = msgspec.msgpack.Decoder(Received)


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def pack(events: Iterable[tuple[int, bytes]], *, replayed: bool) -> Iterator[bytes]:
    """Packets, each small enough for a frame, from (seq, encoded event) pairs in order; seq -1 marks unnumbered."""
    batch: list[msgspec.Raw] = []
    first = expected = -1
    size = 0
    for seq, encoded in events:
        if batch and (size + len(encoded) > EVENT_BYTES_MAX or seq != expected or len(batch) == 4096):
            yield _encoder.encode(_RawPacket(first, replayed, batch))
            batch, size = [], 0
        if not batch:
            first = seq
        batch.append(msgspec.Raw(encoded))
        size += len(encoded)
        expected = seq + 1 if seq >= 0 else -1
    if batch:
        yield _encoder.encode(_RawPacket(first, replayed, batch))


def frame(packet: bytes, topic: bytes = LIVE) -> bytes:
    """`topic` is LIVE, or an asker's whole topic: SNAPSHOT or GLANCE and its nonce."""
    return topic + packet


def is_request(topic: bytes) -> bool:
    """Whether a subscription to `topic` asks for an answer of its own."""
    return topic[:1] in (SNAPSHOT, GLANCE) and len(topic) == 1 + NONCE_BYTES


def decode_frame(raw: bytes) -> Packet:
    """The packet of a frame. Raises WireError for anything else, ProtocolMismatch for another major version."""
    head = 1 if raw[:1] == LIVE else 1 + NONCE_BYTES if raw[:1] in (SNAPSHOT, GLANCE) else 0
    if not head:
        raise WireError("this endpoint does not speak gpumon's protocol")
    if len(raw) > FRAME_BYTES_MAX:
        raise WireError(f"a message of {len(raw)} bytes is larger than gpumon's protocol allows")
    try:
        return _packet_decoder.decode(memoryview(raw)[head:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        spoken = _spoken_protocol(raw[head:])
        if spoken is not None and spoken[0] != PROTOCOL_MAJOR:
            raise ProtocolMismatch(mismatch_sentence(spoken)) from error
        raise WireError(f"a message could not be read: {error}") from error


def check_protocol(hello: Hello) -> None:
    """Raises ProtocolMismatch unless this side can read what `hello`'s side writes."""
    if hello.protocol[0] != PROTOCOL_MAJOR:
        raise ProtocolMismatch(mismatch_sentence(hello.protocol))


def mismatch_sentence(spoken: tuple[int, int]) -> str:
    newer = spoken[0] > PROTOCOL_MAJOR
    return f"the agent speaks protocol {spoken[0]}.{spoken[1]}, this gpumon {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: " + (
        "upgrade gpumon here" if newer else "upgrade gpumon-agent in the training environment"
    )


def _spoken_protocol(packet: bytes) -> tuple[int, int] | None:
    """The version a Hello states, read without trusting the rest of its layout."""
    try:
        untyped: Any = msgspec.msgpack.decode(packet)
        for event in untyped[2]:
            if event[0] == "hello":
                major, minor = event[1]
                return int(major), int(minor)
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError, OverflowError):
        return None
    return None


def encode_received(received: Received) -> bytes:
    return _encoder.encode(received)


def decode_received(raw: bytes) -> Received:
    """Raises WireError when `raw` is not one."""
    try:
        return _received_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a recorded message could not be read: {error}") from error
