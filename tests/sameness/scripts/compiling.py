# same: cases=function,module,in_place,fullgraph,breaks,recompiles,backward,optimizer,explain,error; on=cpu
"""torch.compile: graphs, recompiles, reasons of graph breaks, results."""

import torch
import torch._dynamo
from same import bits, case, device, tell, watch
from torch import nn
from torch._dynamo.utils import counters

torch.manual_seed(0)
graphs = []


def backend(graph, inputs):
    graphs.append(str(graph.graph))
    return graph.forward


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.a(x))
        if case in ("breaks", "explain", "error"):
            torch._dynamo.graph_break()
        return self.b(x)


model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = model
watch(model, optimizer)
if case in ("module", "breaks", "recompiles"):
    compiled = torch.compile(model, backend=backend)
elif case in ("fullgraph", "error"):
    compiled = torch.compile(model, backend=backend, fullgraph=True)
elif case == "in_place":
    model.compile(backend=backend)
elif case == "explain":
    told = torch._dynamo.explain(model)(torch.ones(4, 8))
    tell("explained", [told.graph_count, told.graph_break_count, [str(reason.reason) for reason in told.break_reasons]])
    tell("guards", len(told.out_guards))


def step(x):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


if case in ("function", "backward"):
    step = torch.compile(step, backend=backend)
elif case == "optimizer":
    update = torch.compile(optimizer.step, backend=backend, fullgraph=False)

sizes = (4, 4, 6, 7, 4) if case == "recompiles" else (4,) * 5
for size in sizes:
    if case == "optimizer":
        model(torch.ones(size, 8)).square().mean().backward()
        update()
        optimizer.zero_grad()
        continue
    try:
        tell("loss", step(torch.ones(size, 8)).item().hex())
    except torch._dynamo.exc.Unsupported as error:
        tell("error", str(error))
compiled.eval()
with torch.no_grad():
    tell("evaluated", bits(compiled(torch.ones(4, 8))) if case != "error" else None)
tell("graphs", graphs)
if case in ("function", "backward", "optimizer"):
    # With a hook for all optimizers, anybody's, torch looks at one frame fewer (Optimizer._optimizer_step_code, which is
    # empty). Graphs, reasons and results are the same.
    counters["frames"].clear()
tell("counters", {name: sorted(counts.items()) for name, counts in sorted(counters.items())})
tell("compiled in", [type(compiled).__name__, list(vars(compiled))[:20]])
