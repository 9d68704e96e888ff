# same: on=cuda; cases=pool,graph,streams,fraction,pinned,graphed,events
"""Memory pools, CUDA graphs, streams, limits."""

import torch
from same import case, device, tell, watch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if case == "graphed":
    model = torch.cuda.make_graphed_callables(model, (torch.ones(16, 64, device=device),))
watch(model, optimizer)


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def figures(name):
    found = torch.cuda.memory_stats()
    if case == "graphed":  # bare too, half of the runs split one block more: two threads free, in any order
        found = {key: count for key, count in found.items() if not key.startswith("inactive_split.")}
    tell(name, sorted(found.items()))


x = torch.ones(16, 64, device=device)
for _ in range(6):
    step(x)
figures("plain")
if case == "pool":
    pool = torch.cuda.MemPool()
    for _ in range(3):
        with torch.cuda.use_mem_pool(pool):
            kept = torch.ones(1000, device=device)
            step(x)
        figures("pool")
    tell("pool", [pool.use_count(), len(pool.snapshot())])
    del kept, pool
    figures("after")
elif case == "graph":
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    for _ in range(10):
        graph.replay()
        figures("replay")
    tell("pool", type(graph.pool()).__name__)
    graph.reset()
    figures("reset")
elif case == "streams":
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(8):
        with torch.cuda.stream(streams[i % 2]):
            step(x)
        x.record_stream(streams[i % 2])
        figures("stream")
    torch.cuda.synchronize()
elif case == "fraction":
    torch.cuda.set_per_process_memory_fraction(0.5)
    for _ in range(4):
        step(x)
    tell(
        "fraction",
        [
            torch.cuda.get_per_process_memory_fraction()
            if hasattr(torch.cuda, "get_per_process_memory_fraction")
            else None
        ],
    )
    tell("info", torch.cuda.mem_get_info())
elif case == "pinned":
    host = torch.ones(16, 64).pin_memory()
    for _ in range(6):
        step(host.to(device, non_blocking=True))
    if hasattr(torch.cuda, "host_memory_stats"):
        tell("host", sorted((k, v) for k, v in torch.cuda.host_memory_stats().items() if "time" not in k))
elif case == "events":
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    step(x)
    b.record()
    b.synchronize()
    tell("events", [a.query(), b.query()])
    tell(
        "stream",
        [torch.cuda.current_stream().stream_id, torch.cuda.current_device(), torch.cuda.is_current_stream_capturing()],
    )
for _ in range(6):
    step(x)
figures("end")
