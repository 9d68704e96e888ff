"""Output of the verbs: foreign text is sanitized so that it cannot control the terminal.

Logs, parameter names, file names and arguments may contain escape sequences that write to the clipboard, set the window
title or change the reading direction. Only printable characters and line ends are printed.
"""

from __future__ import annotations

import json
import re

import click

_REPLACED = "\N{REPLACEMENT CHARACTER}"
_STYLED = re.compile(r"\x1b\[[0-9;]*m")  # a log's own colours are dropped


def harmless(text: str) -> str:
    """Only printable characters and line ends; colours are dropped, the rest becomes U+FFFD."""
    if text.replace("\n", "").isprintable():
        return text
    text = _STYLED.sub("", text).expandtabs()
    return "".join(c if c == "\n" or c.isprintable() else _REPLACED for c in text)


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints sanitized text."""
    click.echo(harmless(text), err=err, nl=nl)


def say_json(made: object) -> None:
    """Prints one JSON object as one line; non-printable characters are escaped, so its value is unchanged."""
    encoded = made.decode() if isinstance(made, bytes) else json.dumps(made, ensure_ascii=False)
    click.echo(encoded if encoded.isprintable() else "".join(map(_escaped, encoded)))


def _escaped(char: str) -> str:
    return char if char.isprintable() else json.dumps(char)[1:-1]
