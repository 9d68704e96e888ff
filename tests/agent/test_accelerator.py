"""Backends behind torch.accelerator (xpu, mps, …), none of which is here: the same readers on a device that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from gpumon_agent.allocator import Reading
from gpumon_agent.allocator.accelerator import AcceleratorProbe


def figures() -> None:
    """What is read through torch.accelerator is what torch.cuda tells of the same allocator."""
    import torch

    from gpumon_agent.allocator import Reading
    from gpumon_agent.allocator.accelerator import AcceleratorProbe
    from gpumon_agent.wire import BOUND, Device

    probe = AcceleratorProbe("cuda")
    if not hasattr(torch._C, "_accelerator_getDeviceStats"):
        assert probe.boundary(0) == Reading()
        return
    assert probe.boundary(0) == Reading()  # nothing was asked of the device yet, and this does not wake it
    assert not torch.cuda.is_initialized()
    kept = torch.empty(1_000_000, device="cuda:1")
    torch.empty(3_000_000, device="cuda:1")
    read, stats = probe.boundary(1), torch.cuda.memory_stats(1)
    assert read.allocated == torch.cuda.memory_allocated(1) == stats["allocated_bytes.all.current"] >= kept.nbytes
    assert read.allocated_peak == torch.cuda.max_memory_allocated(1) > 12_000_000
    assert read.reserved == torch.cuda.memory_reserved(1)
    assert read.reserved_peak == torch.cuda.max_memory_reserved(1)
    assert (read.active, read.requested) == (stats["active_bytes.all.current"], stats["requested_bytes.all.current"])
    assert (read.allocations, read.retries, read.ooms) == (1, 0, 0)
    assert read.flags & BOUND
    assert torch.cuda.max_memory_allocated(1) > 12_000_000  # it was not reset
    assert probe.devices() == (Device(0, None, "cuda", None, "cuda"), Device(1, None, "cuda", None, "cuda"))


def test_its_figures_are_torch_s_own(virtual_gpu: Callable[..., Any]) -> None:
    virtual_gpu(devices=2).run(figures)


@pytest.mark.parametrize("kind", ["xpu", "mps", "nosuch"])
def test_a_backend_that_is_not_there_is_unknown_and_nothing_raises(kind: str) -> None:
    probe = AcceleratorProbe(kind)
    assert probe.boundary(0) == Reading()
    assert probe.devices() == ()


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("hip", "headroom are known if"), ("mps", "but no peak; NVML"), ("xpu", "has any; NVML does not"), ("cpu", "")],
)
def test_what_a_backend_cannot_tell_is_said_once(kind: str, limit: str) -> None:
    from gpumon_agent.allocator.devices import Devices

    said: list[str] = []
    devices = Devices(list, lambda *_: None, bounds=True, tracker=None, tell=said.append)
    for _ in range(2):
        devices._readers_of({(kind, 0)})
    devices.stop()
    assert [limit in each for each in said] == ([True] if limit else [])
