# same: cases=attributes,counts,order,always,backward_hooks,global_hooks
"""The model's own face: repr, attributes, hook counts and order, global hooks."""

import torch
from same import case, device, tell, watch
from torch import nn
from torch.nn.modules import module as modules

torch.manual_seed(0)
calls = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, scale=1):
        return self.b(self.a(x)) * scale


def note(name):
    return lambda *_: calls.append(name)


def face(m):
    tell("repr", repr(m))
    tell("keys", list(vars(m)))
    tell("dir", len(dir(m)))
    tell("class", [type(m).__name__, type(m).__mro__[1].__name__, m.forward.__func__ is type(m).forward])
    tell(
        "names",
        [n for n, _ in m.named_modules()] + [n for n, _ in m.named_parameters()] + [n for n, _ in m.named_buffers()],
    )
    tell("state", list(m.state_dict()))
    for name, value in vars(m).items():
        if "hooks" in name:
            tell(f"len of {name}", len(value))
            tell(f"keys of {name}", [list(value.keys()), list(value), list(value.values())])
            tell(f"repr of {name}", repr(value).partition("(")[2])  # the class of the dict is the agent's own
            tell(f"equality of {name}", [value == {}, value != {}])
    tell("size", m.__sizeof__())


model = Net().to(device)
if case == "order":
    model.register_forward_pre_hook(note("pre, before the agent"))
    model.register_forward_hook(note("post, before the agent"))
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
if case == "order":
    model.register_forward_hook(note("post, appended"))
    model.register_forward_hook(note("post, first"), prepend=True)
    model.register_forward_pre_hook(note("pre, first"), prepend=True)
    handle = model.register_forward_pre_hook(note("pre, removed"))
    handle.remove()
    tell("ids", [len(model._forward_hooks), [type(k).__name__ for k in model._forward_hooks]])
elif case == "always":

    def fail(*_):
        calls.append("fails")
        raise ValueError("in a hook")

    model.register_forward_hook(note("always"), always_call=True)
    model.register_forward_hook(fail)
    tell("always", len(model._forward_hooks_always_called))
elif case == "backward_hooks":
    model.register_full_backward_pre_hook(note("backward pre"))
    model.register_full_backward_hook(note("backward"))
    model.a.register_full_backward_hook(note("backward of a"))
elif case == "global_hooks":
    modules.register_module_forward_pre_hook(note("global pre"))
    modules.register_module_forward_hook(note("global post"))
    modules.register_module_full_backward_hook(note("global backward"))
    modules.register_module_module_registration_hook(lambda m, n, s: calls.append(f"registered {n}"))
for step in range(6):
    try:
        model(torch.ones(4, 8, device=device), scale=2).square().mean().backward()
    except ValueError as error:
        tell("error", str(error))
    optimizer.step()
    optimizer.zero_grad()
    tell("calls", calls)
    calls.clear()
    if case == "attributes":
        face(model)
        face(model.a)
if case == "counts":
    total = 0
    for name in vars(modules):
        value = getattr(modules, name)
        if name.startswith("_global") and hasattr(value, "__len__"):
            total += len(value)
            if "registration" not in name:
                tell(name, [len(value), bool(value)])
    # one hook of ours is registered by torch's own method: docs/what-is-replaced.md
    hooks = {n: len(v) for n, v in vars(optimizer).items() if "hook" in n}
    tell("optimizer", {n: count for n, count in hooks.items() if n != "_optimizer_load_state_dict_pre_hooks"})
    tell("model", {n: len(v) for n, v in vars(model).items() if "hook" in n and hasattr(v, "__len__")})
if case == "global_hooks":
    model.c = nn.Linear(2, 2)
    tell("calls", calls)
model.a.requires_grad_(False)
model.half().float()
model.apply(lambda m: calls.append(type(m).__name__))
tell("applied", calls)
