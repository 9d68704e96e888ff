"""The user's own memory figures are exactly what they would have been, and every phase's figures are torch's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Gpu = Callable[..., Any]


def reads(seeds: int, operations: int, pools: bool) -> None:
    """Random allocations, training steps, reads and resets; prints every figure read. WATCHED: with the agent.

    Which is stopped and called back now and then: what it reset before must not be missing after.
    """
    import json
    import os
    import random

    import torch

    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    models = [torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)).to(d) for d in devices]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    unwatched = torch._C._cuda_memoryStats
    watched = False

    def watch_or_stop() -> None:
        nonlocal watched
        if os.environ.get("WATCHED"):
            import gpumon_agent

            watched = not watched
            if not watched:
                gpumon_agent.stop()
                return
            for model, optimizer in zip(models, optimizers, strict=True):
                gpumon_agent.watch(model, optimizer)

    watch_or_stop()

    def measure(device: torch.device) -> None:
        """As `%%gpumon` does at a cell's beginning."""
        if watched:
            from gpumon_agent.registry import REGISTRY

            REGISTRY.agent.devices.peaks.measure(device.index)

    def largest(stats):
        return {key: value for key, value in stats.items() if "peak" in key}

    readers = [
        torch.cuda.max_memory_allocated,
        torch.cuda.max_memory_reserved,
        torch.cuda.memory_allocated,
        torch.cuda.memory_reserved,
        lambda d: sorted(torch.cuda.memory_stats(d).items()),
        lambda d: repr(torch.cuda.memory_stats_as_nested_dict(d)),
        lambda d: torch.cuda.memory_summary(d),
    ]
    resetters = [torch.cuda.reset_peak_memory_stats]
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "max_memory_allocated"):
        readers += [
            torch.accelerator.max_memory_allocated,
            torch.accelerator.max_memory_reserved,
            lambda d: sorted(torch.accelerator.memory_stats(d).items()),
        ]
        resetters.append(torch.accelerator.reset_peak_memory_stats)
    figures = []
    for seed in range(seeds):
        choose = random.Random(seed)
        held = []
        pool = torch.cuda.MemPool() if pools else None
        for _ in range(operations):
            device = choose.choice(devices)
            kind = choose.random()
            if kind < 0.35:
                size = choose.choice([1, 700, 300_000, 3_000_000, 30_000_000])
                if pool is not None and device.index == 0 and choose.random() < 0.5:
                    with torch.cuda.use_mem_pool(pool, device=device):
                        held.append(torch.empty(size, dtype=torch.uint8, device=device))
                else:
                    held.append(torch.empty(size, dtype=torch.uint8, device=device))
            elif kind < 0.6 and held:
                del held[choose.randrange(len(held))]
            elif kind < 0.8:
                at = choose.randrange(2)
                models[at](torch.empty(choose.choice([2, 300]), 64, device=devices[at])).sum().backward()
                if choose.random() < 0.5:
                    optimizers[at].step()
                    optimizers[at].zero_grad()
            elif kind < 0.83:
                choose.choice(resetters)(device)
            elif kind < 0.84:
                torch.cuda.empty_cache()
            elif kind < 0.842:
                watch_or_stop()
            elif kind < 0.86:
                measure(device)
            else:
                figures.append([choose.choice(readers)(device), torch.cuda.current_device()])
        held.clear()
        pool = None
    if watched:
        watch_or_stop()
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    assert torch._C._cuda_memoryStats is unwatched  # nothing is missing from the counters any more
    print(json.dumps(figures))


READERS = [DICT := {"GPUMON_NATIVE": "off"}, {"GPUMON_NATIVE": "on"}]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("pools", "seeds", "operations"), [(False, 8, 1000), (True, 4, 600)])
@pytest.mark.usefixtures("native_reader")
def test_a_randomized_run_reads_the_same_with_and_without(
    virtual_gpu: Gpu, pools: bool, seeds: int, operations: int, reader: dict[str, str]
) -> None:
    gpu = virtual_gpu(devices=2)
    if pools and gpu.run('import torch; print(hasattr(torch.cuda, "MemPool"))').stdout != "True\n":
        pytest.skip("this torch has no torch.cuda.MemPool")
    figures = [
        json.loads(
            gpu.run(
                reads, seeds, operations, pools, env={"WATCHED": watched, "GPUMON_GOVERNOR": "off", **reader}
            ).stdout
        )
        for watched in ("", "1")
    ]
    assert len(figures[0]) > seeds * operations / 10
    assert figures[0] == figures[1]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.usefixtures("native_reader")
def test_a_measured_peak_is_that_of_its_span(virtual_gpu: Gpu, reader: dict[str, str]) -> None:
    def script() -> None:
        import torch

        from gpumon_agent import agent, wire

        watched = agent.Agent(publish=False)
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched.adopt(model, optimizer)
        peaks = watched.devices.peaks

        def step() -> None:
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()

        def allocate(mebibytes: int) -> None:
            torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")

        for _ in range(5):  # the first readings prove the native reader
            step()
        allocate(200)
        step()
        allocate(100)
        highest = torch.cuda.max_memory_allocated()
        watched.recorder.drain()
        peaks.measure(0)
        now = torch.cuda.memory_allocated()
        assert peaks.measured(0)[0] == now
        allocate(30)
        step()  # closes windows
        allocate(20)
        assert peaks.measured(0)[0] == now + (30 << 20)
        assert torch.cuda.max_memory_allocated() == highest  # the user's figure
        torch.cuda.reset_peak_memory_stats()
        allocate(10)
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() + (10 << 20)
        assert peaks.measured(0)[0] == now + (30 << 20)
        allocate(50)
        assert peaks.measured(0)[0] == now + (50 << 20)
        step()
        phases = [event for _, event in watched.recorder.drain() if isinstance(event, wire.Phase)]
        assert phases[0].allocated_peak == now + (100 << 20)  # the window that was open keeps its peak
        peaks.measure(0)
        assert peaks.measured(0)[0] == torch.cuda.memory_allocated()

    virtual_gpu().run(script, env={"GPUMON_GOVERNOR": "off", **reader})


def test_bounds_mode_never_resets_and_says_so(virtual_gpu: Gpu) -> None:
    def script() -> None:
        import torch

        from gpumon_agent import agent, wire

        before = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        watched = agent.Agent(publish=False)
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched.adopt(model, optimizer)
        assert before == (torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats)
        watched.devices.peaks.measure(0)
        assert watched.devices.peaks.measured(0) is None
        kept = torch.empty(10_000_000, device="cuda")
        del kept
        for _ in range(3):
            model(torch.ones(2, 8, device="cuda")).sum().backward()
            optimizer.step()
        phases = [event for _, event in watched.recorder.drain() if isinstance(event, wire.Phase)]
        assert all(phase.flags & wire.BOUND for phase in phases)
        assert all(phase.allocated_peak >= 40_000_000 for phase in phases)

    virtual_gpu().run(script, env={"GPUMON_PEAKS": "bounds", "GPUMON_GOVERNOR": "off"})


def test_an_optimizer_that_steps_within_backward_leaves_the_peaks_known(virtual_gpu: Gpu) -> None:
    """Its hooks run in the engine's thread for the device, while the thread that called backward waits."""

    def script() -> None:
        import torch

        from gpumon_agent import agent, wire

        watched = agent.Agent(publish=False)
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)).cuda()
        optimizers = {each: torch.optim.AdamW([each]) for each in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(step)
        watched.adopt(model, list(optimizers.values()))
        for _ in range(6):
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(2, 256, device="cuda")).sum().backward()
            highest = torch.cuda.max_memory_allocated()
        phases = [event for _, event in watched.recorder.drain() if isinstance(event, wire.Phase)]
        steps = {}
        for phase in phases:
            steps.setdefault(phase.step, []).append(phase)
        assert sorted(steps) == list(range(6)), sorted(steps)
        assert not any(phase.flags & wire.OVERLAPPED for phase in phases), [(p.step, p.phase, p.flags) for p in phases]
        assert max(phase.allocated_peak for phase in steps[5]) == highest

    virtual_gpu().run(script, env={"GPUMON_GOVERNOR": "off"})


def test_what_waits_is_bounded_and_another_thread_that_allocates_makes_a_peak_a_bound(virtual_gpu: Gpu) -> None:
    def script() -> None:
        import threading

        import torch

        from gpumon_agent import agent, wire

        watched = agent.Agent(publish=False)
        peaks = watched.devices._cuda._peaks
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watched.adopt(model, optimizer)
        watched.governor.ledger = False  # it would look through each reading at once
        left = 0

        def bounds(steps: int) -> int:
            nonlocal left
            for _ in range(steps):
                model(torch.ones(2, 8, device="cuda")).sum().backward()
                optimizer.step()
            left = sum(isinstance(event[-1], dict) for event in watched.recorder._events)
            phases = [event for _, event in watched.recorder.drain() if isinstance(event, wire.Phase)]
            return sum(bool(phase.flags & wire.BOUND) for phase in phases)

        assert bounds(20) == 0
        assert left == 80, left
        assert len(peaks._shadows[0].held) <= 65
        peaks._fold()
        assert len(peaks._shadows[0].held) == 1
        assert bounds(5) == 0
        assert left == 20, left
        reset = peaks.reset

        def reset_late(device: int) -> None:
            """Between the read and the reset, another thread allocates and frees."""
            other = threading.Thread(target=lambda: torch.ones(100, device="cuda"))
            other.start()
            other.join()
            reset(device)

        peaks.reset = reset_late
        done = threading.Event()
        alive = threading.Thread(target=done.wait)  # nothing is looked for while no other thread runs
        alive.start()
        found = bounds(20)
        done.set()
        assert found == 80, found  # four windows a step, each checked until 256 in a row were quiet

    virtual_gpu().run(script, env={"GPUMON_GOVERNOR": "off", **DICT})


def figures() -> None:
    """A script that reads torch's own figures where phases end; prints its own beside what the agent recorded."""
    import json

    import torch

    from gpumon_agent import agent, wire

    watched = agent.Agent(publish=False)
    model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    watched.adopt(model, optimizer)
    own = []

    def read(phase: str) -> None:
        own.append(
            [
                phase,
                torch.cuda.memory_allocated(),
                torch.cuda.max_memory_allocated(),
                torch.cuda.memory_reserved(),
                torch.cuda.max_memory_reserved(),
            ]
        )
        torch.cuda.reset_peak_memory_stats()

    for step in range(4):
        watched.governor.ledger = step % 2 == 0  # else nobody looks through a reading before it is drained
        x = torch.randn(32 * (step + 1), 256, device="cuda")
        read("between" if step else "load")
        y = model(x)
        read("forward")
        loss = y.pow(2).mean()
        gradient = torch.ones_like(loss)  # backward() without one has it until it returns, after the engine has
        loss.backward(gradient)
        read("backward")
        optimizer.step()
        read("optimizer")
        optimizer.zero_grad()
        del x, y, loss, gradient  # or they would still be there as the next forward returns
    seen = [
        [e.phase, e.allocated, e.allocated_peak, e.reserved, e.reserved_peak]
        for _, e in watched.recorder.drain()
        if isinstance(e, wire.Phase)
    ]
    print(json.dumps([own, seen]))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.usefixtures("native_reader")
def test_every_figure_is_what_the_script_itself_reads(virtual_gpu: Gpu, reader: dict[str, str]) -> None:
    own, seen = json.loads(virtual_gpu().run(figures, env={"GPUMON_GOVERNOR": "off", **reader}).stdout)
    assert seen == own


def test_after_256_quiet_windows_one_in_16_is_checked_for_other_threads(virtual_gpu: Gpu) -> None:
    """A check is a second read of the allocator, and a thread that never allocates must not double the cost."""

    def script() -> None:
        import threading

        import torch

        from gpumon_agent.allocator.peaks import Peaks

        torch.empty(1, device="cuda")
        peaks = Peaks()
        read, reads = peaks.read, []

        def counted(device: int) -> object:
            reads.append(device)
            return read(device)

        peaks.read = counted
        done = threading.Event()
        threading.Thread(target=done.wait).start()
        for _ in range(512):
            peaks.boundary(0)
        done.set()
        peaks.stop()
        assert len(reads) == 512 + 256 + 256 // 16, len(reads)

    virtual_gpu().run(script, env=DICT)
