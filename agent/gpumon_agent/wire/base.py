"""Common to all messages: field types with their bounds, and the cleaning of names, once, at decode.

The messages' modules do without `from __future__ import annotations`: it makes strings of the field types, and msgspec
evaluates them as the decoders are made, which took 14 ms of each start.
"""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .masking import masked

NAME_CHARS_MAX = 120
TEXT_CHARS_MAX = 4096  # messages of exceptions, commands
CODE_CHARS_MAX = 200  # a line of source: longer ones are data

Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Few = Annotated[tuple[Text, ...], Meta(max_length=512)]
Named = Annotated[dict[Text, Text], Meta(max_length=256)]

# Each number has a bound far above any real value. Larger ones are refused at decode, so that no screen has to draw
# them and no loop has to count to them.
BYTES_MAX = 1 << 60
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
SignedBytes = Annotated[int, Meta(ge=-BYTES_MAX, le=BYTES_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Change = Annotated[int, Meta(ge=-(1 << 60), le=1 << 60)]
StepNumber = Annotated[int, Meta(ge=-1, le=1 << 53)]  # -1: before the first one
Seq = Annotated[int, Meta(ge=-1, le=1 << 60)]
Nanoseconds = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]  # a moment or a duration: 146 years
Ordinal = Annotated[int, Meta(ge=-1, le=4095)]  # of a device; -1: torch's "no index"
Index = Annotated[int, Meta(ge=0, le=1 << 31)]
Part = Annotated[int, Meta(ge=0, le=1 << 20)]
Pid = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Address = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Flags = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]

RANKS_MAX = 1 << 20
LOCAL_RANKS_MAX = 4096  # on one machine
RankNumber = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
Ranks = Annotated[int, Meta(ge=0, le=RANKS_MAX)]
LocalRankNumber = Annotated[int, Meta(ge=0, lt=LOCAL_RANKS_MAX)]
LocalRanks = Annotated[int, Meta(ge=0, le=LOCAL_RANKS_MAX)]

Length = Annotated[int, Meta(ge=0, le=1 << 60)]
Shape = Annotated[tuple[Length, ...], Meta(max_length=16)]


def clean(text: str, limit: int = NAME_CHARS_MAX) -> str:
    """Printable characters only, at most `limit` of them (the last one an ellipsis if text was cut)."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_argv(argv: Iterable[str], limit: int = 4 * TEXT_CHARS_MAX) -> tuple[str, ...]:
    """The command without secrets, cleaned and cut after `limit` characters, so that it fits a frame."""
    kept: list[str] = []
    chars_left = limit
    for argument in masked(argv):
        if chars_left < 1 or len(kept) == 511:
            kept.append("…")
            break
        kept.append(clean(argument, min(chars_left, TEXT_CHARS_MAX)))
        chars_left -= len(kept[-1]) + 1
    return tuple(kept)


def clean_fields(message: Struct, *names: str, limit: int = NAME_CHARS_MAX) -> None:
    for name in names:
        value = getattr(message, name)
        if value is not None and (cleaned := clean(value, limit)) is not value:
            msgspec.structs.force_setattr(message, name, cleaned)


class Message(Struct, frozen=True, array_like=True, gc=False):
    """Base of every wire message. New fields go last and have defaults; a field's type never changes.

    Not tracked by the garbage collector: messages are trees, and thousands are kept, in the training process too.
    """
