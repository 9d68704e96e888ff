# same: cases=plain,own_hook,padding,encoder,nested
"""nn.TransformerEncoderLayer's fused path in evaluation: which operators run, and the bits they return."""

import collections

import torch
from same import bits, case, device, tell, watch
from torch import nn
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
many = case in ("encoder", "nested", "padding")
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=case == "nested") if many else layer
model = model.to(device)
if case == "own_hook":
    model.register_forward_hook(lambda module, args, output: None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
watch(model, optimizer)
x = torch.randn(4, 6, 32).to(device)
padding = torch.zeros(4, 6, dtype=torch.bool)
padding[1, 4:] = padding[2, 3:] = True
keys = {"src_key_padding_mask": padding.to(device)} if case in ("padding", "nested") else {}
for epoch in range(3):
    model.train()
    for _ in range(4):
        model(x, **keys).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        output = model(x, **keys)
    counts = collections.Counter(event.name for event in profiled.events())
    tell("operators", sorted(counts.items()))
    tell("output", bits(output))
    with torch.inference_mode():
        tell("inference", bits(model(x, **keys)))
