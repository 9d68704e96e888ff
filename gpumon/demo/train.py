"""A small transformer language model, trained on Python's standard library. `gpumon demo` watches it.

An ordinary training script without any reference to gpumon: an example of a script that needs no change.
"""

from __future__ import annotations

import _thread
import argparse
import itertools
import os
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
CORPUS_BYTES = 2 << 20
SPIKE_EVERY = 25
SPIKE_FIRST = 10
SPIKE_FACTOR = 4
RANKS = 2


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    context: int
    batch: int


LAPTOP = Size(width=128, layers=4, heads=4, context=96, batch=8)
SMALL_DEVICE = Size(width=768, layers=12, heads=12, context=256, batch=8)
DEVICE = Size(width=1024, layers=16, heads=16, context=512, batch=16)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(SPIKE_FACTOR * size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> bytearray:
    """Source files of the standard library, as bytes; only each batch becomes a tensor."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if len(text) < SPIKE_FACTOR * DEVICE.context + 2:
        raise SystemExit("this Python comes without its library's sources: there is no text to learn")
    return text


def batches(text: bytearray, size: Size, spikes: bool) -> Callable[[int], Tensor]:
    def batch(step: int) -> Tensor:
        length = size.context * (SPIKE_FACTOR if spikes and step % SPIKE_EVERY == SPIKE_FIRST else 1)
        starts = torch.randint(len(text) - length - 1, (size.batch,)).tolist()
        windows = [torch.frombuffer(text, dtype=torch.uint8, count=length + 1, offset=at) for at in starts]
        return torch.stack(windows).long()

    return batch


def choose(rank: int = 0) -> tuple[str, Size]:
    if torch.cuda.is_available():
        roomy = torch.cuda.get_device_properties(0).total_memory >= 20 << 30
        return f"cuda:{rank % torch.cuda.device_count()}", DEVICE if roomy else SMALL_DEVICE
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))  # leaves CPU for the viewer
    return "cpu", LAPTOP


def stop_with_input() -> None:
    """Interrupts the training when stdin is closed, i.e. its starter has finished or died."""

    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        _thread.interrupt_main()
        time.sleep(5)
        os._exit(130)  # the interrupt had no effect

    threading.Thread(target=wait, daemon=True).start()


def train(workload: str, rank: int = 0) -> None:
    torch.manual_seed(rank)
    device, size = choose(rank)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    batch = batches(corpus(), size, workload == "spikes")
    model: nn.Module = LanguageModel(size).to(device)
    if workload == "ddp":
        # rank 0 keeps a copy of its gradients in DDP's buckets; on rank 1 the gradients are views of them
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=rank == 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    confidence: list[Tensor] = []  # "leak": the top probability of each token, kept for every step
    for step in itertools.count():
        tokens = batch(step).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if workload == "leak":
            confidence.append(logits.detach().softmax(-1).amax(-1))
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def train_rank(rank: int, meeting: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both ranks are on this machine
    backend = "nccl" if torch.cuda.device_count() >= RANKS else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    try:
        train("ddp", rank)
    except KeyboardInterrupt:
        os._exit(130)  # the other rank is gone too: skip the common shutdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=("plain", "spikes", "leak", "ddp"), default="plain")
    parser.add_argument("--stop-with-input", action="store_true", help="stop when standard input ends")
    args = parser.parse_args()
    if args.stop_with_input:
        stop_with_input()
    if args.workload != "ddp":
        train(args.workload)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_rank, (str(Path(folder, "meeting")),), nprocs=RANKS)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
