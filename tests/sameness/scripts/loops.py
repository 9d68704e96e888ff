# same: cases=accumulation,scaler,lbfgs,in_backward,gan,checkpointing,clipping,twice,grad_penalty,several_losses,fused,sparse,ema,graph_kept,functional
"""Training loops of many kinds: losses, parameters, memory."""

import torch
from same import allocated, bits, case, device, tell, watch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        x = checkpoint(self.b, x, use_reentrant=False) if case == "checkpointing" else self.b(x)
        return self.c(torch.tanh(x))


model = Net().to(device)
parameters = list(model.parameters())
if case == "lbfgs":
    optimizer = torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe" if device == "cpu" else None)
elif case == "fused":
    optimizer = torch.optim.AdamW(parameters, fused=True)
else:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
watch(model, optimizer)
if case == "in_backward":
    each = {p: torch.optim.SGD([p], lr=0.1) for p in parameters}

    def update(p):
        each[p].step()
        each[p].zero_grad()

    for p in parameters:
        p.register_post_accumulate_grad_hook(update)
other = Net().to(device)
other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
table = nn.Embedding(10, 16, sparse=True).to(device)
table_optimizer = torch.optim.SparseAdam(table.parameters())
scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=4)
average = torch.optim.swa_utils.AveragedModel(model)
kept_graphs = []
for step in range(20):
    x = torch.randn(8, 16).to(device)
    if case == "lbfgs":

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            tell("closure", bits(loss))
            return loss

        loss = optimizer.step(closure)
    elif case == "scaler":
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss * (float("inf") if step == 7 else 1)).backward()
        scaler.unscale_(optimizer)
        tell("stepped", scaler.step(optimizer))
        scaler.update()
        tell("scale", scaler.state_dict())
    elif case == "gan":
        fake = model(x)
        loss = fake.square().mean()
        (other(torch.cat([fake.detach()] * 4, 1)).square().mean()).backward()
        other_optimizer.step()
        loss.backward()
        optimizer.step()
        other_optimizer.zero_grad()
    elif case == "grad_penalty":
        x.requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = output.square().mean() + gradient.square().mean()
        loss.backward()
        optimizer.step()
    elif case == "several_losses":
        output = model(x)
        loss = output.square().mean()
        torch.autograd.backward([loss, output.abs().mean()], retain_graph=True)
        loss.backward()
        optimizer.step()
    elif case == "twice":
        loss = model(x).square().mean() + model(x * 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.step()
    elif case == "sparse":
        loss = model(table(torch.arange(8, device=device))).square().mean()
        loss.backward()
        optimizer.step()
        table_optimizer.step()
        table_optimizer.zero_grad()
    elif case == "graph_kept":
        loss = model(x).square().mean()
        kept_graphs.append(model(x).sum())
        loss.backward()
        optimizer.step()
    elif case == "functional":
        loss = torch.func.functional_call(model, dict(model.named_parameters()), (x,)).square().mean()
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        optimizer.step()
    else:
        for part in x.chunk(2 if case == "accumulation" else 1):
            loss = model(part).square().mean()
            loss.backward()
        if case == "clipping":
            tell("norm", bits(nn.utils.clip_grad_norm_(parameters, 0.1)))
        if case != "in_backward":
            optimizer.step()
        if case == "ema":
            average.update_parameters(model)
    optimizer.zero_grad()
    tell("loss", bits(loss))
    if case != "functional":  # autograd.grad's thread may let go of the last tensors after its caller is back
        tell("allocated", allocated())
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            tell("evaluated", bits(model(x)))
        model.train()
for name, value in model.state_dict().items():
    tell(name, bits(value))
