# same: cases=shown,recorded,levels,once,error
"""Warnings: how many, with which file and line, and with a filter that makes errors of them."""

import warnings

import torch
from same import case, device, tell, watch
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
if case == "error":
    warnings.simplefilter("error")
elif case == "once":
    warnings.simplefilter("once")
elif case != "shown":
    warnings.simplefilter("always")


class Loud(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        for level in (1, 2, 3):
            warnings.warn(f"in a function's forward at level {level}", stacklevel=level)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        for level in (1, 2, 3):
            warnings.warn(f"in a function's backward at level {level}", stacklevel=level)
        return gradient * 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        for level in (1, 2, 3, 4, 5):
            warnings.warn(f"in forward at level {level}", stacklevel=level)
        x = Loud.apply(self.a(x))
        return self.b(x)


def say(message, category, filename, lineno, file=None, line=None):
    tell("shown", [str(message), category.__name__, filename.rpartition("/")[2], lineno])


def attempt(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Warning as warning:
        tell("raised", [type(warning).__name__, str(warning)])
        return None


if case == "levels":
    warnings.showwarning = say
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
model.register_full_backward_hook(lambda *_: warnings.warn("in a module's backward hook", stacklevel=2))
model.a.register_forward_hook(lambda *_: warnings.warn("in a forward hook", stacklevel=2))
model.register_load_state_dict_post_hook(lambda *_: warnings.warn("in a load hook", stacklevel=3))
optimizer.register_step_pre_hook(lambda *_: warnings.warn("in a step hook", stacklevel=2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
scaler = torch.amp.GradScaler(device, init_scale=2.0)


def train():
    attempt(scheduler.step)  # before the optimizer
    for _ in range(3):
        output = attempt(model, torch.ones(4, 8, device=device))
        if output is None:
            return
        output.register_hook(lambda gradient: warnings.warn("in a tensor's hook", stacklevel=1))
        loss = scaler.scale(output.square().mean())
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    attempt(scheduler.step, 7)
    state = model.state_dict()
    attempt(model.load_state_dict, state)
    attempt(lambda: output.grad)
    attempt(checkpoint, model.a, torch.ones(4, 8, device=device, requires_grad=True))
    attempt(checkpoint, model.a, torch.ones(4, 8, device=device), use_reentrant=True)
    attempt(torch.nn.functional.mse_loss, torch.ones(3, 1, device=device), torch.ones(3, device=device))
    attempt(torch.cuda.amp.autocast)
    attempt(lambda: torch.tensor(loss))
    torch.save(model.state_dict(), "model.pt")
    attempt(torch.load, "model.pt", weights_only=False)
    attempt(loss.backward, retain_graph=False) if False else None
    x = torch.ones(3, requires_grad=True, device=device)
    attempt((x * x).sum().backward, create_graph=True)


if case == "recorded":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    for each in caught:
        tell("caught", [str(each.message), each.category.__name__, each.filename.rpartition("/")[2], each.lineno])
else:
    train()
warnings.warn("at the end")
tell("registry", sorted(str(key) for key in globals().get("__warningregistry__", ())))
tell("filters", [str(each) for each in warnings.filters])
