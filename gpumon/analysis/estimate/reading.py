"""Reads a JSON file that describes a model, with limits; what exceeds them is reported in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from gpumon.analysis.estimate.model import NotAModel
from gpumon_agent import wire

FILE_BYTES_MAX = 64 << 20
NESTED_MAX = 20
LAYERS_MAX = 512
SIZE_MAX = 1 << 31  # of one dimension in a config: a vocabulary, a width, a length
ELEMENTS_MAX = 1 << 50  # of one tensor: a petabyte


class OutOfBounds(NotAModel):
    """A model far larger than any that exists: a mistake in the file, or in an option."""


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file, with printable texts. Raises NotAModel."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as reason:
        raise NotAModel(f"{path} cannot be read: {reason.strerror or reason}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise OutOfBounds(f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB, so it does not describe a model")
    try:
        content = json.loads(raw, parse_constant=_no_number)
        if not isinstance(content, dict):
            raise NotAModel(f"{path} holds no object, so it does not describe a model")
        made: dict[str, Any] = _cleaned(content, 0)
        return made
    except NotAModel:
        raise
    except RecursionError:
        raise OutOfBounds(f"{path} is nested too deeply to describe a model") from None
    except ValueError as reason:
        raise NotAModel(f"{path} is not JSON: {reason}") from None


def check_config(content: dict[str, Any], where: Path) -> None:
    """Raises OutOfBounds for a number that no model has."""
    for name, value in _numbers(content):
        most = LAYERS_MAX if "layer" in name else SIZE_MAX
        if not -most <= value <= most:
            raise OutOfBounds(f"{where}: {name} is {_short(value)}, and may be {most:,} at most; correct the file")


def check_shapes(content: dict[str, Any], where: Path) -> None:
    """Raises OutOfBounds for a shape that no parameter has."""
    for name, shape in content.items():
        if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
            continue  # from_shapes reports it
        if len(shape) > 16 or prod(shape) > ELEMENTS_MAX or any(size > ELEMENTS_MAX for size in shape):
            raise OutOfBounds(f"{where}: {name!r} has more elements than any parameter; correct its shape in the file")


def _cleaned(value: Any, depth: int) -> Any:
    if depth > NESTED_MAX:
        raise RecursionError
    if isinstance(value, str):
        return wire.clean(value, wire.TEXT_CHARS_MAX)
    if isinstance(value, dict):
        return {wire.clean(name, wire.TEXT_CHARS_MAX): _cleaned(each, depth + 1) for name, each in value.items()}
    return [_cleaned(each, depth + 1) for each in value] if isinstance(value, list) else value


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, name)
    elif isinstance(value, (int, float)):
        yield name, value


def _short(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")
