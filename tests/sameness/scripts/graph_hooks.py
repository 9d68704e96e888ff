# same: cases=saved,multi,names,anomaly,tensor,retain,accumulate,inference
"""The user's own hooks into autograd."""

import torch
from same import bits, case, device, tell, watch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
calls = []


def pack(tensor):
    calls.append(("pack", list(tensor.shape)))
    return tensor


def unpack(tensor):
    calls.append(("unpack", list(tensor.shape)))
    return tensor


def walk(function, depth=0):
    if function is None or depth > 8:
        return []
    return [
        f"{depth} {type(function).__name__}",
        *(line for f, _ in function.next_functions for line in walk(f, depth + 1)),
    ]


for step in range(16):
    x = torch.ones(4, 8, device=device)
    if case == "saved":
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x).square().mean()
    elif case == "inference":
        with torch.inference_mode():
            tell("inference", [model(x).is_inference(), model(x).requires_grad])
        loss = model(x).square().mean()
    else:
        loss = model(x).square().mean()
    if case == "names":
        tell("graph", walk(loss.grad_fn))
        loss.grad_fn.register_prehook(lambda grads: calls.append("prehook"))
        loss.grad_fn.register_hook(lambda inputs, outputs: calls.append("hook"))
        tell("saved", [name for name in dir(loss.grad_fn) if name.startswith("_saved")])
    elif case == "multi":
        torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda grads: calls.append(len(grads)))
    elif case == "tensor":
        loss.register_hook(lambda g: calls.append("loss"))
        tell("hooks", [len(loss._backward_hooks), loss.retains_grad])
    elif case == "retain":
        hidden = model[0](x)
        hidden.retain_grad()
        (hidden.sum() + loss).backward(retain_graph=True)
        tell("retained", [hidden.grad is not None, hidden.retains_grad])
    elif case == "accumulate" and step == 0:
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: calls.append(name))
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"after {name}"))
    with torch.autograd.detect_anomaly(check_nan=False) if case == "anomaly" and step < 2 else torch.enable_grad():
        loss.backward(retain_graph=case == "retain")
    if case == "retain":
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell("calls", calls)
    calls.clear()
    tell("loss", bits(loss))
    if case == "saved":
        try:
            loss.backward()
        except RuntimeError as error:
            tell("error", str(error))
    try:
        with torch.no_grad():
            model[0].weight.add_(0)
        y = torch.exp(model(x))
        y.add_(1)
        y.sum().backward()
    except RuntimeError as error:
        tell("in place", str(error))
    optimizer.zero_grad()
