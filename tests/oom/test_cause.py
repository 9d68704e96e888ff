"""What tells one cause of an out-of-memory from another: each share from both sides."""

from __future__ import annotations

import pytest

from gpumon.analysis.diagnosis.cause import find_cause
from gpumon.analysis.diagnosis.figures import known
from gpumon.analysis.diagnosis.message_parser import OomMessage

MIB, GIB = 1 << 20, 1 << 30


def failed(**figures: int) -> str:
    """Of a request for 500 MiB on a device of 10,000 MiB."""
    figures = {"requested": 500 * MIB, "total": 10_000 * MIB} | figures
    return find_cause(
        OomMessage("out of memory", "allocator", **{name: known(each) for name, each in figures.items()})
    ).verdict


@pytest.mark.parametrize(("left", "verdict"), [(199 * MIB, "capacity"), (201 * MIB, "fragmentation")])
def test_a_device_of_which_less_than_2_percent_would_be_left_is_full(left: int, verdict: str) -> None:
    """The request would just fit into what is unused, half of it free and half in pieces, and then nothing would."""
    unused = 500 * MIB + left
    allocated = 10_000 * MIB - unused
    slack = 400 * MIB
    assert failed(allocated=allocated, reserved=allocated + slack, free=unused - slack) == verdict


@pytest.mark.parametrize(("outside", "verdict"), [(2448, "capacity"), (2449, "other-process")])
def test_what_stands_outside_pytorch_is_a_cuda_context_up_to_2_gib(outside: int, verdict: str) -> None:
    """99 MiB are left for a request of 500, so that 401 are missing."""
    held = (10_000 - outside - 99) * MIB
    assert failed(allocated=held, reserved=held, free=99 * MIB) == verdict
