"""What the verbs print: text in which nothing that came from elsewhere can act on the terminal.

A log, a model's parameter names, a file's name or an argument may hold escape sequences that write to the clipboard,
set the window's title or turn the reading direction. Only printable characters and line ends get through.
"""

from __future__ import annotations

import json
import re

import click

_REPLACED = "\N{REPLACEMENT CHARACTER}"
_STYLED = re.compile(r"\x1b\[[0-9;]*m")  # a log's own colours: left out, not shown as a sign


def harmless(text: str) -> str:
    """Printable characters and line ends only; colours are left out, the rest shows as a replacement character."""
    if text.replace("\n", "").isprintable():
        return text
    text = _STYLED.sub("", text).expandtabs()
    return "".join(c if c == "\n" or c.isprintable() else _REPLACED for c in text)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints text for a person."""
    click.echo(harmless(text), err=err, nl=nl)


def say_json(made: object) -> None:
    """Prints one JSON object as one line: what is not printable is escaped, so the object stays what it was."""
    encoded = made.decode() if isinstance(made, bytes) else json.dumps(made, ensure_ascii=False)
    click.echo(encoded if encoded.isprintable() else "".join(map(_escaped, encoded)))


def _escaped(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
