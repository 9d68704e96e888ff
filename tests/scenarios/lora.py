"""LoRA: the base model frozen, a pair of thin matrices beside each attention projection trained, nothing else."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments
from torch import Tensor, nn

RANK = 8


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(RANK, base.in_features, device=base.weight.device) * 0.01)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def main() -> None:
    args = arguments(__doc__, steps=5).parse_args()
    report = Report(args)
    config = GPTConfig()
    with torch.device(args.device):
        model = GPT(config)
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 4, args.device)
        report("between")
        logits = model(tokens)
        report("forward")
        loss = next_token_loss(logits, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, targets, logits, loss
    report.done()


if __name__ == "__main__":
    main()
