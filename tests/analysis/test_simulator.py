"""The simulated allocator against PyTorch's own, on the virtual GPU: every figure after every operation."""

from __future__ import annotations

import json

import pytest

from gpumon.analysis.estimate.simulator import MIB, OutOfMemory, SimulatedAllocator, SimulatedBlock

CONTEXT = 450 * MIB


def operations(settings, seed, count, largest):
    """Random requests through PyTorch's allocator; one line of JSON an operation: what was asked, figures, retries."""
    import json
    import os
    import random

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings

    import torch

    torch.cuda.init()
    torch.cuda.current_stream()
    other = torch.cuda.Stream().cuda_stream
    chance = random.Random(seed)
    live = []
    names = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
    torch.cuda.reset_peak_memory_stats()

    def size():
        kind = chance.random()
        if kind < 0.35:
            return chance.randint(1, 4096)
        if kind < 0.6:
            return chance.randint(1, 1 << 20)
        if kind < 0.65:
            return chance.choice((1 << 20, (1 << 20) + 1, 10 << 20, (10 << 20) - 1, 2 << 20, 20 << 20, 512, 513))
        if kind < 0.8:
            return chance.randint(1 << 20, 10 << 20)
        if kind < 0.95:
            return chance.randint(1, 12) << 19
        return chance.randint(10 << 20, largest)

    for _ in range(count):
        kind = chance.random()
        if kind < 0.52 or not live:
            done = ["malloc", size(), other if chance.random() < 0.15 else 0]
            try:
                pointer = torch._C._cuda_cudaCachingAllocator_raw_alloc(done[1], done[2])
                live.append((len(live), pointer))
                done.append(True)
            except torch.OutOfMemoryError:
                done.append(False)
        elif kind < 0.985:
            index = chance.randrange(len(live))
            torch._C._cuda_cudaCachingAllocator_raw_delete(live.pop(index)[1])
            done = ["free", index]
        elif kind < 0.99:
            torch.cuda.empty_cache()
            done = ["empty"]
        else:
            torch.cuda.reset_peak_memory_stats()
            done = ["reset"]
        stats = torch._C._cuda_memoryStats(0)
        figures = [[stats[name]["all"][which] for name in names] for which in ("current", "peak")]
        print(json.dumps([done, *figures, stats["num_alloc_retries"]]))


def replayed(lines, allocator):
    """Runs the same operations; yields each with what PyTorch and the simulator say."""
    live: list[SimulatedBlock] = []
    for number, line in enumerate(lines):
        done, *told = json.loads(line)
        if done[0] == "malloc":
            try:
                live.append(allocator.malloc(done[1], done[2]))
                fitted = True
            except OutOfMemory:
                fitted = False
            assert fitted == done[3], (number, done)
        elif done[0] == "free":
            allocator.free(live.pop(done[1]))
        elif done[0] == "empty":
            allocator.empty_cache()
        else:
            allocator.reset_peaks()
        now, peaks = allocator.figures, allocator.peaks
        said = [[f.allocated, f.requested, f.reserved, f.active, f.inactive_split] for f in (now, peaks)] + [
            allocator.retries
        ]
        yield number, done, told, said


KINDS = {
    "defaults": ("", {}),
    "a-device-that-fills": ("", {"capacity": 1024 * MIB}),
    "expandable": ("expandable_segments:True", {"expandable_segments": True}),
    "expandable-that-fills": ("expandable_segments:True", {"expandable_segments": True, "capacity": 1024 * MIB}),
    "max-split": ("max_split_size_mb:32", {"max_split_size": 32 * MIB}),
    "max-split-that-fills": ("max_split_size_mb:32", {"max_split_size": 32 * MIB, "capacity": 1024 * MIB}),
    "rounded": ("roundup_power2_divisions:4", {"roundup_power2_divisions": 4}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_every_figure_is_pytorchs_after_every_operation(virtual_gpu, kind, seed):
    settings, arguments = KINDS[kind]
    capacity = arguments.get("capacity")
    device = 40 * 1024 * MIB if capacity is None else capacity + CONTEXT
    gpu = virtual_gpu(memory=f"{device // MIB}MiB", context="450MiB")
    lines = gpu.run(operations, settings, seed, 4000, (120 if capacity else 60) * MIB).stdout.splitlines()
    assert len(lines) == 4000
    allocator = SimulatedAllocator(**{"capacity": device - CONTEXT, **arguments}, total=device)
    for number, done, told, said in replayed(lines, allocator):
        assert told == said, (number, done)
    refused = [line for line in lines if json.loads(line)[0][-1] is False]
    assert bool(refused) == bool(allocator.retries) == ("fills" in kind)


def test_the_map_holds_every_byte_that_is_reserved():
    allocator = SimulatedAllocator()
    kept = [allocator.malloc(size) for size in (100, 700_000, 3 * MIB, 30 * MIB + 1)]
    allocator.free(kept.pop(1))
    segments = allocator.segments()
    assert [(segment.size, segment.large) for segment in segments] == [
        (2 * MIB, False),
        (20 * MIB, True),
        (32 * MIB, True),
    ]
    assert sum(segment.size for segment in segments) == allocator.reserved
    blocks = [block for segment in segments for block in segment.blocks]
    assert sum(size for _, size, _, allocated in blocks if allocated) == allocator.allocated
    assert sum(requested for _, _, requested, _ in blocks) == allocator.requested


def test_a_block_is_given_back_once():
    allocator = SimulatedAllocator()
    block = allocator.malloc(1000)
    allocator.free(block)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)


def test_a_request_beyond_the_capacity_says_what_stands():
    allocator = SimulatedAllocator(capacity=24 * MIB)
    allocator.malloc(3 * MIB)
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(30 * MIB)
    assert (failed.value.requested, failed.value.allocated, failed.value.reserved) == (30 * MIB, 3 * MIB, 20 * MIB)
