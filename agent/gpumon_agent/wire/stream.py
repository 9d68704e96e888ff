"""The run's stream of events, in order. The agent's recorder numbers each of them."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import (
    BYTES_MAX,
    CODE_CHARS_MAX,
    TEXT_CHARS_MAX,
    Bytes,
    Count,
    Flags,
    Index,
    Message,
    Nanoseconds,
    Ordinal,
    Shape,
    SignedBytes,
    StepNumber,
    Text,
    clean,
    clean_fields,
)
from .evidence import HOLDERS_MAX, Holder
from .trained import Sized

SAMPLED = 1  # the ledger was read too
INFERRED = 2  # the boundary was inferred, not seen (`model.encode()` shows no forward)
BOUND = 4  # peaks are upper bounds: another thread allocated in the window between read and reset, or no reset
SKIPPED = 8  # the scaler skipped this optimizer step
RECOMPUTED = 16  # a forward was recomputed inside this backward (activation checkpointing)
OVERLAPPED = 32  # several threads ran phases on this device: peaks cannot be separated and are None
ABORTED = 64  # the phase ended by an exception
MERGED = 128  # several occurrences merged, after `PHASES_PER_STEP_MAX`; the index is the last one's

RECORDED = 256  # a forward in eval mode recorded a graph: neither no_grad nor inference_mode was on
TRAINS = 512  # the step's first forward without a graph was of a model in training mode, as in many rollouts

PHASES_PER_STEP_MAX = 256
LEDGERS_PER_PAST_STEP = 64  # the last ones: a frame holds them
QUIET_ENDS_MAX = 320  # 64 devices read at once may exceed the agent's 256
SHAPES_MAX = 64  # of a step's inputs; if there are this many, some may be missing

_cleaned = lru_cache(maxsize=256)(clean)  # phase names: equal ones share a string; users may create any number
_set = msgspec.structs.force_setattr  # looked up once

LOAD, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, EVAL = "load", "forward", "backward", "optimizer", "between", "eval"
_PHASES = frozenset((LOAD, FORWARD, BACKWARD, OPTIMIZER, BETWEEN, EVAL))
GRAPH_REPLAY = "graph replay"  # of a CUDA graph: its content is not seen, and its peak is not counted


class Phase(Message, frozen=True, tag="phase"):
    """One device's allocator when a phase closed. Byte fields are torch's, of the same names.

    Windows tile the step: a phase begins where the previous one on the same device ended. `allocated_peak` and
    `reserved_peak` are the maxima within the window.
    """

    step: StepNumber
    phase: Text
    index: Index  # nth occurrence of this phase in this step
    device: Ordinal
    t_ns: Nanoseconds  # when it closed
    duration_ns: Nanoseconds
    allocated: Bytes | None = None
    allocated_peak: Bytes | None = None
    reserved: Bytes | None = None
    reserved_peak: Bytes | None = None
    active: Bytes | None = None
    inactive_split: Bytes | None = None
    requested: Bytes | None = None
    allocations: Count | None = None  # live blocks
    retries: Count | None = None  # num_alloc_retries, since the process began
    ooms: Count | None = None  # num_ooms, likewise
    flags: Flags = 0
    rss: Bytes | None = None  # host memory of the process, if the backend is the CPU

    def __post_init__(self) -> None:
        phase = self.phase
        known = _cleaned(phase)  # runs at every boundary and at every decode
        if known is not phase:
            _set(self, "phase", known)


class QuietPeak(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One device's highest peaks in steps that were not read."""

    device: Ordinal
    allocated_peak: Bytes | None
    reserved_peak: Bytes | None


class QuietEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was allocated on a device as a step ended that was not read otherwise."""

    step: StepNumber
    device: Ordinal
    allocated: Bytes
    allocations: Count  # live blocks


class Step(Message, frozen=True, tag="step"):
    """A closed iteration, at the end of `optimizer.step`."""

    step: StepNumber
    t_ns: Nanoseconds
    duration_ns: Nanoseconds
    input_bytes: Bytes | None = None  # of the tensors passed to the root's forward, in all micro-batches
    input_shapes: Annotated[tuple[Shape, ...], Meta(max_length=SHAPES_MAX)] = ()
    skipped: bool = False
    phases: Index | None = None  # number of its Phase events, on all devices
    evaluated: Annotated[tuple[Index, ...], Meta(max_length=PHASES_PER_STEP_MAX)] = ()
    """Indexes of windows named forward that were an evaluation: no backward used their graph."""
    evaluated_by: Text = ""
    """Of the first of them: module class and the user's calling line: "Net, called at train.py:31"."""
    optimizers: Annotated[tuple[Index, ...], Meta(max_length=64)] = ()
    """Which of the process's optimizers stepped, by numbers that each keeps for its life; none twice."""
    quiet: Count = 0
    """So many steps directly before this one have no events: the agent did not read them, to cost less."""
    quiet_peaks: Annotated[tuple[QuietPeak, ...], Meta(max_length=64)] = ()
    """Of those steps, and of the time until this one began."""
    quiet_ends: Annotated[tuple[QuietEnd, ...], Meta(max_length=QUIET_ENDS_MAX)] = ()
    """Of some of those steps, in order."""


def quiet_peak(step: Step, device: int) -> int:
    """The highest allocated peak of the quiet steps before; -1: unknown, or there were none."""
    return max([each.allocated_peak or -1 for each in step.quiet_peaks if each.device == device], default=-1)


def tallest(phases: Iterable[Phase]) -> Phase | None:
    """The phase with the highest allocated peak (the first of equal ones): a step's peak. None: none was read."""
    highest, allocated = None, -1
    for phase in phases:
        peak = phase.allocated_peak
        if peak is not None and peak > allocated:
            highest, allocated = phase, peak
    return highest


LASTING = ("weights", "buffers", "gradients", "optimizer", "buckets", "workspaces", "other_models")
"""Lines of a `Ledger` that have the same bytes at the same boundary of the next step. Code that needs other lines
derives them from these, with the reason."""


class Ledger(Message, frozen=True, tag="ledger"):
    """Bytes by owner on one device, at the end of a phase (or, `peak`, at the step's peak). Storage bytes, unrounded.

    None: not read this time. The unattributed rest is for the reader to derive: requested minus the lines.
    """

    step: StepNumber
    phase: Text
    index: Index
    device: Ordinal
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
    other_models: Bytes | None = None  # weights and buffers of unwatched models: an EMA, a teacher
    hidden: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()  # owners whose bytes cannot be read, by name
    variables: Bytes | None = None  # in no other line, held by the callers' variables
    held_by: Annotated[tuple[Holder, ...], Meta(max_length=HOLDERS_MAX)] = ()  # those variables, the largest first

    def __post_init__(self) -> None:
        if self.phase not in _PHASES or self.module is not None:  # otherwise ours, and this runs with cold caches
            clean_fields(self, "phase", "module")
        if self.hidden:
            msgspec.structs.force_setattr(self, "hidden", tuple(clean(name) for name in self.hidden))


class PastStep(Message, frozen=True, tag="past"):
    """A complete old step. It has no number, since the events around it are dropped."""

    closed: Step
    phases: Annotated[tuple[Phase, ...], Meta(max_length=PHASES_PER_STEP_MAX)] = ()
    ledgers: Annotated[tuple[Ledger, ...], Meta(max_length=LEDGERS_PER_PAST_STEP)] = ()


class Thinned(Message, frozen=True, tag="thinned"):
    """The past up to a step was thinned (wire.thinning). Receivers keep the same steps as the helper."""

    until: StepNumber  # up to it steps are thinned; newer ones are complete. -1: none is thinned
    newest: StepNumber  # closed at that time
    stride: Annotated[int, Meta(ge=1, le=1 << 62)] = 1


class Oom(Message, frozen=True, tag="oom"):
    """The allocator is about to raise OutOfMemoryError (torch's own observer, before the exception)."""

    step: StepNumber
    phase: Text
    device: Ordinal
    t_ns: Nanoseconds
    requested: Bytes  # of the allocation that failed
    total: Bytes | None = None
    free: Bytes | None = None
    allocated: Bytes | None = None
    reserved: Bytes | None = None
    message: Text = ""
    where: Text | None = None  # file.py:LINE of the user's code
    module: Text | None = None  # path of the module that ran
    same_size: Annotated[tuple[Sized, ...], Meta(max_length=16)] = ()  # parameters of the requested size
    report: Text | None = None  # path of the report on the agent's machine
    source_line: Text | None = None  # the text of the line `where`; None: not read

    def __post_init__(self) -> None:
        clean_fields(self, "phase", "where", "module")
        clean_fields(self, "source_line", limit=CODE_CHARS_MAX)
        clean_fields(self, "message", "report", limit=TEXT_CHARS_MAX)
        for name in ("total", "free"):  # unknown is a value near 2 ** 64 in some drivers (WSL)
            if (getattr(self, name) or 0) > BYTES_MAX:
                _set(self, name, None)


class Progress(Message, frozen=True, tag="progress"):
    """Where the training loop is, in the words and numbers of its library. It has no number: the newest replaces the
    older. Sent by a library's callback, by the user's loop (`gpumon_agent.progress`), or as its variables say, about
    once a second at most.
    """

    step: StepNumber  # gpumon's
    t_ns: Nanoseconds
    library: Text  # lightning, transformers, keras; empty: the user's own loop
    stage: Text = ""  # train, sanity check, validate, test, predict; empty: not known
    epoch: Count | None = None  # as the library counts: Lightning and transformers from 0, Keras from 1
    batch: Count | None = None  # of this stage's pass over its data, the first is 1
    batches: Count | None = None  # of that pass; None: the data has no length

    def __post_init__(self) -> None:
        clean_fields(self, "library", "stage")


class Notice(Message, frozen=True, tag="notice"):
    """A message about the agent itself: a hook it switched off, a lower rate, what it cannot see."""

    t_ns: Nanoseconds
    text: Text
    step: StepNumber | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "text", limit=TEXT_CHARS_MAX)


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The process ends, or (`lost`, written by helper or viewer) was found gone without a Goodbye."""

    reason: Text  # finished | exception | signal | lost | stopped (`stop()` was called; training goes on)
    t_ns: Nanoseconds
    step: StepNumber | None = None
    phase: Text | None = None
    detail: Text = ""  # "ValueError: …", "SIGTERM"

    def __post_init__(self) -> None:
        clean_fields(self, "reason", "phase")
        clean_fields(self, "detail", limit=TEXT_CHARS_MAX)


FITS, TIGHT, OOM_AHEAD = "fits", "tight", "oom-ahead"


class Outlook(Message, frozen=True, tag="outlook"):
    """Sent when a batch enters the root's forward, before anything is allocated for it."""

    step: StepNumber
    device: Ordinal
    t_ns: Nanoseconds
    next_peak: Bytes
    low: Bytes
    high: Bytes
    phase: Text  # of that peak
    verdict: Text  # fits | tight | oom-ahead
    headroom: SignedBytes | None = None  # below 0: bytes missing; None: the capacity is unknown
    input_bytes: Bytes | None = None
    input_shapes: Annotated[tuple[Shape, ...], Meta(max_length=SHAPES_MAX)] = ()

    def __post_init__(self) -> None:
        clean_fields(self, "phase", "verdict")
