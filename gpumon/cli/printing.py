"""Output of the verbs: foreign text is sanitized so that it cannot control the terminal.

Logs, parameter names, file names and arguments may contain escape sequences that write to the clipboard, set the window
title or change the reading direction. Only printable characters and line ends are printed.
"""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata

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


# ------------------------------------------------------------------------------------------------------------- --ascii

_ASCII = str.maketrans({
    "·": "|", "…": "...", "−": "-", "–": "-", "—": "-", "±": "+-", "≤": "<=", "≥": ">=", "≈": "~", "≠": "!=",
    "×": "x", "÷": "/", "→": "->", "←": "<-", "↑": "^", "↓": "v", "‘": "'", "’": "'", "“": '"', "”": '"',
    "„": '"', "•": "-", "●": "*", "✓": "+", "∞": "inf", "µ": "u", "μ": "u", "°": " deg", "ß": "ss",
    "─": "-", "│": "|", "╱": "/", "⁄": "/", "²": "^2", "³": "^3", "⁹": "^9",
    "\N{REPLACEMENT CHARACTER}": "?",
})  # fmt: skip


def only_ascii(text: str) -> str:
    """`text` with words for signs; letters lose their accents, and what is left becomes a question mark."""
    if text.isascii():
        return text
    spelled = unicodedata.normalize("NFKD", text.translate(_ASCII))
    bare = "".join(char for char in spelled if not unicodedata.combining(char))
    return bare.translate(_ASCII).encode("ascii", "replace").decode()


class _Ascii(io.TextIOWrapper):
    def write(self, text: str) -> int:
        return super().write(only_ascii(text))


def say_only_ascii() -> None:
    """From now on this process prints ASCII only: all text, whoever prints it. JSON is data and stays as it is."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, _Ascii):
            stream.flush()
            setattr(sys, name, _Ascii(stream.buffer, "utf-8", "replace", line_buffering=stream.line_buffering))
