"""The CPU as a device: the resident memory, and, on request, every live storage."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from gpumon_agent.allocator.cpu import CpuProbe, StorageTracker, resident_bytes
from gpumon_agent.attribution.inventory import Inventory


@pytest.fixture
def tracker():
    tracker = StorageTracker()
    tracker.start()
    yield tracker
    tracker.stop()


def test_without_a_tracker_only_the_resident_memory_is_known():
    reading = CpuProbe().boundary(0)
    assert reading.allocated is reading.allocated_peak is reading.requested is None
    assert reading.rss is not None
    block = bytearray(64 * 2**20)
    assert resident_bytes() - reading.rss > 60 * 2**20
    del block


def test_storages_are_counted_exactly_with_their_peak(tracker):
    before = tracker.window()[0]
    a = torch.zeros(1000)
    b = a + 1
    view = b[10:]
    del a
    c = b.double()
    allocated, peak, _ = tracker.window()
    assert allocated - before == 4000 + 8000
    assert peak - before == 4000 + 8000
    del b, c
    assert tracker.window()[:2] == (before + 4000, before + 12000)
    del view
    assert tracker.window()[0] == before


def test_a_resized_storage_counts_as_it_is(tracker):
    before = tracker.window()[0]
    tensor = torch.zeros(10)
    tensor.resize_(1000)
    assert tracker.window()[0] - before == 4000


def test_a_training_step_equals_what_its_owners_hold(tracker):
    before = tracker.window()[0]
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    inventory = Inventory()
    inventory.watch(model, [optimizer])
    for _ in range(2):
        batch = torch.randn(4, 64)
        inventory.inputs(batch)
        model(batch).sum().backward()
        optimizer.step()
        assert tracker.window()[0] - before == sum(inventory.owners(torch.device("cpu")))


def test_the_first_torch_compile_ends_the_tracking_and_compiles(tracker):
    probe = CpuProbe(tracker)
    assert probe.boundary(0).allocated is not None
    compiled = torch.compile(nn.Linear(4, 4), backend="eager", fullgraph=True)
    compiled(torch.zeros(1, 4))
    assert probe.boundary(0).allocated is None


def test_stop_leaves_neither_mode_nor_wrapper():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    compile = torch.compile
    tracker = StorageTracker()
    tracker.start()
    tracker.stop()
    assert torch.compile is compile
    assert _get_current_dispatch_mode() is None


TRAIN = """
import json, sys, torch
from torch import nn
sys.path.insert(0, {folder!r})
if {tracked}:
    from gpumon_agent.allocator.cpu import StorageTracker
    StorageTracker().start()
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1))
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)
    def forward(self, x):
        y = self.conv(x).flatten(2).transpose(1, 2)
        return self.head(self.attention(self.rnn(y)[0])).mean(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
losses = []
for step in range(5):
    with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 1):
        loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 4, (4,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
total = sum(p.double().sum().item() for p in model.parameters()).hex()
print(json.dumps([losses, total, torch.get_rng_state().sum().item()]))
"""


def test_results_are_bit_identical_with_the_tracker():
    import gpumon_agent

    folder = str(__import__("pathlib").Path(gpumon_agent.__file__).parent.parent)

    def results(tracked):
        text = textwrap.dedent(TRAIN).format(folder=folder, tracked=tracked)
        return json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)

    assert results(True) == results(False)
