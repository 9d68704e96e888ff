"""Figures for a logger: the highest peaks since it was last given some, and the newest of the rest."""

from __future__ import annotations

from gpumon_agent import wire
from gpumon_agent.logged import Logged


def phase(name: str, peak: int | None, reserved: int | None = None, device: int = 0) -> wire.Phase:
    return wire.Phase(3, name, 0, device, 0, 0, allocated_peak=peak, reserved=reserved)


def outlook(peak: int, headroom: int | None, device: int = 0) -> wire.Outlook:
    return wire.Outlook(3, device, 0, peak, peak, peak, "backward", "fits", headroom)


def drained(logged: Logged, *events: wire.NumberedEvent) -> Logged:
    logged.drained(enumerate(events))
    return logged


def test_peaks_are_the_highest_since_the_last_time_and_the_rest_is_the_newest() -> None:
    logged = drained(
        Logged(), phase("load", 90, 100), phase("forward", 50, 100), phase("forward", 60, 100),
        phase("backward", 70, 100), phase("optimizer", 40, 80), outlook(75, 5), outlook(76, -6),
    )  # fmt: skip
    assert logged.take() == {
        "gpumon/peak_bytes": 90, "gpumon/forward_peak_bytes": 60, "gpumon/backward_peak_bytes": 70,
        "gpumon/optimizer_peak_bytes": 40, "gpumon/reserved_bytes": 80, "gpumon/next_peak_bytes": 76,
        "gpumon/headroom_bytes": -6,
    }  # fmt: skip
    drained(logged, phase("forward", 10))
    peaks = {"gpumon/peak_bytes": 10, "gpumon/forward_peak_bytes": 10}
    assert logged.take() == peaks | {
        "gpumon/reserved_bytes": 80, "gpumon/next_peak_bytes": 76, "gpumon/headroom_bytes": -6,
    }  # fmt: skip


def test_what_is_not_known_is_left_out() -> None:
    assert Logged().take() == {}
    assert drained(Logged(), phase("forward", None), outlook(7, None)).take() == {"gpumon/next_peak_bytes": 7}


def test_steps_that_were_not_read_have_a_peak_too() -> None:
    step = wire.Step(9, 0, 0, quiet=5, quiet_peaks=(wire.QuietPeak(0, 33, 44), wire.QuietPeak(1, None, None)))
    assert drained(Logged(), step).take() == {"gpumon/peak_bytes": 33}


def test_peaks_of_steps_that_were_not_read_count_once() -> None:
    """They are known before the event that tells them."""
    logged, peaks = Logged(), (wire.QuietPeak(0, 33, 44),)
    logged.quiet(peaks)
    assert logged.take() == {"gpumon/peak_bytes": 33}
    assert drained(logged, phase("forward", 5), wire.Step(9, 0, 0, quiet=5, quiet_peaks=peaks)).take() == {
        "gpumon/peak_bytes": 5, "gpumon/forward_peak_bytes": 5,
    }  # fmt: skip


def test_of_several_devices_the_fullest_counts() -> None:
    logged = drained(
        Logged(), phase("forward", 5, 9, device=0), phase("forward", 6, 8, device=1), outlook(7, 3, 0), outlook(6, 2, 1)
    )
    assert logged.take() == {
        "gpumon/peak_bytes": 6, "gpumon/forward_peak_bytes": 6, "gpumon/reserved_bytes": 9,
        "gpumon/next_peak_bytes": 7, "gpumon/headroom_bytes": 2,
    }  # fmt: skip
