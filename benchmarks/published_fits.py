"""What ran on physical GPUs, estimated: `python benchmarks/published_fits.py [--write docs/physical-published.md]`.

mosaicml/llm-foundry publishes with which micro batch its MPT models were trained, by GPU, number of GPUs, length and
sharding. That is one-sided: `gpumon estimate` must not say that it does not fit. The same models, written in plain
torch from their public dimensions, are estimated here as one rank of FullyShardedDataParallel.

Run by hand, without a GPU; nothing is downloaded.
"""

from __future__ import annotations

import csv
import multiprocessing
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import options, write
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpumon.analysis.estimate import plan
from gpumon.analysis.estimate.from_module import FromModule, on_meta
from gpumon.analysis.estimate.workload import PRECISIONS, OptimizerChoice, Workload
from gpumon.analysis.units import size
from gpumon.virtual_gpu import profiles

ROWS = Path(__file__).parents[1] / "tests" / "data" / "llmfoundry_fits.csv"
VOCABULARY = 50_368
MODELS = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip
"""Width, heads and layers: mosaicml/llm-foundry at 8c8dd48f7, scripts/train/yamls/pretrain. Feed-forward: 4 × width."""
DEVICES = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100-80"}
STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
NOTE = """
Published is that the row ran, and nothing of its peak, so this is one-sided: an estimate that is far too small holds
too. The estimate is the peak of reserved bytes of one rank and 450 MiB of context, which is assumed.

Inferred:

- Weights are gathered, and products computed, in bf16 (layer norms too: `low_precision_layernorm`); shards of weights,
  gradients and AdamW's two states are fp32, 16 bytes a parameter: here `bf16-master`, which has as many.
- Attention keeps no scores (flash or Triton).
- The loss keeps no logits in fp32: `fused_crossentropy`, MPT's default. Much depends on it, and it was tried second:
  with torch's `cross_entropy` on fp32 logits the estimate says of 68 of the 209 rows that they do not fit (mostly 350m
  and 760m; up to 133 % of the device).
- Each block is a unit of FSDP. SHARD_GRAD_OP is computed as ZeRO 2.

Not tried: rows in fp8, for which the estimate has no precision. Torchtune's published peaks
have [a page of their own](physical-ladder.md).
"""


class Row(NamedTuple):
    model: str
    tokens: int
    gpus: int
    gpu: str
    batch: int
    precision: str
    sharding: str
    checkpointing: bool
    parameters: int

    def tried(self) -> bool:
        return self.precision != "amp_fp8"


class Estimated(NamedTuple):
    row: Row
    parameters: int
    reserved: int
    """bytes, at the peak"""
    device: plan.TargetDevice
    fits: bool

    @property
    def share(self) -> float:
        return (self.reserved + self.device.context) / self.device.total


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class FusedCrossEntropy(torch.autograd.Function):
    """The shapes of flash-attn's loss, MPT's default (`fused_crossentropy`): nothing as large as the logits in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        normalizers = logits.new_zeros(len(labels), dtype=torch.float32)
        ctx.save_for_backward(logits, normalizers)
        return normalizers.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class Mpt(nn.Module):
    """MPT's layers and shapes: learned positions, and a head tied to the embedding. Returns the loss."""

    def __init__(self, model: str, tokens: int) -> None:
        super().__init__()
        width, heads, layers = MODELS[model]
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.checkpointing = False

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        self.checkpointing = True

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        loss: Tensor = FusedCrossEntropy.apply(logits.flatten(0, 1), labels.flatten())
        return loss


def read() -> list[Row]:
    """The published rows, in their order."""
    with ROWS.open(newline="") as file:
        return [
            Row(
                each["model"], int(each["tokens"]), int(each["gpus"]), each["gpu"], int(each["batch"]),
                each["precision"], each["sharding"], each["checkpointing"] == "True", int(each["parameters"]),
            )
            for each in csv.DictReader(file)
        ]  # fmt: skip


def work_of(row: Row) -> Workload:
    stage = STAGES[row.sharding]
    return Workload(
        batch=row.batch,
        sequence=row.tokens,
        precision=PRECISIONS["bf16-master"],
        optimizer=OptimizerChoice.parse("adamw"),
        world_size=row.gpus,
        checkpointing=row.checkpointing,
        zero=stage,
        flat=stage == 3,
    )


def batches(tokens: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def made(batch: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.zeros(batch, tokens, dtype=torch.long) for _ in range(2))

    return made


def estimated(row: Row) -> Estimated:
    profile = profiles.find(DEVICES[row.gpu])
    device = plan.TargetDevice(DEVICES[row.gpu], profile.capacity_bytes, profile.context_bytes)

    def factory() -> nn.Module:
        return Mpt(row.model, row.tokens)

    subject = FromModule(on_meta(factory), factory, batches(row.tokens))
    expected = plan.expect(subject, work_of(row))
    return Estimated(row, expected.model.count, expected.reserved, device, expected.played.fits(device.budget))


def main() -> None:
    args = options(__doc__, write=True).parse_args()
    rows = read()
    with multiprocessing.get_context("fork").Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        found = pool.map(estimated, filter(Row.tried, rows), chunksize=1)
    write("What ran on physical GPUs, estimated", page(rows, found), args.write, f"torch {torch.__version__}")


def page(rows: list[Row], found: list[Estimated]) -> str:
    return "\n".join(lines(rows, found))


def lines(rows: list[Row], found: list[Estimated]) -> Iterator[str]:
    holding = [each for each in found if each.fits]
    same = sum(each.parameters == each.row.parameters for each in found)
    said = (
        f"Of {len(rows)} published rows {len(found)} were tried. Each ran on its GPUs; the estimate says of "
        f"{len(holding)} that they fit, of {len(found) - len(holding)} that they do not. The model has the published "
        f"number of parameters in {same}."
    )
    yield textwrap.fill(said, 120)
    yield NOTE
    yield "| the estimate's share of the device | rows |\n|---|--:|"
    for low, high in ((0, 25), (25, 50), (50, 75), (75, 90), (90, 100), (100, 1000)):
        count = sum(low <= 100 * each.share < high for each in found)
        yield f"| {f'{low} to {high} %' if high <= 100 else 'more than 100 %'} | {count} |"
    if len(holding) < len(found):
        yield "\n## Rows of which the estimate says that they do not fit\n"
        yield "| model | tokens | GPUs | micro batch | precision | sharding | checkpointing | estimate | % of device |"
        yield "|---|--:|---|--:|---|---|---|--:|--:|"
    for each in found:
        if not each.fits:
            row = each.row
            cells = (
                row.model, f"{row.tokens:,}", f"{row.gpus} × {row.gpu}", str(row.batch), row.precision, row.sharding,
                "yes" if row.checkpointing else "no", size(each.reserved + each.device.context),
                f"{100 * each.share:.1f}",
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
