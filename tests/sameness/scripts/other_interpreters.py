# same: cases=execv,isolated,no_site,no_env,child,script; on=cpu
"""Interpreters that a script becomes or starts."""

import os
import subprocess
import sys

import torch
from same import case, device, tell, watch

if os.environ.get("BECOME"):
    print("become", sys.argv[1:], flush=True)
    os.environ.pop("BECOME")
    model = torch.nn.Linear(8, 8).to(device)
    watch(model)
    tell("second life", [sys.flags.isolated, len(sys.argv)])
    model(torch.ones(4, 8, device=device)).sum().backward()
    sys.exit(5)
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
watch(model, optimizer)
for _ in range(5):
    model(torch.ones(4, 8, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
SEEN = "import sys; print(sys.flags, sorted(m for m in sys.modules if not m.startswith('_')), 'sitecustomize' in sys.modules)"
if case == "execv":
    os.environ["BECOME"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
options = {"isolated": ["-I"], "no_site": ["-S"], "no_env": ["-E"]}.get(case, [])
command = [sys.executable, *options, "-c", SEEN]
if case == "script":
    command = [sys.executable, __file__, "again"]
    os.environ["BECOME"] = "1"
done = subprocess.run(command, capture_output=True, text=True)
print(done.returncode, done.stdout, done.stderr)
