"""What is said of a model spread over ranks, against DDP's logger, FSDP's handles and the allocator: one process."""

from __future__ import annotations

import json

from scenarios.catalogue import WITHOUT_WORKSPACES


def rank_of_many() -> None:
    """Rank 0 of 4 and of 8 over the NCCL stand-in, which needs no peers: prints what was said and what is so."""
    import contextlib
    import gc
    import json
    import warnings

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from gpumon_agent.attribution import describe
    from gpumon_agent.attribution.inventory import Inventory

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before 2.6
        from torch.distributed._composable.fsdp import fully_shard

    warnings.simplefilter("ignore")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)

    def requested() -> int:
        gc.collect()  # wrappers are cycles
        # what a collective used, torch 2.8's watchdog marks as done with, and the next collective lets go of
        with contextlib.suppress(RuntimeError):  # 2.15's nccl2 has no such watchdog
            dist.group.WORLD._wait_for_pending_works()
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize()
        torch.empty(1, device=device)  # with it go blocks that were lent to NCCL's stream, as torch 2.4 does
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def held_by(model: nn.Module) -> int:
        return sum(
            {s._cdata: s.nbytes() for p in model.parameters() for s in [p.to_local().untyped_storage()]}.values()
        )

    def network() -> nn.Sequential:
        with device:
            return nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(6)))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
        for _ in range(steps):
            model(torch.zeros(4, 512, device=device)).sum().backward()
            optimizer.step()

    def said(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, object]:
        model, _ = describe.model(model, optimizers, index=0, revision=0, name="job", found=False)
        kept = model.parallel
        fields = {} if kept is None else {name: getattr(kept, name) for name in kept.__struct_fields__}
        states = [each.state_bytes for each in model.optimizers]
        kinds = [each.kind for each in model.optimizers]
        return {**fields, "states": states, "kinds": kinds, "parameters": model.parameters}

    told: dict[str, object] = {}
    dist.init_process_group("nccl", rank=0, world_size=8, store=dist.HashStore())
    for view in (False, True):
        before = requested()
        model = DistributedDataParallel(network(), device_ids=[0], gradient_as_bucket_view=view, bucket_cap_mb=10)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        fresh = said(model, optimizer)
        train(model, optimizer)
        logged = model._get_ddp_logging_data()
        weights = sum(p.numel() * 4 for p in model.parameters())
        told[f"ddp {view}"] = {
            "fresh": fresh,
            "said": said(model, optimizer),
            "logged": [logged["bucket_sizes"], logged["rebuilt_bucket_sizes"]],
            "beside": requested() - before - weights,
            "weights": weights,
        }
        del model, optimizer

    for name in ("fp16", "powersgd"):
        model = DistributedDataParallel(network(), device_ids=[0])
        if name == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, 5)
        described = said(model, optimizer)
        factors = returned = 0
        watched = Inventory()
        watched.watch(model, [optimizer])
        owned = watched.owners(device).buckets
        if name == "powersgd":
            factors = sum(t.nbytes for kept in (state.p_memory_dict, state.q_memory_dict) for t in kept.values())
            before = requested()
            state.error_dict.clear()
            returned = before - requested()
        told[name] = {"said": described, "factors": factors, "returned": returned, "owned": owned}
        del model, optimizer, watched

    model = DistributedDataParallel(network(), device_ids=[0], gradient_as_bucket_view=True)
    before = requested()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    watched = Inventory()
    watched.watch(model, [optimizer])
    owners_before = watched.owners(device, fresh=True).optimizer
    train(model, optimizer, 1)
    optimizer.zero_grad()
    inner = [v for state in optimizer.optim.state.values() for v in state.values() if v.device == device]
    told["zero"] = {
        "said": said(model, optimizer),
        "state": sum(v.numel() * 4 for v in inner),
        "owners": [owners_before, watched.owners(device, fresh=True).optimizer],
    }
    del model, optimizer, watched, inner

    model = FullyShardedDataParallel(network(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id=device)
    fresh = said(model)
    model(torch.zeros(4, 512, device=device))
    handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle]
    held = sum(handle.flat_param._local_shard.numel() * 4 for handle in handles)
    told["fsdp1"] = {"said": said(model), "fresh": fresh, "held": held}
    del model, handles

    model = network()
    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    told["fsdp2"] = {"said": said(model), "held": held_by(model)}
    del model

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    model = network()
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    told["tp"] = {"said": said(model), "held": held_by(model)}
    told["plain"] = said(network())
    print(json.dumps(told))


BLOCK = (512 * 2048 + 2048 + 2048 * 512 + 512) * 4
WHOLE = 6 * BLOCK


def test_every_way_of_spreading_is_told_to_the_byte(virtual_gpu):
    told = json.loads(virtual_gpu().run(rank_of_many, env=WITHOUT_WORKSPACES).stdout.splitlines()[-1])
    _ddp(told)
    _sharded(told)
    assert told["plain"] == {"states": [], "kinds": [], "parameters": WHOLE // 4}


def _ddp(told) -> None:
    for view in (False, True):
        ddp = told[f"ddp {view}"]
        first, rebuilt = ([int(size) for size in sizes.split(",")] for sizes in ddp["logged"])
        said = ddp["said"]
        assert ddp["fresh"]["bucket_bytes"] == ddp["fresh"]["first_bucket_bytes"] == first
        assert (said["bucket_bytes"], said["first_bucket_bytes"]) == (rebuilt, first)
        assert sum(rebuilt) == ddp["weights"] == WHOLE
        assert ddp["beside"] == (WHOLE if view else 2 * WHOLE)  # gradients, and their copy in the buckets
        assert (said["gradient_as_bucket_view"], said["rebuilt"], said["world_size"]) == (view, True, 8)
        assert (said["comm_hook"], said["comm_hook_bytes"]) == (None, None)
    assert (told["fp16"]["said"]["comm_hook"], told["fp16"]["said"]["comm_hook_bytes"]) == ("fp16_compress_hook", 0)
    power = told["powersgd"]
    assert power["said"]["comm_hook"] == "powerSGD_hook"
    assert power["said"]["comm_hook_bytes"] == power["returned"] + power["factors"]
    assert power["owned"] == WHOLE + power["said"]["comm_hook_bytes"]  # the ledger's line: the buckets and this
    assert (power["returned"], power["factors"] > 0) == (WHOLE, True)


def _sharded(told) -> None:
    zero = told["zero"]
    assert zero["said"]["kinds"] == ["ZeroRedundancyOptimizer of AdamW"]
    assert zero["owners"] == [0, zero["state"]]
    assert 0 < zero["state"] < WHOLE

    one = told["fsdp1"]["said"]
    assert told["fsdp1"]["fresh"] == one
    assert (one["kind"], one["world_size"], one["whole_bytes"]) == ("fsdp1", 8, WHOLE)
    assert one["shard_bytes"] == told["fsdp1"]["held"] == WHOLE // 8
    assert one["unit_bytes"] == BLOCK
    assert one["unit"]

    two = told["fsdp2"]["said"]
    assert (two["kind"], two["world_size"], two["whole_bytes"]) == ("fsdp2", 8, WHOLE)
    assert 4 * two["parameters"] == WHOLE  # of all ranks
    assert two["shard_bytes"] == told["fsdp2"]["held"] == WHOLE // 8
    assert (two["unit_bytes"], two["unit"], two["mesh"]) == (BLOCK, "0", {"dp": 8})

    tensor = told["tp"]["said"]
    assert (tensor["kind"], tensor["world_size"], tensor["mesh"]) == ("tensor_parallel", 8, {"tp": 8})
    assert (
        tensor["shard_bytes"] == told["tp"]["held"] == WHOLE // 8 + 6 * 7 * 512 // 8 * 4
    )  # the second layer's bias is whole
    assert tensor["whole_bytes"] == 4 * tensor["parameters"] == WHOLE
