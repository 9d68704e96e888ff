"""What is told of the place at which an allocation failed: the innermost frames, and parameters of that size."""

from __future__ import annotations

import threading

import pytest
from torch import nn

from gpumon_agent.oom import failure_site

MIB = 1 << 20


def a_model_of(mib: int, layers: int = 1) -> nn.Module:
    """Layers with a weight of so many MiB each, which take no memory."""
    return nn.Sequential(*(nn.Linear(256, mib * 1024, bias=False, device="meta") for _ in range(layers)))


@pytest.mark.parametrize(
    ("mib", "requested", "found"),
    [
        (22, 22, True),
        (21, 22, True),  # the allocator asks the driver for whole segments of 2 MiB
        (21, 24, False),
        (23, 22, False),
        (20, 20, False),  # small enough for a segment of many tensors, so its size says nothing
    ],
)
def test_a_parameter_has_the_size_if_the_allocator_would_ask_for_as_much(mib: int, requested: int, found: bool) -> None:
    same = failure_site.same_size([a_model_of(mib)], requested * MIB)
    assert [each.path for each in same] == ["0.weight"] * found


def test_of_many_equal_layers_eight_are_named() -> None:
    """They are shown in one line."""
    same = failure_site.same_size([a_model_of(22, layers=5), a_model_of(22, layers=5)], 22 * MIB)
    assert len(same) == 8


def test_of_a_deep_recursion_the_innermost_24_frames_are_told() -> None:
    def descends(levels: int) -> failure_site.FailureSite:
        return descends(levels - 1) if levels else failure_site.read([], threading.get_ident())

    stack = descends(100).stack
    assert len(stack) == 24
    assert all(frame.endswith(" in descends") for frame in stack)
