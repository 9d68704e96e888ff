"""Host memory grows by 2 MiB a step in a list of tensors on the CPU, or by 1 MiB in a worker's Dataset."""

import torch
from _mlp import INPUTS, OUTPUTS, perceptron
from _report import Report, arguments, resident
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

BATCH = 16
SAMPLE = 2**20 // BATCH
"""Bytes a worker caches for each sample: 1 MiB a batch."""


class Samples(Dataset):
    """Random samples; with `cache`, every one read is kept beside what it was made from."""

    def __init__(self, count: int, cache: bool) -> None:
        self.count = count
        self.cache = [] if cache else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is not None:
            self.cache.append(bytes([index % 255 + 1]) * SAMPLE)
        return torch.randn(INPUTS), torch.randn(OUTPUTS)


def main() -> None:
    parser = arguments(__doc__, steps=50, twin="keep nothing")
    parser.add_argument("--where", choices=["process", "worker"], default="process")
    args = parser.parse_args()
    report = Report(args)
    model = perceptron().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    in_worker = args.where == "worker"
    samples = Samples(args.steps * BATCH, cache=in_worker and not args.clean)
    loader = DataLoader(samples, BATCH, num_workers=1 if in_worker else 0)
    history = []
    report("load")
    batches = iter(loader)
    for inputs, targets in batches:
        inputs, targets = inputs.to(args.device), targets.to(args.device)
        report("between")
        outputs = model(inputs)
        report("forward")
        loss = F.mse_loss(outputs, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        if args.report:
            report.note(rss=resident(), workers=[resident(worker.pid) for worker in getattr(batches, "_workers", [])])
        report("optimizer")
        optimizer.zero_grad()
        if not in_worker and not args.clean:
            history.append(torch.ones(2**19) * len(history))
        del inputs, targets, outputs, loss
    report.done()


if __name__ == "__main__":
    main()
