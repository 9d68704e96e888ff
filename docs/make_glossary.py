"""Writes docs/glossary.md from the words that the screen uses."""

from __future__ import annotations

from pathlib import Path

from gpumon.tui.glossary import COLUMNS, WORDS, Term

TARGET = Path(__file__).with_name("glossary.md")


def text() -> str:
    """The page: a line a word, in the order of the screen."""
    lines = ["# Glossary", "", "The words on gpumon's screens. Made by `python docs/make_glossary.py`.", ""]
    lines += map(_line, WORDS.values())
    lines += ["", "## Rows, columns and rarer words", "", "The key `e` explains them where they stand.", ""]
    lines += map(_line, COLUMNS.values())
    return "\n".join(lines) + "\n"


def _line(term: Term) -> str:
    return f"- **{term.word}**: {term.meaning}" + (f" `{term.formula}`" if term.formula else "")


if __name__ == "__main__":
    TARGET.write_text(text())
