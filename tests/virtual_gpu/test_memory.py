"""What the allocator, the driver and NVML say about memory on virtual devices, to the byte."""

from __future__ import annotations


def test_an_mlp_holds_exactly_its_bytes_at_the_end_of_each_phase(virtual_gpu):
    def train():
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
        print(torch.cuda.memory_allocated())
        torch.optim.AdamW(model.parameters())

    assert virtual_gpu(devices=1).run(train).stdout.split() == ["33574912"]
