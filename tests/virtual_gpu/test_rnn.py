"""cuDNN's recurrent networks: their weights lie in one buffer of the right size, and training takes what it must."""

from __future__ import annotations

import json

import pytest

TRAINS = """
import json, sys
import torch

kind, options = sys.argv[1], json.loads(sys.argv[2])
rnn = getattr(torch.nn, kind)(24, 32, **options)
numbers = [p.numel() for p in rnn.parameters()]
rnn.cuda()
one = {p.untyped_storage().data_ptr() for p in rnn.parameters()}
buffer = next(rnn.parameters()).untyped_storage().nbytes()
places = sorted((p.storage_offset(), p.numel()) for p in rnn.parameters())
x = torch.ones(7, 5, 24, device="cuda", requires_grad=True)
before = torch.cuda.memory_allocated()
output, _ = rnn(x)
kept = torch.cuda.memory_allocated() - before
output.sum().backward()
grads = all(p.grad is not None and p.grad.shape == p.shape for p in rnn.parameters())
with torch.no_grad():
    rnn(x)
print(json.dumps({"numbers": sum(numbers), "buffers": len(one), "bytes": buffer, "places": places, "kept": kept,
                  "output": output.untyped_storage().nbytes(), "grads": grads, "x": tuple(x.grad.shape)}))
"""


def trained(virtual_gpu, kind, **options):
    done = virtual_gpu().run(TRAINS, kind, json.dumps(options))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 3, "bidirectional": True}, {"num_layers": 2, "dropout": 0.5}])
def test_weights_lie_in_one_buffer_and_training_runs(virtual_gpu, kind, options):
    told = trained(virtual_gpu, kind, **options)
    assert (told["buffers"], told["bytes"]) == (1, 4 * told["numbers"])
    ends = [offset + count for offset, count in told["places"]]
    assert [0, *ends] == [offset for offset, _ in told["places"]] + [told["numbers"]]
    assert told["grads"]
    assert told["x"] == [7, 5, 24]
    gates = {"RNN": 1, "GRU": 3 + 1, "LSTM": 4 + 1}[kind]
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    assert told["kept"] >= told["output"] + 4 * 7 * 5 * 32 * gates * layers


def test_a_projection_is_a_part_of_the_weights(virtual_gpu):
    told = trained(virtual_gpu, "LSTM", num_layers=2, proj_size=8)
    assert (told["buffers"], told["bytes"], told["grads"]) == (1, 4 * told["numbers"], True)
