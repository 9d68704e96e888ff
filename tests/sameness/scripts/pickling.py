# same: cases=model,optimizer,saved,loss,copies
"""Pickles, copies and saved files: their sizes, and everything in them."""

import copy
import io
import pickle

import torch
from same import case, device, tell, watch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def hook(module, args, output):
    return None


torch.manual_seed(0)
model = Net().to(device)
if case != "model":  # a hook's number, which is pickled, counts all hooks of the process
    model.register_forward_hook(hook)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
watch(model, optimizer)
for step in range(12):
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 4 != 1:
        continue
    if case == "model":
        data = pickle.dumps(model)
        tell("model", len(data))  # not its bytes: torch pickles the address of each storage
        tell("reduced", [sorted(model.__reduce_ex__(2)[2]), len(model._forward_hooks)])
        again = pickle.loads(data)
        tell("again", [type(again._forward_hooks).__name__, len(again._forward_hooks), sorted(vars(again))])
    elif case == "optimizer":
        data = pickle.dumps(optimizer)
        tell("optimizer", [len(data), sorted(vars(optimizer)), sorted(optimizer.__getstate__())])
        tell("hooks", [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)])
        tell("scheduler", [len(pickle.dumps(scheduler.state_dict())), sorted(vars(scheduler))])
        tell("copy", sorted(vars(copy.deepcopy(optimizer))))
    elif case == "saved":
        for what in (model, model.state_dict(), optimizer.state_dict(), optimizer):
            buffer = io.BytesIO()
            torch.save(what, buffer)
            tell("saved", len(buffer.getvalue()))
            buffer.seek(0)
            again = torch.load(buffer, weights_only=False, map_location=device)
            tell("loaded", type(again).__name__)
    elif case == "loss":
        tell(
            "loss", [sorted(vars(loss)) if hasattr(loss, "__dict__") else None, repr(type(loss.grad_fn)), loss._version]
        )
        tell("functions", [type(f[0]).__name__ for f in loss.grad_fn.next_functions])
        tell("metadata", [repr(loss.grad_fn.metadata), loss._backward_hooks, model.a.weight._backward_hooks])
        tell("parameter", [sorted(vars(model.a.weight)), model.a.weight._post_accumulate_grad_hooks])
    else:
        shallow, deep = copy.copy(model), copy.deepcopy(model)
        tell("deep", [type(deep._forward_hooks).__name__, len(deep._forward_hooks), sorted(vars(deep))])
        tell("shallow", [shallow._forward_hooks is model._forward_hooks, sorted(vars(shallow))])
        deep(torch.ones(2, 8, device=device)).sum().backward()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        tell("averaged", [repr(averaged), sorted(averaged.state_dict())])
        del shallow, deep, averaged
