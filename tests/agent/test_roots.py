"""Where a census begins to look, as it is found: nothing of those who called stays alive by it."""

from __future__ import annotations

import gc
import weakref

import pytest

pytest.importorskip("torch")


class Batch:
    """Stands for what a caller has in a variable."""


def test_looking_at_the_callers_frames_keeps_none_of_them():
    from gpumon_agent.leaks.holders import Files
    from gpumon_agent.leaks.roots import beside

    def forward() -> weakref.ref[Batch]:
        batch = Batch()
        assert beside(Files(), ())
        return weakref.ref(batch)

    gc.disable()  # a cycle would wait for it
    try:
        assert forward()() is None
    finally:
        gc.enable()
