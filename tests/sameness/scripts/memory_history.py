# same: cases=off,on,all,stacks,again; on=cuda
"""The user's memory history and snapshots, in a run that leaks."""

import collections
import pickle

import torch
from same import case, device, tell, watch

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
if case == "on":
    torch.cuda.memory._record_memory_history(max_entries=100_000)
elif case == "all":
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
elif case == "stacks":
    torch.cuda.memory._record_memory_history("state", context="alloc")
kept = []


def picture(step):
    snapshot = torch.cuda.memory._snapshot()
    tell("keys", sorted(snapshot))
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    tell(f"segments {step}", [(s["total_size"], s["allocated_size"], s["active_size"]) for s in snapshot["segments"]])
    tell(f"blocks {step}", [(b["size"], b["requested_size"], b["state"]) for b in blocks])
    tell(f"blocks with frames {step}", sum(bool(b.get("frames")) for b in blocks))
    names = sorted({f["filename"].rpartition("/")[2] for b in blocks for f in b.get("frames", ()) if f["filename"]})
    tell(f"files {step}", [name for name in names if name.endswith(".py")])
    traces = snapshot["device_traces"]
    tell(f"events {step}", sorted(collections.Counter(e["action"] for trace in traces for e in trace).items()))
    tell(f"annotations {step}", len(snapshot.get("external_annotations", ())))
    tell(f"settings {step}", sorted(snapshot.get("allocator_settings", {}).items()))


for step in range(60):
    loss = model(torch.ones(16, 64, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(loss)
    if step % 6 == 0:
        tell("enabled", torch._C._cuda_isHistoryEnabled())
        picture(step)
    if case == "again" and step == 30:
        torch.cuda.memory._record_memory_history(max_entries=1000)
    if case == "again" and step == 45:
        torch.cuda.memory._record_memory_history(enabled=None)
torch.cuda.memory._dump_snapshot("snapshot.pickle")
with open("snapshot.pickle", "rb") as file:
    tell("dumped", sorted(pickle.load(file)))
tell("summary", torch.cuda.memory_summary())
