"""A script with an allocator of its own (CUDAPluggableAllocator): it runs as if unwatched, and one line says why."""

from __future__ import annotations

import shutil
from typing import Any

import pytest


def train(watched: bool) -> None:
    import subprocess
    import tempfile
    from pathlib import Path

    import torch
    from torch import nn

    folder = Path(tempfile.mkdtemp())
    (folder / "own.c").write_text("""
        #include <stddef.h>
        extern int cudaMalloc(void **, size_t);
        extern int cudaFree(void *);
        void *own_malloc(ptrdiff_t size, int device, void *stream) { void *p = 0; cudaMalloc(&p, size); return p; }
        void own_free(void *p, ptrdiff_t size, int device, void *stream) { cudaFree(p); }
    """)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "own.so", folder / "own.c"], check=True)
    own = torch.cuda.memory.CUDAPluggableAllocator(str(folder / "own.so"), "own_malloc", "own_free")
    torch.cuda.memory.change_current_allocator(own)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    if watched:
        import gpumon_agent

        gpumon_agent.watch(model, optimizer)
    kept = []
    for _ in range(40):
        loss = model(torch.ones(8, 64, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(torch.ones(128, device="cuda"))
    for question in (
        torch.cuda.memory_allocated,
        torch.cuda.reset_peak_memory_stats,
        torch.cuda.memory._snapshot,
        torch.cuda.memory._record_memory_history,
        torch._C._cuda_isHistoryEnabled,
    ):
        try:
            print(question())
        except RuntimeError as error:
            print(str(error).splitlines()[0])
    if watched:
        gpumon_agent.stop()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_an_own_allocator_costs_one_line(virtual_gpu: Any) -> None:
    bare = virtual_gpu().run(train, False, fresh=True)
    watched = virtual_gpu().run(train, True, fresh=True)
    assert watched.stdout == bare.stdout
    lines = [line for line in watched.stderr.splitlines() if line not in bare.stderr.splitlines()]
    assert lines == [
        "gpumon: this script's own allocator (CUDAPluggableAllocator) reports no figures: CUDA memory stays unknown"
    ]
