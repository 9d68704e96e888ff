"""Each thing the README says the virtual GPU does not do fails by name, in torch's error and on stderr."""

from __future__ import annotations

import json
from pathlib import Path

from gpumon import virtual_gpu as vgpu

README = Path(vgpu.__file__).parent / "README.md"


def test_what_is_not_supported_says_its_name_and_torch_raises(virtual_gpu):
    def ask():
        import json

        import torch

        matrix = torch.randn(8, 8, device="cuda")
        asks = {
            "cuFFT": lambda: torch.fft.fft(matrix),
            "cuSOLVER": lambda: torch.linalg.inv(matrix),
            "cuSPARSE": lambda: torch.sparse.mm(torch.eye(8).to_sparse().cuda(), matrix),
            "cuDNN RNN": lambda: torch.nn.LSTM(8, 8).cuda()(matrix[None]),
            "CUDA IPC": lambda: matrix.untyped_storage()._share_cuda_(),
        }
        raised = {}
        for name, call in asks.items():
            try:
                call()
                raised[name] = ""
            except RuntimeError as error:
                raised[name] = str(error).splitlines()[0]
        print(json.dumps(raised))

    ran = virtual_gpu().run(ask)
    raised = json.loads(ran.stdout)
    assert all(raised.values()), raised
    said = [line.split()[2] for line in ran.stderr.splitlines() if line.endswith(" is not supported")]
    for function in (
        "cufftCreate",
        "cusolverDnCreate",
        "cusparseCreate",
        "cudnnCreateRNNDescriptor",
        "cudaIpcGetMemHandle",
    ):
        assert said.count(function) == 1, ran.stderr
    text = README.read_text()
    for name in raised:
        assert name in text


def test_the_profiler_goes_on_without_the_device(virtual_gpu):
    def profile():
        import torch
        from torch.profiler import ProfilerActivity

        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            torch.ones(8, device="cuda").add_(1)
        assert any(event.key == "aten::add_" for event in profiler.key_averages())
        assert all(event.device_type == torch.autograd.DeviceType.CPU for event in profiler.events())

    virtual_gpu().run(profile)
    assert "profiler" in README.read_text()


def test_kernels_take_no_time_and_convolutions_no_workspace(virtual_gpu):
    def convolve():
        import torch

        image = torch.empty(2, 3, 64, 64, device="cuda")
        layer = torch.nn.Conv2d(3, 8, 3, bias=False).cuda()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            result = layer(image)
        assert torch.cuda.max_memory_allocated() - before == (result.nbytes + 511) // 512 * 512

    virtual_gpu().run(convolve)
    text = README.read_text()
    assert "cuDNN workspaces" in text
    assert "Time" in text
