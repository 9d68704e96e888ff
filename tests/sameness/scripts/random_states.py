# same: cases=plain,generators,accumulation
"""Random numbers: every generator's state at the end, and each loss to the last bit."""

import hashlib
import random

import numpy
import torch
from same import bits, case, device, tell, watch
from torch import nn

random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
watch(model, optimizer)
generator = torch.Generator().manual_seed(7)
local = numpy.random.default_rng(3)
kept = []
for step in range(40):
    for part in range(3 if case == "accumulation" else 1):
        x = torch.randn(8, 16, generator=generator if case == "generators" else None).to(device)
        loss = model(x).square().mean() / 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(loss)
    tell("loss", loss.item().hex())
    tell("others", [random.random(), numpy.random.rand(), local.random()])
for name, value in model.state_dict().items():
    tell(name, bits(value))
for state in optimizer.state.values():
    tell("state", {key: bits(value) for key, value in sorted(state.items())})
tell("python", hashlib.sha256(repr(random.getstate()).encode()).hexdigest())
tell("numpy", hashlib.sha256(repr(numpy.random.get_state()).encode()).hexdigest())
tell("torch", bits(torch.get_rng_state()))
tell("generator", bits(generator.get_state()))
if device == "cuda":
    tell("cuda", bits(torch.cuda.get_rng_state()) and torch.cuda.get_rng_state().tolist()[:16])
    tell("offset", torch.cuda.default_generators[0].get_offset())
