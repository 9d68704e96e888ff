"""The scenarios' models, batches and losses as functions, for estimates: `CASES` by the scenario's name.

What `gpumon estimate` takes is a factory, a batch factory and a loss of the output, and how many ranks there are.
A scenario that does something else in its loop is in `UNSAID`, with what it does.
"""

from __future__ import annotations

import random
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
from catalogue import HOLDERS

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
    ranks: int = 1
    bucket_views: bool = False  # DDP's
    zero: int = 0  # 3: FSDP
    flat: bool = False  # FSDP1


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
    model.config.use_cache = False  # as a Trainer does, unless its own use_cache is on
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


def fussy() -> nn.Module:
    from exception import Fussy

    return WithTargets(Fussy())


class Averaged(nn.Module):
    """A perceptron with its average beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = perceptron(), perceptron().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


class WithProbe(nn.Module):
    """A perceptron, and a batch that stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron()
        self.register_buffer("probe", torch.empty(BATCH, INPUTS))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def mean_of_squared_differences(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Penalized(nn.Module):
    """A critic whose loss has the gradient of its own scores."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 1))

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        points.requires_grad_()
        scores = self.critic(points)
        (slope,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        return scores, slope


def penalized(output: tuple[Tensor, Tensor]) -> Tensor:
    scores, slope = output
    return scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


class WithoutRoot(nn.Module):
    """What is trained in turns: the hidden states, and the head's weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(GPT_SMALL)
        self.alone = cycle((False, True))

    def forward(self, tokens: Tensor) -> Tensor:
        of = self.net.head.weight if next(self.alone) else self.net.encode(tokens)
        return of.square().mean()


def wide(batch: int) -> Tensor:
    from near_capacity import WIDTH

    return torch.empty(batch, WIDTH)


class Wide(nn.Module):
    """Near_capacity.py's layers, whose targets are their inputs."""

    def __init__(self) -> None:
        from near_capacity import LAYERS, WIDTH

        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(inputs), inputs


def drawn() -> tuple[int, ...]:
    """The batches of allocator_retries.py."""
    from allocator_retries import LARGEST

    draw = random.Random(0)
    return tuple(draw.randint(LARGEST // 4, LARGEST) for _ in range(24))


DOMINANT = GPTConfig(vocabulary=120_000, layers=2, width=128, length=32)
OUTLIER = GPTConfig(layers=2, width=128, vocabulary=2048, length=512)
LENGTHS = (48, 96, 64, 128, 32, 80)  # variable_lengths.py
CLICKS = against(F.binary_cross_entropy_with_logits)
CHECKPOINTED = GPTConfig(layers=6)
COMPILED = GPTConfig(layers=1, width=128, vocabulary=1024)
LARGE = GPTConfig(vocabulary=50257, length=1024, layers=6, width=768, heads=12)
SKEWED = GPTConfig(layers=2, width=128, vocabulary=2048, length=384)
DDP: dict[str, Any] = {"ranks": 2}
VIEWS: dict[str, Any] = {"ranks": 2, "bucket_views": True}

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
    "host-leak": of_perceptron(16),
    "host-leak-worker": of_perceptron(16),
    "host-leak-worker-clean": of_perceptron(16),
    "other-process": of_perceptron(),
    "grad-in-eval": of_perceptron(),
    "tensor-leak-list-clean": of_perceptron(),
    "checkpoint-save-clean": of_perceptron(),
    "retained-checkpoint-clean": of_perceptron(),
    "retained-graph-loss-clean": Case(
        lambda: WithTargets(WithProbe()),
        lambda _: numbers(INPUTS, OUTPUTS, BATCH),
        BATCH,
        against(mean_of_squared_differences),
    ),
    "exception-forward": Case(fussy, partial(numbers, INPUTS, OUTPUTS), BATCH, against(squares)),
    "exception-backward": Case(fussy, partial(numbers, INPUTS, OUTPUTS), BATCH, against(squares)),
    "ema": Case(lambda: WithTargets(Averaged()), partial(numbers, INPUTS, OUTPUTS), BATCH, against(squares)),
    "double-backward": Case(Penalized, partial(rows, 512), 64, penalized, "adam", iterations=5),
    "loss-without-root": Case(
        WithoutRoot,
        lambda size: torch.randint(GPT_SMALL.vocabulary, (size, 128)),
        4,
        built_on_device=True,
        iterations=4,
    ),
    "compile-module": of_gpt(COMPILED, 4),
    "compile-inplace": of_gpt(COMPILED, 4),
    "compile-fullgraph": of_gpt(COMPILED, 4),
    "compile-inductor": of_gpt(COMPILED, 4),
    "hf-trainer-compile": Case(partial(trainers, "gpt2"), partial(sentences, "gpt2"), 4),
    "near-capacity": Case(Wide, wide, 1408, against(F.mse_loss), "adamw:fused"),
    "near-capacity-clean": Case(Wide, wide, 176, against(F.mse_loss), "adamw:fused"),
    "allocator-retries": of_perceptron(*drawn()),
    "allocator-retries-clean": of_perceptron(32 * 1024),
    "oom-ahead-clean": of_perceptron(2048),
    "ddp": of_gpt(GPT_SMALL, 2, **DDP),
    "ddp-clean": of_gpt(GPT_SMALL, 2, **VIEWS),
    "ddp-gloo": of_gpt(GPT_SMALL, 2, **DDP),
    "ddp-gloo-clean": of_gpt(GPT_SMALL, 2, **VIEWS),
    "ddp-large": of_gpt(LARGE, 2, 128, **DDP),
    "ddp-large-clean": of_gpt(LARGE, 2, 128, **VIEWS),
    "rank-skew": of_gpt(SKEWED, 8, 384, **VIEWS),
    "rank-skew-clean": of_gpt(SKEWED, 8, 64, **VIEWS),
    "stray-context": of_perceptron(**VIEWS),
    "stray-context-clean": of_perceptron(**VIEWS),
    "checkpoint-device-clean": of_perceptron(**VIEWS),
    "fsdp2": of_gpt(GPT_SMALL, 2, ranks=2, zero=3),
    "fsdp2-rank-0-of-8": of_gpt(GPT_SMALL, 2, ranks=8, zero=3),
    "fsdp1-rank-0-of-8": of_gpt(GPT_SMALL, 2, ranks=8, zero=3, flat=True),
}

_KEPT = "keeps tensors from step to step: what it needs is its clean twin's, what comes on top the finding"
_FAILS = "runs out of memory, so there is no peak to compare with"
UNSAID = {
    "gan": "trains two models with two optimizers in one step",
    **{f"tensor-leak-{holder}": _KEPT for holder in HOLDERS},
    "checkpoint-save": _KEPT,
    "retained-graph-loss": _KEPT,
    "retained-graph-output": _KEPT,
    "retained-checkpoint": _KEPT,
    "retained-graph-output-clean": "runs a second forward between the steps, and keeps what it returned",
    **dict.fromkeys(
        ("kept-list", "kept-data", "kept-batch"), "its variables hold tensors that no part of a model makes"
    ),
    "checkpoint-device": "each rank keeps a copy of the weights on the first rank's device",
    "exception-fatal": "ends with an exception in its second step; until then it is exception-backward",
    **dict.fromkeys(("oom-ahead", "oom-forward", "oom-backward", "oom-optimizer"), _FAILS),
}
"""Scenarios that `CASES` cannot have, and why."""
