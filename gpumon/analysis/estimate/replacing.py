"""Replaces an attribute of a module or class for a while, and restores it, even if it was inherited or missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _MISSING)  # not getattr: a static method would come back as a function
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
