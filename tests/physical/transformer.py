"""A training of which snapshots of a physical GPU are public, written anew: the same tensors in the same order.

    TORCH_CUBLAS_WORKSPACE_CACHE=1 python -m gpumon.virtual_gpu run -p l40s -- \\
        python tests/physical/transformer.py 512 training snapshot.pickle --autocast

Source: Wedsonlin/assignment2-systems at 8630bcf: `memory_profile` of cs336_systems/nsys_profile.py, with the model and
the optimizer of cs336-basics. Read for the order and the shapes of tensors; what einops does there is written with
torch's functions. With the variable, torch 2.15 keeps cuBLAS workspaces as torch 2.11 did.

Locals are freed in the order in which a function first names them, so their order matters.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

WIDTH, INNER, LAYERS, HEADS, VOCABULARY, BATCH, WARMUP = 1024, 4096, 24, 16, 10_000, 4, 5
ENTRIES_MAX = 1_000_000


class Linear(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, length, WIDTH // HEADS // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        *front, half = x.shape
        x1, x2 = x.view(*front, half // 2, 2).movedim(-1, 0).unbind(0)
        cos, sin = self.table[:, : x.size(-2), :].unbind(0)
        x1_rot = cos * x1 - sin * x2
        x2_rot = sin * x1 + cos * x2
        result = torch.concat((x1_rot, x2_rot), dim=-1)
        return result


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponents = torch.exp(shifted)
    return exponents / torch.sum(exponents, dim=-1, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        q = self.q(x)
        k = self.k(x)
        v = self.v(x)
        q, k, v = (each.view(BATCH, length, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        q = self.rotary(q)
        k = self.rotary(k)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] >= places[None, :])[None, ...]
        mixed = attention(q=q, k=k, v=v, mask=mask)
        mixed = mixed.transpose(1, 2).reshape(BATCH, length, WIDTH).contiguous()
        return self.out(mixed)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = Linear(WIDTH, INNER)
        self.w2 = Linear(INNER, WIDTH)
        self.w3 = Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.attn = Attention(rotary)
        self.ffn = SwiGLU()
        self.ln1 = RMSNorm()
        self.ln2 = RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        x_attn = self.attn(self.ln1(x))
        after_attention = x + x_attn
        x_ffn = self.ffn(self.ln2(after_attention))
        after_ffn = after_attention + x_ffn
        return after_ffn


class Transformer(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.rotary = Rotary(length)
        self.layers = nn.ModuleList([Block(self.rotary) for _ in range(LAYERS)])
        self.ln_final = RMSNorm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.ln_final(x)
        logits = self.head(x)
        return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                alpha = group["lr"]
                beta_1, beta_2 = group["betas"]
                t = state.get("t", 1)
                alpha_t = alpha * (math.sqrt(1 - (beta_2**t)) / (1 - (beta_1**t)))
                p.data -= alpha * group["weight_decay"] * p.data
                m_before = state.get("m", torch.zeros_like(grad))
                v_before = state.get("v", torch.zeros_like(grad))
                m_t = beta_1 * m_before + ((1 - beta_1) * grad)
                v_t = beta_2 * v_before + ((1 - beta_2) * torch.square(grad))
                p.data -= alpha_t * m_t / (torch.sqrt(v_t) + group["eps"])
                state["m"] = m_t
                state["v"] = v_t
                state["t"] = t + 1


def record(length: int, mode: str, autocast: bool, out: str) -> None:
    model = Transformer(length)
    model.to("cuda")
    optimizer = AdamW(model.parameters())

    def drawn(steps: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (steps, BATCH, length), dtype=torch.long, device="cuda")

    inputs, last_input = drawn(WARMUP), drawn(1)
    if mode == "inference":
        model.eval()
        with torch.inference_mode():
            for i in range(WARMUP):
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    model(inputs[i])
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES_MAX)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                model(last_input[0])
    else:
        targets, last_target = drawn(WARMUP), drawn(1)
        model.train()
        for i in range(WARMUP):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                output = model(inputs[i])
                loss = cross_entropy(output, targets[i])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del output, loss
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES_MAX)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = model(last_input[0])
            loss = cross_entropy(output, last_target[0])
        loss.backward()
        optimizer.step()
    torch.cuda.memory._dump_snapshot(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("length", type=int)
    parser.add_argument("mode", choices=("training", "inference"))
    parser.add_argument("out")
    parser.add_argument("--autocast", action="store_true")
    asked = parser.parse_args()
    record(asked.length, asked.mode, asked.autocast, asked.out)
