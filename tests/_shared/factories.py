"""The scenarios' models, batches and losses as functions, for estimates: `CASES` by the scenario's name.

What `gpumon estimate` takes is a factory, a batch factory and a loss of the output; a scenario that does something else
in its loop (two models, a second pass, a growing list) cannot be said in those words and is not here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1] / "scenarios"))  # they are scripts, and import each other so

from _gpt import GPT, GPTConfig, next_token_loss
from _mlp import BATCH, INPUTS, perceptron

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


def tokens(config: GPTConfig, length: int | None, batch: int) -> Tensor:
    return torch.randint(config.vocabulary, (batch, length or config.length))


def of_gpt(config: GPTConfig, batch: int = 8, length: int | None = None, *, form: str = "", **more: Any) -> Case:
    """Next-token prediction."""

    def loss(logits: Tensor) -> Tensor:
        return next_token_loss(logits, torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device))

    return Case(partial(GPT, config, checkpointing=form), partial(tokens, config, length), batch, loss, **more)


def squares(outputs: Tensor) -> Tensor:
    return F.mse_loss(outputs, torch.zeros_like(outputs, dtype=torch.float32))


def of_perceptron(batch: int = BATCH, **more: Any) -> Case:
    return Case(perceptron, lambda size: torch.randn(size, INPUTS), batch, squares, **more)


def classes(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def clicks(scores: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))


def network() -> nn.Module:
    from cnn import Net

    return Net(channels=64, blocks=4)


def recommender(*, sparse: bool) -> nn.Module:
    from sparse_embedding import Recommender

    return Recommender(sparse)


def items(batch: int) -> Tensor:
    from sparse_embedding import BAG, ROWS

    return torch.randint(ROWS, (batch, BAG))


def lora() -> nn.Module:
    from lora import Adapted

    model = GPT(GPT_SMALL).requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    return model


def bert_large() -> nn.Module:
    from bert_large import build

    return build()


def bert_batch(batch: int) -> dict[str, Tensor]:
    ids = torch.randint(100, 30000, (batch, 512))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def of_logits(output: Any) -> Tensor:
    return classes(output.logits)


def trainers(name: str, *, checkpointing: bool = False) -> nn.Module:
    from hf_trainer import build

    model = build(name)
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


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
CHECKPOINTED = GPTConfig(layers=6)

CASES: dict[str, Case] = {
    "mlp": Case(mlp, lambda size: torch.randn(size, 1024), 32, squares),
    "gpt-fp32": of_gpt(GPT_SMALL),
    "gpt-bf16": of_gpt(GPT_SMALL, precision="bf16-autocast"),
    "gpt-fp16": of_gpt(GPT_SMALL, precision="fp16-autocast"),
    "bert-large": Case(bert_large, bert_batch, 4, of_logits),
    "cnn": Case(network, lambda size: torch.randn(size, 3, 32, 32), 16, classes, "sgd,momentum=0.9"),
    "accumulation": of_gpt(GPT_SMALL, 2, accumulation=4),
    "checkpointing-none": of_gpt(CHECKPOINTED),
    "checkpointing-reentrant": of_gpt(CHECKPOINTED, form="reentrant"),
    "checkpointing-non-reentrant": of_gpt(CHECKPOINTED, form="non-reentrant"),
    "eval-between": of_gpt(GPT_SMALL),
    "generate-between": of_gpt(GPT_SMALL),
    "variable-lengths": of_gpt(GPT_SMALL, length=128),
    "tied-embeddings": of_gpt(GPT_SMALL, 4),
    "untied-embeddings": of_gpt(GPTConfig(tied=False), 4),
    "sparse-embedding": Case(partial(recommender, sparse=True), items, 256, clicks, "sgd"),
    "dense-embedding": Case(partial(recommender, sparse=False), items, 256, clicks, "sgd"),
    "lora": Case(lora, partial(tokens, GPT_SMALL, None), 4, of_gpt(GPT_SMALL).loss),
    "ema-clean": of_perceptron(),
    "scaler-skips": of_perceptron(precision="fp16-autocast"),
    "hf-trainer": Case(partial(trainers, "gpt2"), partial(sentences, "gpt2"), 4),
    "hf-trainer-all": Case(
        partial(trainers, "bert", checkpointing=True),
        partial(sentences, "bert"),
        4,
        precision="bf16-autocast",
        accumulation=2,
    ),
    "grad-in-eval-clean": of_perceptron(),
    "outlier-batch": of_gpt(OUTLIER, length=512),
    "outlier-batch-clean": of_gpt(OUTLIER, length=64),
    "dominant-embedding": of_gpt(DOMINANT, 2),
    "dominant-embedding-clean": of_gpt(GPTConfig(vocabulary=512, layers=2, width=128, length=32), 2),
    "foreach-peak": Case(square_layers, partial(rows, 2048), 2, mean_of_squares),
    "foreach-peak-clean": Case(square_layers, partial(rows, 2048), 2, mean_of_squares, "adamw:fused"),
    "zeroed-gradients": of_perceptron(set_to_none=False),
    "zeroed-gradients-clean": of_perceptron(),
    "near-capacity": of_perceptron(32 * 1024),
    "near-capacity-clean": of_perceptron(8 * 1024),
    "fragmentation-clean": of_perceptron(16 * 4096),
    "allocator-retries-clean": of_perceptron(16 * 2048),
    "oom-forward-clean": Case(partial(layer, 256, 256), partial(rows, 256), 64, torch.mean),
    "other-process-clean": of_perceptron(),
    "host-leak-clean": of_perceptron(16),
}
