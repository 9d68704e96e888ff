"""Evidence beyond the figures: what holds tensors, checkpoints still alive, the allocator's blocks."""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import (
    CODE_CHARS_MAX,
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
    Address,
    Bytes,
    Change,
    Count,
    Index,
    Message,
    Nanoseconds,
    Ordinal,
    Part,
    Shape,
    StepNumber,
    Text,
    clean_fields,
)

CENSUSES_KEPT = 4  # newest ones: an incomplete one explains less than the one before it
GROUPS_MAX = 48  # of a census; the rest is one number
HOLDERS_MAX = 8  # named per group
BLOCKS_PER_PART = 2_048  # 12 bytes each at most: still within a frame
SEGMENTS_PER_PART = 256


CYCLE = "cycle"
_CYCLE_OF, _IN = "reference cycle of ", " in "


class Holder(Message, frozen=True):
    """What keeps tensors alive, under a name the user knows. `text` is how it is written in sentences."""

    name: Text  # the path from the variable: "losses[*]", "Trainer.history['loss'][*]", "main.<locals>.hook(kept)[*]"
    kind: Text  # global | local | attribute | class | closure | default | cache | generator | traceback | hook | module
    # or bounded: a deque with maxlen; trimmed: a container that its own code shortens to a length;
    # cycle: only a reference cycle; the name once led to an object of it
    where: Text | None = None  # file.py:LINE of the function whose frame, closure or default it is
    count: Count = 0  # tensors of the group reached through it
    function: Text | None = None  # whose variable it is: "main"; None for a global, an attribute of a class, …
    source_line: Text | None = None  # the text of the line `where`; None: not read

    def __post_init__(self) -> None:
        name, inside, function = self.name.rpartition(_IN)
        if inside and self.function is None and function.endswith("()"):  # from agents without this field
            msgspec.structs.force_setattr(self, "name", name)
            msgspec.structs.force_setattr(self, "function", function.removesuffix("()"))
        if self.kind == CYCLE and self.name.startswith(_CYCLE_OF):
            msgspec.structs.force_setattr(self, "name", self.name.removeprefix(_CYCLE_OF))
        clean_fields(self, "name", "kind", "where", "function")
        clean_fields(self, "source_line", limit=CODE_CHARS_MAX)

    @property
    def text(self) -> str:
        """ "losses[*] in main()"."""
        cycle = _CYCLE_OF if self.kind == CYCLE else ""
        return f"{cycle}{self.name}{f'{_IN}{self.function}()' if self.function else ''}"

    @property
    def variable(self) -> str:
        """Up to the first index: "losses" of "losses[*][0]"."""
        return self.name.partition("[")[0]

    @property
    def container(self) -> str:
        """What grows: "log.handlers[*].records" of "log.handlers[*].records[*].args[0]"."""
        within, grows, _ = self.name.rpartition("[*]")
        path = within if grows else self.name
        while path.endswith("[*]"):
            path = path.removesuffix("[*]")
        return path

    @property
    def attribute(self) -> str:
        """ "k_cache" of "model.3.k_cache"; empty if there is none."""
        return self.name.rpartition(".")[2]


class Group(Message, frozen=True):
    """Live tensors without an owner in the ledger, of the same shape, dtype, device and `has_graph`."""

    shape: Shape
    dtype: Text  # torch's name without "torch."
    device: Ordinal
    count: Count
    bytes: Bytes  # of their storages, each counted once
    has_graph: bool = False  # they have a grad_fn, which keeps what autograd saved for them
    graph_bytes: Bytes | None = None  # saved by those graphs, besides the tensors; None: not walked
    grown: Change | None = None  # tensors more than at the previous census; None at the first
    holders: Annotated[tuple[Holder, ...], Meta(max_length=HOLDERS_MAX)] = ()  # empty: none was found, never a guess
    where: Text | None = None  # file.py:LINE where the newest of them were made
    phase: Text | None = None  # and in which phase
    cyclic: Count = 0  # of them held only by a reference cycle that the garbage collector has not visited
    source_line: Text | None = None  # the text of the line `where`; None: not read

    def __post_init__(self) -> None:
        clean_fields(self, "dtype", "where", "phase")
        clean_fields(self, "source_line", limit=CODE_CHARS_MAX)


class Unclaimed(Message, frozen=True):
    """Live blocks made in the few steps in which stacks were recorded, and reached by no name."""

    where: Text  # file.py:LINE that made them
    count: Count
    bytes: Bytes
    device: Ordinal
    source_line: Text | None = None  # the text of that line; None: not read

    def __post_init__(self) -> None:
        clean_fields(self, "where")
        clean_fields(self, "source_line", limit=CODE_CHARS_MAX)


class Census(Message, frozen=True, tag="census"):
    """The process's live tensors without owner, found by one walk over its objects. Newest counts."""

    step: StepNumber
    t_ns: Nanoseconds  # when it was complete
    number: Index  # counted from 0
    reason: Text  # growth | asked
    groups: Annotated[tuple[Group, ...], Meta(max_length=GROUPS_MAX)] = ()  # most bytes first
    tensors: Count = 0  # in all groups, listed or not
    bytes: Bytes = 0  # likewise
    objects: Count = 0  # looked at
    slices: Count = 0
    spent_ns: Nanoseconds = 0  # of the training thread's time, in all slices
    began_step: StepNumber = 0
    cut: bool = False  # ended before every object was seen, see `why`
    why: Text | None = None
    unclaimed: Annotated[tuple[Unclaimed, ...], Meta(max_length=HOLDERS_MAX)] = ()  # most bytes first
    waiting: Count | None = None  # objects that Python's collector has to visit, if it is off or hardly ever runs

    def __post_init__(self) -> None:
        clean_fields(self, "reason", "why")


class Checkpoint(Message, frozen=True, tag="checkpoint"):
    """What one load left on one device. The newest with the same `number` and `device` counts."""

    number: Index  # of the load, counted from 0
    device: Ordinal
    step: StepNumber  # when it was loaded
    t_ns: Nanoseconds
    source: Text  # torch.load | safetensors.torch.load_file | …
    file: Text | None = None  # its name, without the folder
    where: Text | None = None  # file.py:LINE of the user's call
    loaded: Bytes = 0  # bytes it brought to this device
    tensors: Count = 0  # of them alive now
    alive: Bytes = 0  # their bytes, without those that an owner in the ledger has taken over
    looked_step: StepNumber = 0  # when that was measured
    used_step: StepNumber | None = None  # when load_state_dict was called next; None: not since
    mapped: bool | None = None  # map_location was given; None if the source has none
    foreign: bool = False  # no watched model lives on this device
    holders: Annotated[tuple[Holder, ...], Meta(max_length=HOLDERS_MAX)] = ()
    source_line: Text | None = None  # the text of the line `where`; None: not read

    def __post_init__(self) -> None:
        clean_fields(self, "source", "file", "where")
        clean_fields(self, "source_line", limit=CODE_CHARS_MAX)


BlockState = Annotated[int, Meta(ge=0, le=255)]
INACTIVE, ALLOCATED, PENDING = 0, 1, 2  # a block's state; pending: freed, but a stream may still be using it

BLOCK_OWNERS = (
    "", "weights", "buffers", "gradients", "optimizer", "buckets", "inputs", "activations", "workspaces", "checkpoints",
    "other_models", "variables",
)  # fmt: skip
"""A block's owner is a number: the index of a line of the ledger; 0: none was found. New ones go last."""
OwnerNumbers = Annotated[bytes, Meta(max_length=BLOCKS_PER_PART)]
HOLDER_OWNERS = 128  # from here on: a variable, `holders[number - 128]` of its reading
BLOCK_HOLDERS_MAX = 8  # named: they are in each part, and at most a fifth of its frame


class Segment(Message, frozen=True):
    """A segment, or a part of one, with its blocks in order of address."""

    address: Address
    bytes: Bytes  # of the whole segment
    small: bool  # of the pool for requests up to 1 MiB
    stream: Address
    offset: Bytes = 0  # of the first of these blocks
    expandable: bool = False
    private: bool = False  # of a MemPool or CUDA graph
    blocks: Annotated[tuple[tuple[Bytes, BlockState], ...], Meta(max_length=BLOCKS_PER_PART)] = ()  # bytes, state
    owners: OwnerNumbers = b""  # one for each block; empty: not read


class Segments(Message, frozen=True, tag="segments"):
    """One device's allocator, block by block. Newer parts of a device replace the older."""

    device: Ordinal
    number: Index  # counted from 0
    step: StepNumber
    phase: Text
    t_ns: Nanoseconds
    reason: Text  # asked | oom
    part: Part  # counted from 0
    parts: Part
    segments: Annotated[tuple[Segment, ...], Meta(max_length=SEGMENTS_PER_PART)] = ()
    spent_ns: Nanoseconds | None = None  # of the training thread's time
    holders: Annotated[tuple[Holder, ...], Meta(max_length=BLOCK_HOLDERS_MAX)] = ()  # variables, in every part the same
    walked: bool | None = None  # whether autograd's graph was read: else blocks without owner may be activations

    def __post_init__(self) -> None:
        clean_fields(self, "phase", "reason")


class Snapshot(Message, frozen=True, tag="snapshot"):
    """A file for PyTorch's memory_viz page was written on the agent's machine, or why not."""

    t_ns: Nanoseconds
    step: StepNumber
    path: Text | None = None
    bytes: Bytes | None = None
    why: Text | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "path", "why", limit=TEXT_CHARS_MAX)


def parts(segments: Iterable[Segment]) -> Iterator[tuple[Segment, ...]]:
    """The segments in parts that fit a frame; segments of many blocks are split. At least one part."""
    part: list[Segment] = []
    blocks_left = BLOCKS_PER_PART
    for segment in segments:
        blocks, owners, offset, rest = segment.blocks, segment.owners, segment.offset, True
        while rest:
            if blocks_left < 1 or len(part) == SEGMENTS_PER_PART:
                yield tuple(part)
                part, blocks_left = [], BLOCKS_PER_PART
            taken, blocks = blocks[:blocks_left], blocks[blocks_left:]
            theirs, owners = owners[:blocks_left], owners[blocks_left:]
            part.append(msgspec.structs.replace(segment, blocks=taken, offset=offset, owners=theirs))
            offset += sum(size for size, _ in taken)
            blocks_left -= len(taken)
            rest = bool(blocks)
    yield tuple(part)


# --------------------------------------------------------------------------------------------------------- requests

CENSUS, BLOCKS, SNAPSHOT_FILE, ROOM = "census", "blocks", "snapshot", "room"
"""What a viewer may request: a census now, the allocator's blocks, a file for memory_viz; or send: how much a device
has left for the process."""


NOT_DONE = "asked for, not done: "
"""Prefix of the notice that says why a request was not carried out."""


class Request(Message, frozen=True, tag="request"):
    """From a viewer to the agent's control socket. No path, no code: one of four words, and for `room` two numbers."""

    what: Text
    nonce: Text = ""  # the agent's, so that a process that replaced it does not answer
    device: Ordinal = 0
    available: Bytes | None = None  # room: bytes this process can have on the device, including reserved ones

    def __post_init__(self) -> None:
        clean_fields(self, "what", "nonce", limit=NAME_CHARS_MAX)


class Reply(Message, frozen=True, tag="reply"):
    """Whether it will be done. Results arrive on the stream."""

    accepted: bool
    why: Text = ""

    def __post_init__(self) -> None:
        clean_fields(self, "why", limit=TEXT_CHARS_MAX)
