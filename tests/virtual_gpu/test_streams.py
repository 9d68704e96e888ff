"""Streams and events complete later than they are queued, so memory is held back as on a device."""

from __future__ import annotations

import json


def hold_back():
    import json

    import torch

    side = torch.cuda.Stream()
    small = torch.zeros(8, device="cuda")

    def lend() -> int:
        """Bytes held after a block was lent to a busy stream and deleted, then an allocation looked at the events."""
        block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            torch.ones(8, device="cuda")
        block.record_stream(side)
        del block
        torch.empty(8, device="cuda")
        return torch.cuda.memory_stats()["active_bytes.all.current"]

    idle = torch.cuda.memory_stats()["active_bytes.all.current"]
    held = [lend() - idle >= 64 << 20]
    for _ in range(64):
        small.add_(1)
    torch.empty(8, device="cuda")
    held.append(torch.cuda.memory_stats()["active_bytes.all.current"] - idle >= 64 << 20)
    lend()
    torch.cuda.synchronize()
    torch.empty(8, device="cuda")
    held.append(torch.cuda.memory_stats()["active_bytes.all.current"] - idle >= 64 << 20)
    print(json.dumps(held))


def test_record_stream_holds_memory_until_the_device_has_caught_up(virtual_gpu):
    at_once, after_launches, after_synchronize = json.loads(virtual_gpu().run(hold_back).stdout)
    assert at_once
    assert not after_launches
    assert not after_synchronize


def test_a_device_that_lags_by_nothing_returns_it_at_once(virtual_gpu):
    assert json.loads(virtual_gpu(stream_delay=0).run(hold_back).stdout) == [False, False, False]


def test_events_become_ready_with_launches_waiting_or_silence(virtual_gpu):
    def watch():
        import time

        import torch

        small = torch.zeros(8, device="cuda")
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        assert events[0].query()  # never recorded
        events[0].record()
        assert not events[0].query()
        for _ in range(40):
            small.add_(1)
        assert events[0].query()
        events[1].record()
        events[1].synchronize()
        assert events[1].query()
        small.add_(1)
        events[2].record()
        assert not torch.cuda.current_stream().query()
        small.sum().item()  # waits for the device
        assert events[2].query()
        small.add_(1)
        events[3].record()
        assert not events[3].query()
        time.sleep(0.3)
        assert events[3].query()
        assert events[0].elapsed_time(events[3]) > 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            small.add_(1)
        graph.replay()
        torch.cuda.synchronize()

    virtual_gpu().run(watch)
