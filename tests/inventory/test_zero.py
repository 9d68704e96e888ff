"""DeepSpeed's ZeRO as an agent tells it, where DeepSpeed is installed: rank 0 of 8 over the NCCL stand-in."""

from __future__ import annotations

import importlib.util
import json

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SMALL = 6 * (2048 + 512) * 4
WHOLE = 6 * (512 * 2048 + 2048 + 2048 * 512 + 512) * 4


def rank_of_eight(stage: int) -> None:
    import json
    import os
    import warnings

    warnings.simplefilter("ignore")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="8", DS_ACCELERATOR="cuda", MASTER_ADDR="127.0.0.1")
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=8, store=dist.HashStore())
    import deepspeed

    from gpumon_agent.attribution import describe
    from gpumon_agent.attribution.caller_frames import engine_of
    from gpumon_agent.attribution.inventory import Inventory

    network = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(6)))
    optimizer = torch.optim.AdamW(network.parameters())
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
        },
    )
    found: list[bool] = []
    network.register_forward_pre_hook(lambda module, _: found.append(engine_of(module) is engine))
    watched = Inventory()
    watched.watch(engine, [optimizer])
    device = torch.device("cuda:0")
    ledger = []
    for _ in range(3):
        engine.backward(engine(torch.zeros(4, 512, device="cuda")).square().mean())
        torch.cuda.synchronize()
        reduced = watched.owners(device).gradients
        engine.step()
        torch.cuda.synchronize()
        requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
        ledger = [requested - sum(watched.owners(device)), reduced, *watched.owners(device)]
    told, _ = describe.model(engine, [optimizer], index=0, revision=0, name="job", found=False)
    kept = told.parallel
    parallel = None if kept is None else [kept.kind, kept.world_size, kept.shard_bytes, kept.whole_bytes]
    print(
        json.dumps(
            [
                parallel,
                told.optimizers[0].state_bytes,
                told.parameter_bytes,
                told.parameters,
                found == [True] * 3,
                ledger,
            ]
        )
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_and_state_are_this_rank_s(virtual_gpu, stage: int) -> None:
    ran = virtual_gpu().run(rank_of_eight, stage, timeout=170)
    line = next(line for line in ran.stdout.splitlines()[::-1] if line.startswith(("[[", "[null")))
    parallel, state, parameter_bytes, parameters, found, ledger = json.loads(line)
    unexplained, reduced, weights, _, _, optimizer, buckets, _ = ledger
    assert found
    assert parallel == (["zero3", 8, WHOLE // 8, WHOLE] if stage == 3 else [f"zero{stage}", 8, None, None])
    assert parameter_bytes == (WHOLE // 8 if stage == 3 else WHOLE)
    assert 4 * parameters == WHOLE  # of all ranks
    assert state == optimizer + 4 == 2 * (WHOLE // 8) + 4  # two moments, and a count of steps
    assert reduced >= WHOLE // 8  # whole parameters at its edges
    assert 0 <= unexplained < 512  # flags of overflow
    if stage == 3:
        assert weights == WHOLE // 8 + WHOLE // 8 + SMALL  # partitions, master copies, and what is never taken apart
        assert buckets == 4_000_000
    else:
        assert (weights, buckets) == (WHOLE + WHOLE // 8, 0)
