"""What every message shares: the types of its fields with their bounds, and how names are cleaned once, at decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

NAME_CHARS_MAX = 120
TEXT_CHARS_MAX = 4096  # messages of exceptions, commands

Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Bytes = Annotated[int, Meta(ge=0)]
Few = Annotated[tuple[Text, ...], Meta(max_length=512)]
Shape = Annotated[tuple[int, ...], Meta(max_length=16)]


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


def clean_fields(message: Struct, *names: str, limit: int = NAME_CHARS_MAX) -> None:
    for name in names:
        value = getattr(message, name)
        if value is not None:
            msgspec.structs.force_setattr(message, name, clean(value, limit))


class Message(Struct, frozen=True, array_like=True, gc=False):
    """Base of every wire message. New fields go last and have defaults; a field's type never changes.

    Not seen by the garbage collector: a message is a tree, and thousands of them are kept, in the training process too.
    """
