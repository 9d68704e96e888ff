"""fp16 with a GradScaler that skips every third optimizer step, as it does when gradients overflow."""

import torch
from _mlp import batch, perceptron
from _report import Report, arguments
from torch.nn import functional as F


class OverflowEveryThird(torch.amp.GradScaler):
    """Skips on a schedule: which step overflows must not depend on values, or two machines would differ."""

    calls = 0
    skipped = False

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self.calls += 1
        self.skipped = self.calls % 3 == 0
        return None if self.skipped else super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


def main() -> None:
    args = arguments(__doc__, steps=6).parse_args()
    report = Report(args)
    device = torch.device(args.device)
    model = perceptron().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = OverflowEveryThird(device.type)
    report("load")
    for _ in range(args.steps):
        inputs, targets = batch(device)
        report("between")
        with torch.autocast(device.type, torch.float16):
            outputs = model(inputs)
            report("forward")
            loss = F.mse_loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        report("backward")
        scaler.step(optimizer)
        report("optimizer", skipped=scaler.skipped)
        scaler.update()
        optimizer.zero_grad()
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
