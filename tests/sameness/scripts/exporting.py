# same: cases=strict,non_strict,fx,func,make_fx; on=cpu
"""torch.export, torch.fx and torch.func of a model that trains."""

import warnings

import torch
from same import bits, case, tell, watch
from torch import nn

warnings.simplefilter("ignore", DeprecationWarning)
warnings.simplefilter("ignore", FutureWarning)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


model = Net()
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
x = torch.randn(4, 8)


def step():
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell("loss", loss.item().hex())


for turn in range(2):
    for _ in range(3):
        step()
    if case in ("strict", "non_strict"):
        exported = torch.export.export(model, (x,), strict=case == "strict")
        tell("graph", str(exported.graph))
        tell("signature", str(exported.graph_signature))
        tell("state", sorted(exported.state_dict))
        tell("constants", sorted(exported.constants))
        tell("output", bits(exported.module()(x)))
    elif case == "fx":
        traced = torch.fx.symbolic_trace(model)
        tell("graph", str(traced.graph))
        tell("code", traced.code)
        tell("output", bits(traced(x)))
        tell("hooks", [len(traced._forward_hooks), len(traced._forward_pre_hooks)])
    elif case == "make_fx":
        from torch.fx.experimental.proxy_tensor import make_fx

        tell("graph", str(make_fx(model)(x).graph))
    else:
        from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(parameters, sample):
            return functional_call(model, parameters, (sample,)).square().mean()

        each = vmap(grad(loss_of), (None, 0))(parameters, x)
        tell("per sample", {name: bits(value) for name, value in sorted(each.items())})
        tell("jacobian", bits(jacrev(lambda sample: functional_call(model, parameters, (sample,)))(x[0])))
        several, buffers = stack_module_state([Net(), Net()])
        tell("stacked", [sorted(several), sorted(buffers)])
    step()
