# same: needs=debugpy; command=-Xfrozen_modules=off -m debugpy --listen 127.0.0.1:0; cases=listens,breaks; on=cpu
"""A training script under debugpy, with nobody attached."""

import sys

import torch
from same import bits, case, device, tell, watch

torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
tell("debugged", ["debugpy" in sys.modules, type(sys.gettrace()).__name__])
kept = []
for _ in range(30):
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(loss)
    if case == "breaks":
        import debugpy

        debugpy.is_client_connected()
        debugpy.breakpoint() if debugpy.is_client_connected() else None
tell("loss", bits(loss))
if case == "breaks":
    raise ValueError("at the end")
