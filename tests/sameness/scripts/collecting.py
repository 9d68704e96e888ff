# same: cases=thresholds,callbacks,weakrefs,refcounts,disabled,frozen,debug,finalizers
"""Garbage collection and lifetimes: what dies when."""

import gc
import sys
import weakref

import torch
from same import allocated, case, device, tell, watch

torch.manual_seed(0)
if case == "disabled":
    gc.disable()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
watch(model, optimizer)
gone = []
collections = []
if case == "callbacks":
    gc.collect()
    gc.callbacks.append(
        lambda phase, info: collections.append((phase, info["generation"], info["collected"], info["uncollectable"]))
    )
kept = []
for step in range(40):
    x = torch.ones(4, 8, device=device)
    hidden = model[0](x)
    output = model(x)
    loss = output.square().mean()
    if case == "weakrefs":
        for name in ("x", "hidden", "output", "loss"):
            weakref.finalize(globals()[name], gone.append, f"{name} in step {step}")
        graph = weakref.ref(loss.grad_fn)
    if case == "refcounts" and step % 6 == 0:
        each = (model, model[0], model[0].weight, optimizer, optimizer.state, x, output, loss, loss.grad_fn)
        tell("counts", [sys.getrefcount(value) for value in each])
        tell("class counts", [sys.getrefcount(value) for value in (type(model[0]).forward, torch.nn.Linear)] and "seen")
        tell("referrers", sorted(type(r).__name__ for r in gc.get_referrers(loss)))
        tell("referrers of x", sorted(type(r).__name__ for r in gc.get_referrers(x)))
    loss.backward()
    optimizer.step()
    if case == "weakrefs":
        tell("before del", gone)
        del x, hidden
        tell("after del of inputs", [gone, allocated()])
        del output
        tell("after del of output", [gone, allocated()])
        del loss
        tell("after del of loss", [gone, allocated(), graph() is None])
        gone.clear()
    optimizer.zero_grad()
    kept.append(torch.ones(10, device=device))
    if case == "finalizers" and step == 20:
        cycle = [torch.ones(100, device=device)]
        cycle.append(cycle)
        weakref.finalize(cycle[0], gone.append, "cycle")
        del cycle
        tell("in a cycle", gone)
    if case == "frozen" and step == 20:
        gc.collect()
        gc.freeze()
    tell("enabled", [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.garbage)])
    tell("callbacks", len(gc.callbacks))
if case == "debug":
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(20):
        model(torch.ones(4, 8, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    tell("garbage", sorted({type(g).__module__ for g in gc.garbage if "gpumon" in type(g).__module__}))
    gc.set_debug(0)
    gc.garbage.clear()
if case == "callbacks":
    gc.collect()
    gc.collect()  # the first finds what imports have left
    tell("explicit", collections[-2:])
if case == "frozen":
    gc.unfreeze()
    tell("frozen", gc.get_freeze_count())
alive = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)]
del model, optimizer
tell("at del", [ref() is None for ref in alive])
gc.collect()
tell("after collect", [ref() is None for ref in alive])
tell("allocated", allocated())
