"""Another process on the device holds 2 GiB of it while this one trains."""

import subprocess
import sys

import torch
from _mlp import batch, perceptron
from _report import Report, arguments, device_used
from torch.nn import functional as F

SIZE = 2 * 2**30
NEIGHBOUR = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device=sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


def main() -> None:
    args = arguments(__doc__, steps=10, twin="nobody else").parse_args()
    report = Report(args)
    command = [sys.executable, "-c", NEIGHBOUR, str(SIZE), args.device]
    neighbour = None
    if not args.clean:
        neighbour = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        neighbour.stdout.readline()
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    report("load")
    for _ in range(args.steps):
        inputs, targets = batch(args.device)
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del inputs, targets, outputs, loss
    if report.wanted and report.device.type == "cuda":
        report.note(device_used=device_used(args.device))
    report.done()
    if neighbour is not None:
        neighbour.communicate()


if __name__ == "__main__":
    main()
