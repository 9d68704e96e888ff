"""A full finetuning of Llama 3.2 3B whose peaks are published, written anew in plain torch: the same tensors.

    python -m gpumon.virtual_gpu run -p a100-80 -- python tests/physical/llama.py chunks checkpoints

prints the peak of active bytes of the third step. Words add what torchtune's README adds, one after the other: `chunks`
(cross entropy in eight pieces), `checkpoints` (each layer recomputed), `fused` (the optimizer steps in backward).

Source: pytorch/torchtune at bd2a0fc, read for shapes and order: recipes/full_finetune_single_device.py,
torchtune/modules (transformer, attention, feed_forward, rms_norm), models/llama3_2, modules/loss. Model: 28 layers,
width 3,072, 24 heads and 8 of keys and values, inner width 8,192, 128,256 tokens, embedding tied to the output.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, KEYS, INNER, VOCABULARY = 28, 3_072, 24, 8, 8_192, 128_256
BATCH, LENGTH, CHUNKS = 2, 4_096, 8
HEAD = WIDTH // HEADS
WORDS = ("chunks", "checkpoints", "fused")


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def rotated(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cos, sin = table[..., 0], table[..., 1]
    turned = torch.stack(
        [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin],
        -1,
    )
    return turned.flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEYS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotated(self.q(x).view(batch, length, HEADS, HEAD), table).transpose(1, 2)
        k, v = self.k(x), self.v(x)
        k = rotated(k.view(batch, length, -1, HEAD), table).transpose(1, 2)
        v = v.view(batch, length, -1, HEAD).transpose(1, 2)
        shape = (batch, KEYS, HEADS // KEYS, -1, HEAD)
        k = k.unsqueeze(2).expand(shape).flatten(1, 2)
        v = v.unsqueeze(2).expand(shape).flatten(1, 2)
        output = scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(batch, length, -1)
        return self.out(output)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = silu(self.gate(x))
        h = h * self.up(x)
        return self.down(h)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = RMSNorm(), RMSNorm()
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.before(x)
        h = self.attention(h, table) + x
        return h + self.feed(self.after(h))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self, words: frozenset[str]) -> None:
        super().__init__()
        self.words = words
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.register_buffer("table", torch.ones(LENGTH, HEAD // 2, 2), persistent=False)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        h = self.tokens(tokens)
        table = self.table.float()[: tokens.size(1)].view(-1, tokens.size(1), 1, HEAD // 2, 2)
        for layer in self.layers:
            h = checkpoint(layer, h, table, use_reentrant=False) if "checkpoints" in self.words else layer(h, table)
        h = self.norm(h)
        if "chunks" in self.words:
            return [linear(part, self.tokens.weight) for part in h.chunk(CHUNKS, dim=1)]
        return [linear(h, self.tokens.weight).float()]


def loss_of(outputs: list[Tensor], labels: Tensor) -> Tensor:
    pieces = zip(outputs, labels.chunk(len(outputs), dim=1), strict=True)
    if len(outputs) == 1:
        return cross_entropy(outputs[0].reshape(-1, VOCABULARY), labels.reshape(-1))
    sums = [cross_entropy(o.reshape(-1, VOCABULARY).float(), label.reshape(-1), reduction="sum") for o, label in pieces]
    return torch.stack(sums).sum() / labels.numel()


def peak_bytes(words: frozenset[str]) -> int:
    """Of active bytes, in the third step."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama(words)
    parameters = list(model.parameters())
    each = {p: torch.optim.AdamW([p], lr=2e-5, fused=True) for p in parameters} if "fused" in words else {}
    whole = None if each else torch.optim.AdamW(parameters, lr=2e-5, fused=True)

    def step(parameter: Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in each:
        parameter.register_post_accumulate_grad_hook(step)
    for at in range(3):
        if at == 2:
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long).to("cuda")
        labels = torch.zeros(BATCH, LENGTH, dtype=torch.long).to("cuda")
        outputs = model(tokens)
        loss = loss_of(outputs, labels)
        del outputs
        loss.backward()
        if whole is not None:
            whole.step()
            whole.zero_grad(set_to_none=True)
    peak: int = torch.cuda.memory_stats()["active_bytes.all.peak"]
    return peak


def main() -> None:
    words = frozenset(sys.argv[1:])
    if not words <= set(WORDS):
        raise SystemExit(f"known words: {', '.join(WORDS)}")
    print(peak_bytes(words))


if __name__ == "__main__":
    main()
