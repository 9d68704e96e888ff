"""Over NCCL the ranks of a session send each other what is small and known, and wait where ranks on devices would."""

from __future__ import annotations

import re
import textwrap
import time
from pathlib import Path

import pytest

RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def rank(number, ranks, folder):
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=number, world_size=ranks)
BODY
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank, (int(sys.argv[1]), sys.argv[2]), int(sys.argv[1]))
"""


def script(body: str) -> str:
    return RANKS.replace("BODY", textwrap.indent(textwrap.dedent(body), "    "))


def messages(session: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if f".{session}+" in path.name]


OBJECTS = script("""
        own = {"rank": number, "text": "x" * 1000 * number, "numbers": list(range(number))}
        everybody = [{"rank": i, "text": "x" * 1000 * i, "numbers": list(range(i))} for i in range(ranks)]
        for turn in range(2):
            found = [None] * ranks
            dist.all_gather_object(found, own)
            assert found == everybody, found
            for root in range(ranks):
                found = [None] * ranks if number == root else None
                dist.gather_object(own, found, root)
                assert found == (everybody if number == root else None), found
                several = [own, "two", number] if number == root else [None] * 3
                dist.broadcast_object_list(several, root)
                assert several == [everybody[root], "two", root], several
                one = [own] if number == root else [None]
                dist.broadcast_object_list(one, root)
                assert one == [everybody[root]], one
                part = [None]
                dist.scatter_object_list(part, everybody if number == root else None, root)
                assert part == [everybody[number]], part
        if number == 0:
            dist.send_object_list(["for", {"rank": 1}], 1)
        if number == 1:
            found = [None, None]
            assert dist.recv_object_list(found, 0) == 0
            assert found == ["for", {"rank": 1}], found
        half = dist.new_group(list(range(ranks // 2)))  # of two ranks: one, alone
        again = dist.new_group(list(range(ranks // 2)))
        for group in (half, again, half):
            if number < ranks // 2:
                found = [None] * (ranks // 2)
                dist.all_gather_object(found, number, group=group)
                assert found == list(range(ranks // 2)), found
        large = ["y" * (7 << 20)] if number == 1 else [None]
        dist.broadcast_object_list(large, 1)
        assert large == ["y" * (7 << 20)]
""")


@pytest.mark.parametrize("ranks", [2, 4])
def test_objects_of_other_ranks_arrive(virtual_gpu, ranks):
    device = virtual_gpu(devices=ranks)
    device.run(OBJECTS, ranks, device.folder)
    assert messages(device.environment["VGPU_SESSION"]) == []  # each was read and removed


TENSORS = script("""
        def up(*numbers, dtype=torch.int64):
            return torch.tensor(numbers, dtype=dtype).cuda()

        def is_(tensor, *numbers):
            assert tensor.tolist() == list(numbers), (tensor, numbers)

        everybody = list(range(1, ranks + 1))
        for dtype in (torch.int32, torch.int64, torch.float32, torch.float64, torch.uint8):
            ops = [(dist.ReduceOp.SUM, sum(everybody)), (dist.ReduceOp.MAX, ranks), (dist.ReduceOp.MIN, 1)]
            if dtype.is_floating_point:
                ops.append((dist.ReduceOp.AVG, sum(everybody) / ranks))
            for op, expected in ops:
                tensor = up(number + 1, 2 * number + 2, number + 1, dtype=dtype)
                dist.all_reduce(tensor, op=op)
                is_(tensor, expected, 2 * expected, expected)
            parts = [up(0, dtype=dtype) for _ in range(ranks)]
            dist.all_gather(parts, up(number + 1, dtype=dtype))
            assert [part.item() for part in parts] == everybody
        tensor = up(number, 7)
        dist.broadcast(tensor, ranks - 1)
        is_(tensor, ranks - 1, 7)
        tensor = up(number + 1)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)  # of what is on its way
        is_(tensor, ranks * sum(everybody))
        tensor = up(number + 1)
        dist.reduce(tensor, 0)
        if number == 0:
            is_(tensor, sum(everybody))
        parts = [up(*[9] * (i + 1)) for i in range(ranks)]
        dist.all_gather(parts, up(*[number] * (number + 1)))  # of unequal length
        for i, part in enumerate(parts):
            is_(part, *[i] * (i + 1))
        into = up(*[0] * ranks)
        dist.all_to_all_single(into, up(*[10 * number + i for i in range(ranks)]))
        is_(into, *[10 * i + number for i in range(ranks)])
        into = up(0)
        dist.reduce_scatter_tensor(into, up(*[10 * number + i for i in range(ranks)]))
        is_(into, sum(10 * i + number for i in range(ranks)))
        sent = up(number)
        got = up(-1)
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, (number + 1) % ranks), dist.P2POp(dist.irecv, got, (number - 1) % ranks),
        ])
        [work.wait() for work in works]
        is_(got, (number - 1) % ranks)
        many = torch.full((1 << 20,), number + 1, dtype=torch.int32).cuda()
        dist.all_reduce(many)
        assert (many.cpu() == sum(everybody)).all()
        computed = up(number + 1) * 3
        dist.all_reduce(computed)
        assert computed.item() == 0  # as any number that a kernel should have written
        partly = up(number + 1) if number else up(number + 1) * 3
        dist.all_reduce(partly)
        copied = partly.clone()
        assert (copied.item(), partly.item()) == (0, 0)  # one rank's part is not known
        dist.broadcast(partly, ranks - 1)
        dist.broadcast(computed, 0)
        assert (partly.item(), computed.item()) == (0, 0)
""")


@pytest.mark.parametrize("ranks", [2, 4])
def test_small_tensors_that_were_uploaded_arrive(virtual_gpu, ranks):
    device = virtual_gpu(devices=ranks)
    device.run(TENSORS, ranks, device.folder)
    assert messages(device.environment["VGPU_SESSION"]) == []


def test_a_collective_does_not_wait_and_a_synchronization_does(virtual_gpu):
    body = """
        tensor = torch.tensor([number]).cuda()
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        if number:
            time.sleep(2)
        start = time.monotonic()
        work = dist.all_reduce(torch.ones(1 << 22, device="cuda"), async_op=True)  # nothing of it is moved
        queued = time.monotonic() - start
        torch.cuda.current_stream().synchronize()  # which does not depend on it yet
        other = time.monotonic() - start
        work.wait()
        torch.cuda.current_stream().synchronize()
        print(f"{number} {queued} {other} {time.monotonic() - start}", flush=True)
    """
    device = virtual_gpu(devices=2)
    ran = device.run(script(body), 2, device.folder)
    took = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in ran.stdout.splitlines()}
    assert took["0"][0] < 1, took
    assert took["0"][1] < 1, took
    assert took["0"][2] > 1.5, took
    assert took["1"][2] < 1, took


@pytest.mark.parametrize("how", ["ended", "late"])
def test_a_rank_that_does_not_come_releases_the_others_and_is_named(virtual_gpu, how):
    from gpumon.virtual_gpu import absence

    body = f"""
        tensor = torch.tensor([number]).cuda()
        dist.all_reduce(tensor)
        tensor.item()
        if number == 2:
            if {how == "ended"}:
                os._exit(0)
            while not os.path.exists(folder + "/done"):
                time.sleep(0.05)
        start = time.monotonic()
        for _ in range(5):
            dist.all_reduce(tensor)
            tensor.item()
        if number == 0:
            print(time.monotonic() - start)
            open(folder + "/done", "w")
    """
    device = virtual_gpu(devices=3, nccl_wait=60 if how == "ended" else 2)
    session = device.environment["VGPU_SESSION"]
    start = time.monotonic()
    ran = device.run(script(body), 3, device.folder)
    found = absence(session, device.python)
    assert found is not None
    assert (found.rank, found.ended) == (2, how == "ended")
    said = "rank 2 has ended" if how == "ended" else "rank 2 did not come within 2 s"
    assert len(re.findall(re.escape(f"[virtual GPU] {said}"), ran.stderr)) == 1
    assert time.monotonic() - start < 60
    if how == "late":
        assert 1.5 < float(ran.stdout) < 20  # once, and not for each collective


def test_ranks_that_nobody_could_be_are_not_waited_for(virtual_gpu):
    def alone():
        import time

        import torch
        import torch.distributed as dist

        start = time.monotonic()
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=8)
        tensor = torch.tensor([5]).cuda()
        dist.all_reduce(tensor)
        assert tensor.item() == 5
        assert time.monotonic() - start < 30

    from gpumon.virtual_gpu import absence

    device = virtual_gpu()
    device.run(alone)
    assert absence(device.environment["VGPU_SESSION"], device.python) is None
