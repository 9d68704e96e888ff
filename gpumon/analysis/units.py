"""The one module that formats bytes, durations and rates: binary units, as many digits as are meaningful.

Figures compared with each other in a table or sentence should share a unit: pick it with `unit_for`, write each with
`in_unit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

MINUS = "−"  # as wide as "+", unlike "-"
NOT_KNOWN = "n/a"


class Unit(msgspec.Struct, frozen=True):
    """A binary unit of bytes, and the digits to show after the point."""

    name: str
    bytes: int
    digits: int = 1


B, KIB, MIB, GIB, TIB = (Unit(name, 1 << (10 * power)) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB")))
UNITS = (B, KIB, MIB, GIB, TIB)


def unit_for(*values: int | None) -> Unit:
    """The unit in which the largest value has one to four digits before the point; two digits after it below 100."""
    largest = max((abs(value) for value in values if value is not None), default=0)
    for unit in reversed(UNITS):
        if largest >= unit.bytes:
            return replace(unit, digits=2) if largest < 100 * unit.bytes and unit is not B else unit
    return B


def in_unit(value: int | None, unit: Unit, *, sign: bool = False) -> str:
    """The number alone, with the unit's digits ("61.24"); two digits if one would show 0.0 for a non-zero value."""
    if value is None:
        return NOT_KNOWN
    if unit.name == B.name:
        text = f"{abs(value):,}"
    else:
        scaled = abs(value) / unit.bytes
        text = f"{scaled:,.{2 if value and scaled < 0.05 else unit.digits}f}"
        if value and text == "0.00":
            text = "<0.01"
    return _signed(value, text, sign)


def size(value: int | None, *, sign: bool = False) -> str:
    """Bytes with their unit, three digits or more: "512 B", "4.00 MiB", "61.2 GiB"; `sign` puts a + before growth."""
    if value is None:
        return NOT_KNOWN
    unit = next((unit for unit in UNITS if round(abs(value) / unit.bytes, 1) < 1024), TIB)  # 1024.0 MiB is 1 GiB
    if unit is not B and round(abs(value) / unit.bytes, 2) < 10:
        unit = replace(unit, digits=2)
    return f"{in_unit(value, unit, sign=sign)} {unit.name}"


def between(low: int | None, high: int | None) -> str:
    """An interval in brackets, with a blank before: " (5.90 GiB–10.0 GiB)"; "" if both ends read the same."""
    texts = size(low), size(high)
    return "" if texts[0] == texts[1] else f" ({texts[0]}–{texts[1]})"


def exact(value: int | None) -> str:
    """Every byte: "65,712,160,768 B"."""
    return NOT_KNOWN if value is None else f"{_signed(value, f'{abs(value):,}', False)} B"


def percent(share: float | None) -> str:
    """A share of 1 as per cent: "43 %", "0.2 %"; never 0 % or 100 % for what is only close to it."""
    if share is None:
        return NOT_KNOWN
    value = 100 * share
    if 0 < value < 0.1:
        return "<0.1 %"
    if 99.9 < value < 100:
        return ">99.9 %"
    return f"{value:.0f} %" if value == round(value) or 10 <= value <= 90 else f"{value:.1f} %"


def duration(seconds: float | None) -> str:
    """ "18 µs", "3.2 ms", "450 ms", "1.25 s", "42 s", "3 m 05 s", "2 h 14 m", "3 d 4 h"."""
    if seconds is None:
        return NOT_KNOWN
    if seconds < 0:
        return MINUS + duration(-seconds)
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3_600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3_600} h {whole % 3_600 // 60:02d} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3_600} h"


def pace(steps_per_s: float | None) -> str:
    """ "3.2 it/s"; below one a second "12.5 s/it"."""
    if steps_per_s is None or steps_per_s <= 0:
        return NOT_KNOWN
    if steps_per_s >= 1:
        return f"{steps_per_s:.1f} it/s" if steps_per_s < 99.95 else f"{steps_per_s:.0f} it/s"
    return f"{1 / steps_per_s:.1f} s/it"


def count(value: int | None) -> str:
    """ "12,431"."""
    return NOT_KNOWN if value is None else f"{value:,}"


def steps(number: int) -> str:
    """ "1 step", "12,431 steps"."""
    return f"{number:,} step{'' if number == 1 else 's'}"


def about(number: int, exact_below: int = 100) -> str:
    """A count that is a forecast: two digits. "97 steps", "about 170 steps", "about 10,000,000 steps"."""
    if number < exact_below:
        return steps(number)
    power = 10 ** (len(str(number)) - 2)
    return f"about {steps(round(number / power) * power)}"


def _signed(value: int, text: str, sign: bool) -> str:
    if value < 0:
        return MINUS + text
    return "+" + text if sign and value > 0 else text


def ranges(numbers: Iterable[int], most: int = 6) -> str:
    """ "3, 8–15, …": runs as ranges, at most `most` of them."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "")


def shapes(of: Sequence[Sequence[int]]) -> str:
    """The first two shapes of a batch: "8×1024, 8, …"."""
    text = ", ".join("×".join(map(str, shape)) for shape in of[:2])
    return f"{text}, …" if len(of) > 2 else text
