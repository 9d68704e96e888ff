"""The small GPT that several scenarios train: pre-norm blocks, learned positions, head tied to the embedding or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults are those of a model that trains in about 100 MiB."""

    vocabulary: int = 8192
    length: int = 128
    layers: int = 4
    width: int = 256
    heads: int = 4
    tied: bool = True

    @property
    def parameters(self) -> int:
        """Number of parameters: embeddings, 12w² + 13w a block, the last norm, and the head where it is its own."""
        w = self.width
        head = 0 if self.tied else self.vocabulary * w
        return (self.vocabulary + self.length) * w + self.layers * (12 * w * w + 13 * w) + 2 * w + head


class Block(nn.Module):
    """Attention and a perceptron, each behind its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, config: GPTConfig, *, checkpointing: str = "") -> None:
        super().__init__()
        self.config = config
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def encode(self, tokens: Tensor) -> Tensor:
        """The last hidden states (batch, length, width)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(tokens))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over every position."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(config: GPTConfig, size: int, device: torch.device | str, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, made on the host and copied as a loader's would be."""
    shape = (size, length or config.length)
    tokens = torch.randint(config.vocabulary, shape)
    return tokens.to(device), tokens.roll(-1, dims=1).to(device)
