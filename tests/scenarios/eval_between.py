"""Evaluation between training steps, under inference_mode: loss on a held-out batch, or tokens generated one by one.

With --bf16 the loss, under autocast and no_grad: then autocast's cache has copies of the weights as the model returns.
"""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments


@torch.inference_mode()
def evaluate(model: GPT, config: GPTConfig, device: str) -> torch.Tensor:
    tokens, targets = batch(config, 4, device)
    return next_token_loss(model(tokens), targets)


@torch.no_grad()
def evaluate_in_bf16(model: GPT, config: GPTConfig, device: str) -> torch.Tensor:
    tokens, targets = batch(config, 4, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        return next_token_loss(model(tokens), targets)


@torch.inference_mode()
def generate(model: GPT, config: GPTConfig, device: str, count: int = 16) -> torch.Tensor:
    tokens, _ = batch(config, 2, device, length=8)
    for _ in range(count):
        following = model(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def main() -> None:
    parser = arguments(__doc__, steps=6)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations (2)")
    parser.add_argument("--generate", action="store_true", help="generate tokens instead of computing a loss")
    parser.add_argument("--bf16", action="store_true", help="train and evaluate under autocast")
    args = parser.parse_args()
    evaluates = generate if args.generate else evaluate_in_bf16 if args.bf16 else evaluate
    report = Report(args)
    config = GPTConfig()
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    report("load")
    for step in range(1, args.steps + 1):
        tokens, targets = batch(config, 8, args.device)
        report("between")
        with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.bf16):
            logits = model(tokens)
            report("forward")
            loss = next_token_loss(logits, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, targets, logits, loss
        if step % args.every == 0:
            model.eval()
            evaluates(model, config, args.device)
            report("eval")
            model.train()
    report.done()


if __name__ == "__main__":
    main()
