"""What a program reads from the device: uploads come back, computed scalars are zero, unknown shapes are reported."""

from __future__ import annotations

import pytest


def test_uploads_come_back_and_computed_scalars_are_zero(virtual_gpu):
    def read():
        import torch

        for size in (1, 4, 1000, 10**6):
            data = torch.arange(float(size))
            assert torch.equal(data.cuda().cpu(), data)
            assert torch.equal(data.cuda().clone().cpu(), data) or size > 10_000
        one = torch.tensor(3.5).cuda()
        assert one.item() == 3.5
        recycled = torch.full((), 7.0).cuda() + one  # a kernel wrote here
        assert recycled.item() == 0.0
        assert torch.randn(8, 8, device="cuda").sum().item() == 0.0
        assert not torch.isnan(torch.randn(8, device="cuda")).any()

    virtual_gpu().run(read)


def test_larger_reads_give_what_the_memory_held_and_only_so_many_uploads_are_known(virtual_gpu):
    def read():
        import torch

        long = 20 << 20
        uploaded = torch.full((long,), 7.0).cuda()  # 80 MiB, of which a copy carries 64
        back = uploaded.cpu()
        assert (back[: 16 << 20] == 7).all()
        assert not back[16 << 20 :].any()
        assert (uploaded.add_(1)[:100].cpu() == 7).all()  # a kernel should have written here
        assert not torch.full((1 << 20,), 3.0, device="cuda").cpu().any()  # and here, where nothing was before
        first, *others = [torch.tensor(3.5).cuda() for _ in range(257)]
        assert (first.item(), others[0].item()) == (0, 3.5)

    virtual_gpu().run(read)


def test_stale_bytes_can_be_asked_for(virtual_gpu):
    def read():
        import torch

        one = torch.tensor(3.5).cuda()
        one.add_(1)
        print(one.item())

    assert virtual_gpu(scalars="bytes").run(read).stdout == "3.5\n"


def test_a_shape_that_depends_on_values_comes_out_empty_and_is_reported_once(virtual_gpu):
    def choose():
        import torch

        values = torch.randn(8, 8, device="cuda")
        for _ in range(2):
            assert values[values > 0].shape == (0,)
            assert torch.nonzero(values).shape == (0, 2)
            assert torch.unique(values).shape == (0,)
        assert values.sum().item() == 0.0  # asked for the value itself: nothing to report

    lines = virtual_gpu().run(choose).stderr.splitlines()
    said = [line for line in lines if line.startswith("[virtual GPU]")]
    assert said == [
        f"[virtual GPU] the shape of {name} depends on values, which are not computed: it came out empty"
        for name in ("nonzero", "_unique2")
    ]


def test_ranks_over_gloo_agree_although_scalars_are_zero(virtual_gpu):
    script = """
        import os, sys
        import torch
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def rank(index, folder):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
            torch.cuda.set_device(index)
            dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=2)
            model = torch.nn.Linear(64, 64).cuda()
            parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[index])
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
            for _ in range(2):
                parallel(torch.randn(4, 64, device="cuda")).sum().backward()
                optimizer.step()
            mine = torch.tensor([float(index + 1)]).cuda()
            dist.all_reduce(mine)
            assert mine.item() == 3.0
            objects = [None, None]
            dist.all_gather_object(objects, {"rank": index})
            assert objects == [{"rank": 0}, {"rank": 1}]
            sent = [objects[1] if index == 1 else None]
            dist.broadcast_object_list(sent, 1)
            assert sent == [{"rank": 1}]
            dist.destroy_process_group()

        if __name__ == "__main__":
            mp.spawn(rank, (sys.argv[1],), 2)
        """
    device = virtual_gpu(devices=2)
    device.run(script, device.folder)


def test_one_process_is_a_rank_of_many_over_the_nccl_stand_in(virtual_gpu):
    def train():
        import torch
        import torch.distributed as dist

        torch.zeros(1, device="cuda")
        before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=8)
        parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[0])
        parallel(torch.randn(4, 64, device="cuda")).sum().backward()
        parts = [torch.zeros(1, device="cuda") for _ in range(8)]
        dist.all_gather(parts, torch.tensor([5.0]).cuda())
        assert [part.item() for part in parts] == [5.0] * 8
        print(before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved())

    assert virtual_gpu(nccl_buffers="100MiB").run(train).stdout == f"{100 << 20}\n"
    assert virtual_gpu().run(train).stdout == "0\n"  # how much they take is not known


def test_a_group_split_off_has_its_own_number_of_ranks(virtual_gpu):
    def split():
        import torch
        import torch.distributed as dist

        device = torch.device("cuda:0")  # bound to it, PyTorch splits communicators instead of making new ones
        tells = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)
        if not tells and dist.distributed_c10d._process_group_color([0, 1]) != abs(hash((0, 1))) % 2**31:
            print("with this torch: the colour does not tell the ranks")
            return
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=64, device_id=device)
        groups = [[0], [0, 8, 16, 24, 32, 40, 48, 56], [0, 1, 2, 3], [0, 1, 16, 17, 32, 33, 48, 49]]
        ways = [lambda ranks: dist.new_group(ranks)]
        if tells:
            groups.append([0, 3, 5, 17, 63])
            ways.append(lambda ranks: dist.split_group(split_ranks=[ranks]))
        own = torch.tensor([5.0], device=device)
        for ranks in groups:
            for way in ways:
                gathered = torch.full((64,), 7.0).to(device)
                group = way(ranks)
                dist.all_gather_into_tensor(gathered[: len(ranks)], own, group=group)
                assert gathered.tolist() == [5.0] * len(ranks) + [7.0] * (64 - len(ranks)), ranks
                assert (group.rank(), group.size()) == (0, len(ranks))
        print(len(groups) * len(ways))

    ran = virtual_gpu().run(split, env={"VGPU_TRACE": "1"})
    if ran.stdout.startswith("with this torch"):
        pytest.skip(ran.stdout.strip())
    assert ran.stderr.count("ncclCommSplit of 64 ranks by 0") == int(ran.stdout)


def test_the_colour_tells_the_ranks_of_a_split_or_it_fails_by_name(virtual_gpu):
    def ask():
        import ctypes
        import itertools

        class Id(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_char * 128),)

        nccl = ctypes.CDLL(None)

        def split(world, rank, ranks):
            whole, part, size, place = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            assert nccl.ncclCommInitRank(ctypes.byref(whole), world, Id(), rank) == 0
            colour, key = -1, 0
            if rank in ranks:
                colour, key = abs(hash(tuple(ranks))) % 2**31, ranks.index(rank)
            status = nccl.ncclCommSplit(whole, colour, key, ctypes.byref(part), None)
            if part:
                nccl.ncclCommCount(part, ctypes.byref(size))
                nccl.ncclCommUserRank(part, ctypes.byref(place))
                assert (size.value, place.value) == (len(ranks), key)
            assert bool(part) == (status == 0 and rank in ranks)
            return status

        for size in range(1, 9):
            assert not any(split(8, 5, ranks) for ranks in itertools.combinations(range(8), size))
        assert split(512, 37, range(5, 512, 8)) == 0
        assert split(512, 37, [16 * i + j for i in range(32) for j in range(4, 8)]) == 0
        assert split(512, 37, [1, 37, 40, 400]) == 5

    said = "ncclCommSplit into ranks that the colour does not tell is not supported"
    assert said in virtual_gpu().run(ask).stderr


def test_uploads_of_zeros_are_not_made_resident_and_still_overwrite_what_was_there(virtual_gpu):
    def upload():
        import resource

        import torch

        torch.ones(1, device="cuda")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        untouched = torch.empty(256 << 20, dtype=torch.uint8).to("cuda")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
        assert not untouched[: 1 << 20].cpu().any()
        there = torch.full((1 << 20,), 7, dtype=torch.uint8).to("cuda")
        there[4097:].copy_(torch.zeros((1 << 20) - 4097, dtype=torch.uint8))
        back = there.cpu()
        assert (back[:4097] == 7).all()
        assert not back[4097:].any()

    virtual_gpu().run(upload)


@pytest.mark.parametrize("device", ["a100-40", "b200", "l4", "rtx3090", "rtx4090", "rtx5090", "t4", "v100-16"])
def test_kernels_run_that_the_wheel_has_for_the_device_and_no_others(virtual_gpu, device):
    """CUB picks its code by the architecture a kernel was built for. No device of its own is built for a 4090."""

    def sort():
        import pytest
        import torch

        major, minor = torch.cuda.get_device_capability()
        built = [divmod(int(name.removeprefix("sm_")), 10) for name in torch.cuda.get_arch_list() if name[:3] == "sm_"]
        runs = any(major == m and minor >= n for m, n in built)
        if not runs:
            with pytest.raises(RuntimeError, match="no kernel image is available for execution on the device"):
                torch.randn(3000, device="cuda")
            return
        x = torch.randn(3000, device="cuda", requires_grad=True)
        assert torch.sort(x)[1].shape == torch.cumsum(x, 0).shape
        torch.unique(torch.zeros(100, device="cuda"))
        x[torch.zeros(5000, dtype=torch.long, device="cuda")].sum().backward()
        assert x.grad.shape == x.shape

    virtual_gpu(profile=device).run(sort)


def test_all_is_true_so_that_what_checks_values_goes_on(virtual_gpu):
    """torch.distributions raises where a check is not true of all values; SAC and PPO cannot run without them."""

    def check():
        import torch

        values = torch.randn(4, 3, device="cuda")
        assert bool(torch.isfinite(values).all())
        assert bool((values > 7).all(dim=0).all())
        assert bool(values.sum().isfinite())  # one element: no reduction
        assert bool(torch.isfinite(values.sum()).all())
        assert not bool(values.sum().isnan())
        assert not bool(values.sum() > 7)
        assert not bool(torch.isnan(values).any())
        assert not (values > 7).all(dim=0).sum().item()
        assert torch.tensor([False]).cuda()[0].item() is False
        torch.distributions.Normal(values, values).rsample()
        torch.distributions.Categorical(logits=values).sample()

    virtual_gpu().run(check)
