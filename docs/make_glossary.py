"""Writes docs/glossary.md from the words that the screen uses."""

from __future__ import annotations

from pathlib import Path

from gpumon.tui.glossary import TERMS

TARGET = Path(__file__).with_name("glossary.md")


def text() -> str:
    """The page: a line a word, in the order of the screen."""
    lines = ["# Glossary", "", "The words on gpumon's screens. Made by `python docs/make_glossary.py`.", ""]
    lines += [f"- **{t.word}**: {t.meaning}" + (f" `{t.formula}`" if t.formula else "") for t in TERMS.values()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
