"""Sizes in messages: rounded to two decimals of a unit, so each is an interval of bytes."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import msgspec

UNITS = {"byte": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50, "e": 1 << 60}
SIZE = r"\d{1,20}(?:\.\d{1,9})?\s{0,9}(?:[KMGTPE]i?B|bytes|byte|B)\b"
"""A size in a message. PyTorch's units are binary however they are spelt: its MPS backend long wrote "GB"."""

_SIZE = re.compile(r"(\d+(?:\.(\d+))?)\s*([KMGTPE]?)", re.IGNORECASE)


class Figure(msgspec.Struct, frozen=True):
    """Bytes between `low` and `high`, both included; equal where they are known exactly."""

    low: int
    high: int

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Figure) -> Figure:
        """The difference, never below zero: differences of sizes are sizes."""
        return Figure(max(0, self.low - other.high), max(0, self.high - other.low))


def known(count: int) -> Figure:
    """A figure that was not rounded."""
    return Figure(count, count)


def read(text: str) -> Figure:
    """ "2.69 GiB" → the interval of bytes that is written so. Raises ValueError if `text` is not a size.

    "512 bytes" is exact. Decimals are right to half of the last place, both ends included.
    """
    found = _SIZE.match(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size")
    number, decimals, unit = found.groups()
    scale = UNITS[unit.lower() or "byte"]
    value = Fraction(number) * scale
    if scale == 1:
        return known(int(value))
    half = Fraction(scale, 2 * 10 ** len(decimals or ""))
    return Figure(max(0, math.ceil(value - half)), math.floor(value + half))
