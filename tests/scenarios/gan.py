"""A GAN: two models and two optimizers; the generator's backward passes through the discriminator."""

import torch
from _report import Report, arguments
from torch import nn
from torch.nn import functional as F


def perceptron(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2),
        nn.Linear(hidden, outputs),
    )


def main() -> None:
    args = arguments(__doc__, steps=5).parse_args()
    report = Report(args)
    generator = perceptron(128, 1024, 3072).to(args.device)
    discriminator = perceptron(3072, 1024, 1).to(args.device)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real, fake = torch.ones(64, 1, device=args.device), torch.zeros(64, 1, device=args.device)
    report("load")
    for _ in range(args.steps):
        images = torch.randn(64, 3072, device=args.device)
        report("between")
        made = generator(torch.randn(64, 128, device=args.device))
        on_real, on_made = discriminator(images), discriminator(made.detach())
        report("forward")
        loss = F.binary_cross_entropy_with_logits(on_real, real) + F.binary_cross_entropy_with_logits(on_made, fake)
        loss.backward()
        report("backward")
        discriminator_optimizer.step()
        report("optimizer")
        discriminator_optimizer.zero_grad()
        del on_real, on_made, loss
        judged = discriminator(made)
        report("forward")
        loss = F.binary_cross_entropy_with_logits(judged, real)
        loss.backward()
        report("backward")
        generator_optimizer.step()
        report("optimizer")
        generator_optimizer.zero_grad()
        discriminator_optimizer.zero_grad()
        del images, made, judged, loss
    report.done()


if __name__ == "__main__":
    main()
