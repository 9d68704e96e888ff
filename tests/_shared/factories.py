"""The scenarios' models, batches and losses as functions, for estimates: `CASES` by the scenario's name.

What `gpumon estimate` takes is a factory, a batch factory and a loss of the output; a scenario that does something else
in its loop (two models, a second pass, a growing list) cannot be said in those words and is not here, and neither are
those about a device that is almost full.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "scenarios"))  # they are scripts, and import each other so

from _gpt import GPT, GPTConfig, next_token_loss
from _mlp import BATCH, INPUTS, OUTPUTS, perceptron

GPT_SMALL = GPTConfig()


@dataclass(frozen=True)
class Case:
    """One workload: what the options of `gpumon estimate --model` say."""

    factory: Callable[[], nn.Module]
    batches: Callable[[int], Any]
    batch: int
    loss: Callable[[Any], Tensor] | None = None
    optimizer: str = "adamw"
    precision: str = "fp32"
    accumulation: int = 1
    set_to_none: bool = True
    built_on_device: bool = False
    checkpointing: bool = False  # the factory's module does it
    iterations: int = 2


class WithTargets(nn.Module):
    """Hands the targets through to the loss: (inputs, targets) → (outputs, targets)."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(inputs), targets


def against(loss: Callable[..., Tensor]) -> Callable[[tuple[Tensor, Tensor]], Tensor]:
    return lambda output: loss(*output)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs.float(), targets)


def next_tokens(config: GPTConfig, lengths: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Tokens and targets, one length after the other."""
    following = cycle(lengths)

    def batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(config.vocabulary, (size, next(following)))
        return tokens, tokens.roll(-1, dims=1)

    return batch


def of_gpt(config: GPTConfig, batch: int = 8, *lengths: int, form: str = "", **more: Any) -> Case:
    """Next-token prediction."""
    return Case(
        lambda: WithTargets(GPT(config, checkpointing=form)),
        next_tokens(config, lengths or (config.length,)),
        batch,
        against(next_token_loss),
        built_on_device=True,
        **more,
    )


def numbers(inputs: int, outputs: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.empty(batch, inputs), torch.empty(batch, outputs)


def of_perceptron(*batches: int, **more: Any) -> Case:
    following = cycle(batches or (BATCH,))
    return Case(
        lambda: WithTargets(perceptron()),
        lambda _: numbers(INPUTS, OUTPUTS, next(following)),
        max(batches, default=BATCH),
        against(squares),
        iterations=max(2, len(batches)),
        **more,
    )


def mlp() -> nn.Module:
    return WithTargets(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)))


def network() -> nn.Module:
    from cnn import Net

    return WithTargets(Net(channels=64, blocks=4))


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def recommender(*, sparse: bool) -> nn.Module:
    from sparse_embedding import Recommender

    return WithTargets(Recommender(sparse))


def items(batch: int) -> tuple[Tensor, Tensor]:
    from sparse_embedding import BAG, ROWS

    return torch.randint(ROWS, (batch, BAG)), torch.rand(batch)


def lora() -> nn.Module:
    from lora import Adapted

    model = GPT(GPT_SMALL).requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    return WithTargets(model)


def bert_large() -> nn.Module:
    from bert_large import build

    return build()


def bert_batch(batch: int) -> dict[str, Tensor]:
    ids = torch.randint(100, 30000, (batch, 512))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def of_logits(output: Any) -> Tensor:
    logits = output.logits
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


class OnlyLoss(nn.Module):
    """What a Trainer keeps of an output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **given: Tensor) -> Tensor:
        return self.net(**given).loss


def trainers(name: str, *, checkpointing: bool = False) -> nn.Module:
    from hf_trainer import build

    model = build(name)
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return OnlyLoss(model)


def sentences(name: str, batch: int) -> dict[str, Tensor]:
    from hf_trainer import LENGTH, VOCABULARY

    ids = torch.randint(VOCABULARY, (batch, LENGTH))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids if name == "gpt2" else ids[:, 0] % 2,
    }


def square_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))


def mean_of_squares(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def layer(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def rows(width: int, batch: int) -> Tensor:
    return torch.empty(batch, width)


DOMINANT = GPTConfig(vocabulary=120_000, layers=2, width=128, length=32)
OUTLIER = GPTConfig(layers=2, width=128, vocabulary=2048, length=512)
LENGTHS = (48, 96, 64, 128, 32, 80)  # variable_lengths.py
CLICKS = against(F.binary_cross_entropy_with_logits)
CHECKPOINTED = GPTConfig(layers=6)

CASES: dict[str, Case] = {
    "mlp": Case(mlp, partial(numbers, 1024, 1024), 32, against(squares)),
    "gpt-fp32": of_gpt(GPT_SMALL),
    "gpt-bf16": of_gpt(GPT_SMALL, precision="bf16-autocast"),
    "gpt-fp16": of_gpt(GPT_SMALL, precision="fp16-autocast"),
    "bert-large": Case(bert_large, bert_batch, 4, of_logits),
    "cnn": Case(network, images, 16, against(F.cross_entropy), "sgd,momentum=0.9"),
    "accumulation": of_gpt(GPT_SMALL, 2, accumulation=4),
    "checkpointing-none": of_gpt(CHECKPOINTED),
    "checkpointing-reentrant": of_gpt(CHECKPOINTED, form="reentrant"),
    "checkpointing-non-reentrant": of_gpt(CHECKPOINTED, form="non-reentrant"),
    "eval-between": of_gpt(GPT_SMALL),
    "generate-between": of_gpt(GPT_SMALL),
    "variable-lengths": of_gpt(GPT_SMALL, 8, *LENGTHS, iterations=12),
    "tied-embeddings": of_gpt(GPT_SMALL, 4),
    "untied-embeddings": of_gpt(GPTConfig(tied=False), 4),
    "sparse-embedding": Case(
        partial(recommender, sparse=True), items, 256, against(F.binary_cross_entropy_with_logits), "sgd"
    ),
    "dense-embedding": Case(
        partial(recommender, sparse=False), items, 256, against(F.binary_cross_entropy_with_logits), "sgd"
    ),
    "lora": Case(lora, next_tokens(GPT_SMALL, (128,)), 4, against(next_token_loss), built_on_device=True),
    "ema-clean": of_perceptron(),
    "scaler-skips": of_perceptron(precision="fp16-autocast"),
    "hf-trainer": Case(partial(trainers, "gpt2"), partial(sentences, "gpt2"), 4),
    "hf-trainer-all": Case(
        partial(trainers, "bert", checkpointing=True),
        partial(sentences, "bert"),
        4,
        precision="bf16-autocast",
        accumulation=2,
        checkpointing=True,
    ),
    "grad-in-eval-clean": of_perceptron(),
    "outlier-batch": of_gpt(OUTLIER, 8, *[64] * 15, 512, *[64] * 4, iterations=20),
    "outlier-batch-clean": of_gpt(OUTLIER, 8, 64),
    "dominant-embedding": of_gpt(DOMINANT, 2),
    "dominant-embedding-clean": of_gpt(GPTConfig(vocabulary=512, layers=2, width=128, length=32), 2),
    "foreach-peak": Case(square_layers, partial(rows, 2048), 2, mean_of_squares),
    "foreach-peak-clean": Case(square_layers, partial(rows, 2048), 2, mean_of_squares, "adamw:fused"),
    "zeroed-gradients": of_perceptron(set_to_none=False),
    "zeroed-gradients-clean": of_perceptron(),
    "fragmentation": of_perceptron(*range(4096, 17 * 4096, 4096)),
    "fragmentation-clean": of_perceptron(*range(16 * 4096, 0, -4096)),
    "oom-forward-clean": Case(partial(layer, 256, 256), partial(rows, 256), 64, torch.mean, built_on_device=True),
    "other-process-clean": of_perceptron(),
    "host-leak-clean": of_perceptron(16),
}
