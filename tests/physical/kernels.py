"""The plain modules whose peaks Liger-Kernel published, built anew and run on the virtual GPU.

`measured` runs rows of tests/data/liger_memory.csv, those of each GPU in a process on its virtual GPU.

Each function below makes the inputs, the parameters and the operations of one benchmark, in its order, because the peak
depends on what is alive at the same time. It also makes the parameters of the Liger module that the benchmark held
beside the plain one (`beside`). What a benchmark does was read in linkedin/Liger-Kernel, benchmark/scripts, and in
test/utils.py and test/chunked_loss, at the commit that added its rows.
"""

from __future__ import annotations

import csv
import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "liger_memory.csv"
MIB = 1 << 20
PROFILES = {
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA H100 80GB HBM3": "h100-80",
    "NVIDIA H100 PCIe": "h100-80",
}
"""The published name of each GPU → the profile of its virtual one."""

ITERATIONS = 5
"""Of which the median counts, as in the benchmarks, which take ten. In the first there are no gradients yet. In some,
autograd's thread still holds the last gradients of the iteration before (2 of 48 times in `llama4_rope`)."""


@dataclass(frozen=True)
class Row:
    """One published peak."""

    kernel: str
    provider: str
    mode: str
    x_name: str
    x: int
    config: dict[str, Any]
    gpu: str
    date: str
    published_mib: float
    """As printed: a float32 (`torch.quantile`), in units of 2**20 bytes although the file says MB."""

    def size(self, name: str) -> int:
        """A dimension: the one on the x axis, or one of the configuration."""
        value = self.x if name == self.x_name else self.config[name]
        return int(value)

    @property
    def series(self) -> tuple[str, str]:
        """What its curve in the benchmark has in common: kernel and configuration."""
        return self.kernel, json.dumps(self.config)


@dataclass(frozen=True)
class Step:
    """What one iteration of a benchmark does."""

    forward: Callable[[], Any]
    backward: Callable[[Any], object]
    """Gets what forward returned."""

    whole: bool = False
    """The benchmark measured forward and backward together in all of its modes."""


def rows() -> list[Row]:
    with FILE.open() as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Row(
                *(line[name] for name in ("kernel", "provider", "mode", "x_name")),
                int(line["x"]),
                json.loads(line["config"]),
                line["gpu"],
                line["date"],
                float(line["published_mib"]),
            )
            for line in lines
        ]


def left_out(row: Row) -> bool:
    """For the largest of these rows, published with 61 GiB, the script that the repository has needs more than 80."""
    return row.kernel == "fused_linear_orpo_loss" and row.config["T"] == 4096


# ------------------------------------------------------------------------------------------------------------ running


def measured(of: Sequence[Row]) -> list[int | None]:
    """Bytes: each row's peak on its virtual GPU; None if it is left out. Raises CalledProcessError if a run fails."""
    every = rows()
    found: dict[int, int | None] = {}
    for gpu, profile in PROFILES.items():
        numbers = [number for number, row in enumerate(every) if row.gpu == gpu and row in of]
        if not numbers:
            continue
        # torch kept cuBLAS's workspaces until 2.14, and the benchmarks ran with torch 2.4 to 2.11 or so
        environment = {**os.environ, "TORCH_CUBLAS_WORKSPACE_CACHE": "1"}
        command = [sys.executable, "-m", "gpumon.virtual_gpu", "run", "-p", profile, "--"]
        child = [sys.executable, __file__, *map(str, numbers)]
        ran = subprocess.run([*command, *child], env=environment, check=True, stdout=subprocess.PIPE)
        found.update(zip(numbers, json.loads(ran.stdout), strict=True))
    return [found[every.index(row)] for row in of]


def peaks(of: Sequence[Row]) -> Iterator[int | None]:
    """In this process. Rows of one benchmark stand together."""
    import torch

    torch.cuda.init()
    gc.freeze()  # torch itself need not be searched again for each row
    for (kernel, _), group in groupby(of, key=lambda row: (row.kernel, row.x_name)):
        build = KERNELS[kernel]
        torch._C._cuda_clearCublasWorkspaces()  # each benchmark was a process of its own
        torch.cuda.empty_cache()
        mine = list(group)
        # The benchmarks measured speed first. What is cached since then decides which blocks are larger than requested.
        for row in {(row.x, str(row.config)): row for row in mine if not left_out(row)}.values():
            step = build(row)
            step.backward(step.forward())
            del step
            gc.collect()
        for row in mine:
            if left_out(row):
                yield None
                continue
            step = build(row)
            yield _peak(step, "full" if step.whole else row.mode)
            del step
            gc.collect()


def _peak(step: Step, mode: str) -> int:
    import torch

    kept = step.forward() if mode == "backward" else None
    found = []
    for _ in range(ITERATIONS):
        torch.cuda.reset_peak_memory_stats()
        if mode == "backward":
            step.backward(kept)
        elif mode == "forward":
            step.forward()
        else:
            step.backward(step.forward())
        found.append(torch.cuda.max_memory_allocated())
    return sorted(found)[ITERATIONS // 2]


def difference(row: Row, peak: int) -> float:
    """Ours beside the published one: 0.01 is 1 % more."""
    return peak / MIB / row.published_mib - 1


def exact(row: Row, peak: int) -> bool:
    """Equal but for the last bit of a float32."""
    return abs(difference(row, peak)) <= 2**-23


def constants(of: Sequence[Row], found: Sequence[int | None]) -> dict[tuple[str, str], int]:
    """Kernel and configuration → bytes by which the published peaks are larger than ours, in the median of its rows."""
    more: dict[tuple[str, str], list[int]] = {}
    for row, peak in zip(of, found, strict=True):
        if peak is not None:
            more.setdefault(row.series, []).append(round(row.published_mib * MIB) - peak)
    return {series: round(median(values)) for series, values in more.items()}


# ------------------------------------------------------------------------------------------------------- common pieces


def _dtype(row: Row) -> Any:
    import torch

    return {"torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}[row.config["dtype"]]


def _leaf(*shape: int, dtype: Any = None) -> Any:
    import torch

    return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=True)


def _scalar(forward: Callable[[], Any], *, retain: bool = False) -> Step:
    return Step(forward, lambda loss: loss.backward(retain_graph=retain))


def _fixed(forward: Callable[[], Any], gradient: Any) -> Step:
    """The gradient was made once, before the iterations."""
    return Step(forward, lambda y: y.backward(gradient, retain_graph=True))


def _random(forward: Callable[[], Any], x: Any, mode: str, made: Callable[[Any], Any]) -> Step:
    """The gradient is made in each iteration, but before them if only backward is measured."""
    if mode == "backward":
        return _fixed(forward, made(x))
    return Step(forward, lambda y: y.backward(made(y), retain_graph=True))


def _linear(inputs: int, outputs: int, dtype: Any, *, bias: bool = False) -> Any:
    import torch

    return torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device="cuda")


# ------------------------------------------------------------------------------------------------- losses over logits


def cross_entropy(row: Row) -> Step:
    import torch

    tokens, vocabulary = row.size("B") * row.size("T"), row.size("V")
    logits = _leaf(tokens, vocabulary)
    target = torch.randint(vocabulary, (tokens, 1), device="cuda").squeeze(1)
    return _scalar(lambda: torch.nn.functional.cross_entropy(logits, target))


def kl_div(row: Row) -> Step:
    import torch

    shape = row.size("B") * row.size("T"), row.size("V")
    logs = _leaf(*shape).log_softmax(-1)
    target = torch.randn(*shape, device="cuda").softmax(-1)
    return _scalar(lambda: torch.nn.functional.kl_div(logs, target, reduction="batchmean"), retain=True)


def tvd(row: Row) -> Step:
    import torch

    shape = row.size("B") * row.size("T"), row.size("V")
    p = _leaf(*shape).softmax(-1)
    q = torch.randn(*shape, device="cuda").softmax(-1)

    def forward() -> Any:
        distance = torch.abs(p - q) / 2.0
        return torch.sum(distance) / p.size(0)

    return _scalar(forward, retain=True)


def _divergence(log_q: Any, log_p: Any) -> Any:
    """Jensen and Shannon's, β ½, in float32; reduced at once, as the benchmarks did until October 2024."""
    import torch
    from torch.nn.functional import kl_div

    log_p, log_q = log_p.float(), log_q.float()
    middle = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
    one = 0.5 * kl_div(torch.log(middle), log_p, reduction="batchmean", log_target=True)
    return one + 0.5 * kl_div(torch.log(middle), log_q, reduction="batchmean", log_target=True)


def _divergence_by_token(log_q: Any, log_p: Any) -> Any:
    """The same, reduced by token first."""
    import torch
    from torch.nn.functional import kl_div

    log_p, log_q = log_p.float(), log_q.float()
    middle = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
    one = 0.5 * kl_div(torch.log(middle), log_p, reduction="none", log_target=True).sum(-1)
    both = one + 0.5 * kl_div(torch.log(middle), log_q, reduction="none", log_target=True).sum(-1)
    return (both / log_q.shape[0]).sum()


def jsd(row: Row) -> Step:
    import torch

    if row.x_name == "BT":  # 2026
        shape, loss = (row.x, row.size("vocab_size")), _divergence_by_token
    else:
        shape, loss = (row.size("B") * row.size("T"), row.size("V")), _divergence
    logs = _leaf(*shape).log_softmax(-1)
    target = torch.randn(*shape, device="cuda").log_softmax(-1)
    if row.x_name == "BT":
        return _random(lambda: loss(logs, target), None, row.mode, torch.randn_like)
    return _scalar(lambda: loss(logs, target), retain=True)


# ---------------------------------------------------------------------------------------- a head of logits and its loss


def fused_linear_cross_entropy(row: Row) -> Step:
    import torch

    hidden, vocabulary, dtype = row.size("H"), row.size("V"), _dtype(row)
    head, beside = (_linear(hidden, vocabulary, dtype) for _ in range(2))
    x = _leaf(row.x, hidden, dtype=dtype)
    target = torch.randint(vocabulary, (row.x, 1), device="cuda").squeeze(1)

    def forward(beside: Any = beside) -> Any:
        logits = head(x)
        return torch.nn.functional.cross_entropy(logits, target)

    return _scalar(forward)


def fused_linear_jsd(row: Row) -> Step:
    import torch

    hidden, vocabulary, dtype = row.size("H"), row.size("V"), _dtype(row)
    student, teacher = (_linear(hidden, vocabulary, dtype) for _ in range(2))  # shared with the Liger module
    x = torch.rand(row.x, hidden, requires_grad=True, dtype=dtype, device="cuda")
    known = torch.rand(row.x, hidden, dtype=dtype, device="cuda")

    def forward() -> Any:
        logits = student(x)
        others = teacher(known)
        logs = torch.log_softmax(logits / 1.0, dim=-1)
        other_logs = torch.log_softmax(others / 1.0, dim=-1)
        return _divergence(logs, other_logs).to(dtype)

    return _scalar(forward)


def _mean_log_probabilities(logits: Any, target: Any, ignored: int = -100) -> Any:
    """Of each sequence's tokens."""
    import torch

    counted = target != ignored
    labels = torch.where(target == ignored, 0, target)
    of_tokens = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (of_tokens * counted).sum(-1) / counted.sum(-1)


def _preference(loss_of: Callable[[Any, Any], Any]) -> Callable[[Row], Step]:
    """A loss over pairs: the first half of the batch was chosen, the second rejected."""

    def build(row: Row) -> Step:
        import torch
        from torch.nn.functional import cross_entropy

        hidden, vocabulary, dtype = row.size("H"), row.size("V"), _dtype(row)
        head, beside = (_linear(hidden, vocabulary, dtype) for _ in range(2))
        x = _leaf(row.x, row.size("T"), hidden, dtype=dtype)
        target = torch.randint(vocabulary, (row.x, row.size("T")), device="cuda")
        half = row.x // 2

        def forward(beside: Any = beside) -> Any:
            outputs = x @ head.weight.t()
            logits = outputs.float()
            likelihood = cross_entropy(logits[:half].view(-1, vocabulary), target[:half].view(-1))
            logs = _mean_log_probabilities(logits, target)
            del outputs
            return likelihood - loss_of(logs[:half], logs[half:]).mean()

        return _scalar(forward)

    return build


def _odds_ratio(chosen: Any, rejected: Any) -> Any:
    import torch

    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    return 0.1 * torch.nn.functional.logsigmoid(odds)


def _contrast(margin: float) -> Callable[[Any, Any], Any]:
    def loss(chosen: Any, rejected: Any) -> Any:
        from torch.nn.functional import logsigmoid

        logits = chosen - rejected - margin if margin else chosen - rejected
        return logsigmoid(0.1 * logits) * 1.0 + logsigmoid(-0.1 * logits) * 0.0

    return loss


def kto_loss(row: Row) -> Step:
    """Which sequences are preferred was random: half of them here."""
    import torch

    hidden, vocabulary, length, dtype = row.size("H"), row.size("V"), row.size("T"), _dtype(row)
    head, reference, *beside = (_linear(hidden, vocabulary, dtype, bias=True) for _ in range(4))
    x = torch.randn(row.x, length, hidden, device="cuda", dtype=dtype)
    target = torch.randint(vocabulary, (row.x, length), device="cuda")
    known = torch.randn(row.x, length, hidden, device="cuda", dtype=dtype)
    kl = torch.randn(1, device="cuda", dtype=dtype)
    order = torch.arange(row.x, device="cuda")
    chosen, rejected = order[: row.x // 2], order[row.x // 2 :]
    ignored = row.config["ignore_index"]

    def referred() -> Any:
        with torch.no_grad():
            logits = known @ reference.weight.t()
            logits = logits + reference.bias
            logs = _mean_log_probabilities(logits, target, ignored)
            return logs[chosen], logs[rejected]

    def forward(beside: Any = beside) -> Any:
        outputs = x @ head.weight.t()
        outputs = outputs + head.bias
        logits = outputs.float()
        logs = _mean_log_probabilities(logits, target, ignored)
        good, bad = logs[chosen], logs[rejected]
        good_logits, bad_logits = logits[chosen], logits[rejected]
        del outputs, logits
        good_known, bad_known = referred()
        good_losses = 1 - torch.sigmoid(0.1 * (good - good_known - kl))
        bad_losses = 1 - torch.sigmoid(0.1 * (kl - (bad - bad_known)))
        loss = torch.cat((good_losses, bad_losses), 0).mean()
        good_logits.detach().sum()
        bad_logits.detach().sum()
        return loss

    return _scalar(forward)


def fused_linear_grpo_loss(row: Row) -> Step:
    import torch

    hidden, vocabulary, length, dtype = row.size("H"), row.size("V"), row.size("T"), _dtype(row)
    head, reference, *beside = (_linear(hidden, vocabulary, dtype) for _ in range(4))
    x = _leaf(row.x, length, hidden, dtype=dtype)
    tokens = torch.randint(0, vocabulary, (row.x, length), device="cuda").unsqueeze(-1)
    mask = torch.ones(row.x, length, device="cuda")
    advantages = torch.randn(row.x, dtype=dtype, device="cuda").unsqueeze(1)
    known = torch.randn(row.x, length, hidden, dtype=dtype, device="cuda")

    def forward(beside: Any = beside) -> Any:
        logits = x @ head.weight.t()
        log_probabilities = torch.log_softmax(logits.float(), dim=-1)
        logs = log_probabilities.gather(-1, tokens).squeeze(-1)
        with torch.no_grad():
            known_logits = known @ reference.weight.t()
            known_probabilities = torch.log_softmax(known_logits.float(), dim=-1)
            known_logs = known_probabilities.gather(-1, tokens).squeeze(-1)
        ratio = logs - logs.detach()
        if row.config["importance_sampling_level"] == "sequence":
            ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        weights = torch.exp(ratio)
        clipped = torch.clamp(weights, 0.8, 1.2)
        losses = -torch.min(weights * advantages, clipped * advantages)
        divergence = torch.exp(known_logs - logs) - (known_logs - logs) - 1.0
        losses = losses + 0.1 * divergence
        return (losses * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    return _scalar(forward)


def _distillation(loss_of: Callable[[Any, Any], Any]) -> Callable[[Row], Step]:
    """Half cross entropy, half a distance of the student's logits to the teacher's, who is twice as wide."""

    def build(row: Row) -> Step:
        import torch

        hidden, vocabulary, dtype = row.size("H"), row.size("V"), _dtype(row)
        student, teacher, *beside = (_linear(size, vocabulary, dtype) for size in (hidden // 2, hidden) * 2)
        made = torch.rand(row.x, hidden // 2, device="cuda", dtype=dtype)
        beside += [made, made.clone()]
        x = made.clone().requires_grad_(True)
        known = torch.rand(row.x, hidden, device="cuda", dtype=dtype)
        target = torch.randint(0, vocabulary, (row.x,), device="cuda")

        def logits_of() -> Any:
            outputs = x @ student.weight.t()
            with torch.no_grad():
                known_outputs = known @ teacher.weight.t()
            logits, known_logits = outputs.float(), known_outputs.float()
            return logits, known_logits, torch.nn.functional.cross_entropy(logits, target)

        def forward(beside: Any = beside) -> Any:
            logits, known_logits, hard = logits_of()
            logits /= 1.0
            known_logits /= 1.0
            return 0.5 * hard + 0.5 * loss_of(logits, known_logits)

        return _scalar(forward)

    return build


def _distilled_divergence(logits: Any, known: Any) -> Any:
    from torch.nn.functional import kl_div, log_softmax

    logs, known_logs = log_softmax(logits, dim=-1), log_softmax(known, dim=-1)
    middle = 0.5 * logs.exp() + 0.5 * known_logs.exp()
    log_middle = middle.log()
    one = kl_div(log_middle, logs, reduction="batchmean", log_target=True)
    other = kl_div(log_middle, known_logs, reduction="batchmean", log_target=True)
    return 0.5 * other + 0.5 * one


def _distilled_cosine(logits: Any, known: Any) -> Any:
    from torch.nn.functional import cosine_similarity, normalize

    direction = normalize(logits, p=2, dim=-1)
    known_direction = normalize(known, p=2, dim=-1)
    return (1.0 * (1 - cosine_similarity(direction, known_direction, dim=-1))).mean()


# --------------------------------------------------------------------------------------------------------------- norms


def _root_mean_square(x: Any) -> Any:
    """x in float32, divided by the root of its mean square, as transformers' LlamaRMSNorm."""
    import torch

    variance = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + 1e-6)


def rms_norm(row: Row) -> Step:
    import torch

    shape, dtype = (row.size("M"), row.x), _dtype(row)
    weight, beside = (torch.ones(row.x, device="cuda", requires_grad=True) for _ in range(2))
    x = torch.randn(*shape, dtype=dtype, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def forward(beside: Any = beside) -> Any:
        normal = _root_mean_square(x.to(torch.float32))
        return weight * normal.to(dtype)

    return _fixed(forward, gradient)


def fused_add_rms_norm(row: Row) -> Step:
    import torch

    shape, dtype = (row.size("M"), row.x), _dtype(row)
    weight, *beside = (torch.ones(row.x, device="cuda", requires_grad=True) for _ in range(4))
    x, residual = _leaf(*shape, dtype=dtype), _leaf(*shape, dtype=dtype)
    gradients = torch.randn_like(x), torch.randn_like(x)

    def forward(beside: Any = beside) -> Any:
        added = x.to(torch.float32) + residual.to(torch.float32)
        normal = _root_mean_square(added)
        return weight * normal.to(dtype), added.to(dtype)

    return Step(forward, lambda both: torch.autograd.backward(both, gradients))


def layer_norm(row: Row) -> Step:
    import torch

    norm, beside = (torch.nn.LayerNorm(row.x, eps=1e-6, device="cuda") for _ in range(2))
    x = torch.randn(row.size("M"), row.x, dtype=_dtype(row), device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    return _fixed(lambda beside=beside: norm(x), gradient)


def group_norm(row: Row) -> Step:
    import torch

    groups = row.x // row.size("channels_per_group")
    norm, beside = (torch.nn.GroupNorm(groups, row.x, eps=1e-6, device="cuda") for _ in range(2))
    x = torch.randn(row.size("M"), row.x, row.size("H"), dtype=_dtype(row), device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    return replace(_fixed(lambda beside=beside: norm(x), gradient), whole=True)


def megatron_rms_norm(row: Row) -> Step:
    import torch

    norm = torch.nn.RMSNorm(row.x, eps=1e-6, device="cuda").to(torch.bfloat16)
    x = _leaf(row.size("S"), row.size("B"), row.x, dtype=torch.bfloat16)
    return Step(lambda: norm(x), lambda y: y.sum().backward())


# --------------------------------------------------------------------------------------------------------- activations


def relu_squared(row: Row) -> Step:
    import torch

    x = _leaf(row.x, dtype=_dtype(row))
    return _random(lambda: torch.square(torch.relu(x)), x, row.mode, torch.ones_like)


def softmax(row: Row) -> Step:
    import torch

    x = _leaf(row.x, dtype=_dtype(row))
    return _random(lambda: torch.softmax(x, dim=-1), x, row.mode, torch.ones_like)


def sparsemax(row: Row) -> Step:
    import torch

    x = torch.randn(row.size("B") * row.size("T"), row.x, dtype=_dtype(row), device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def forward() -> Any:
        falling, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(falling, dim=-1)
        places = torch.arange(1, row.x + 1, device="cuda", dtype=x.dtype).view(1, row.x)
        bound = 1 + places * falling
        support = bound > sums
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        supported = (falling * support).sum(dim=-1, keepdim=True)
        threshold = (supported - 1) / count
        return torch.clamp(x - threshold, min=0)

    return _fixed(forward, gradient)


def megatron_swiglu(row: Row) -> Step:
    import torch

    x = _leaf(row.size("S"), row.size("B"), 2 * row.x, dtype=torch.bfloat16)

    def forward() -> Any:
        x.grad = None
        gate, up = torch.chunk(x, 2, -1)
        return torch.nn.functional.silu(gate) * up

    return Step(forward, lambda y: y.sum().backward())


class _Gated:
    """transformers' LlamaMLP: three linear layers without bias."""

    def __init__(self, hidden: int, inner: int, activation: str, dtype: Any) -> None:
        from torch.nn.functional import gelu, silu

        self.gate, self.up = (_linear(hidden, inner, dtype) for _ in range(2))
        self.down = _linear(inner, hidden, dtype)
        self.activation = silu if activation == "silu" else lambda x: gelu(x, approximate="tanh")

    def __call__(self, x: Any) -> Any:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def gated(row: Row) -> Step:
    import torch

    dtype, hidden = _dtype(row), row.size("hidden_size")
    batch = row.size("B") if "B" in row.config else row.size("bsz")
    x = _leaf(batch, row.x, hidden, dtype=dtype)
    layer = _Gated(hidden, row.size("intermediate_size"), row.config["hidden_act"], dtype)
    if row.provider == "deepspeed_tiled":
        return _random(lambda: _tiled(layer, x, row.size("num_shards")), x, row.mode, torch.randn_like)
    return _random(lambda: layer(x), x, row.mode, torch.randn_like)


def _tiled(layer: Callable[[Any], Any], x: Any, shards: int) -> Any:
    """DeepSpeed's TiledMLP: forward without gradients by shards of the sequence, and again in backward."""
    import torch

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            with torch.no_grad():
                outputs = [layer(shard) for shard in torch.chunk(x, shards, dim=-2)]
            return torch.cat(outputs, dim=-2)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (saved,) = ctx.saved_tensors
            flat = saved.detach().view(-1, saved.shape[-1])
            incoming = torch.chunk(gradient.view(-1, gradient.shape[-1]), shards, dim=0)
            collected = torch.zeros_like(flat)
            places = torch.chunk(collected, shards, dim=0)
            for shard, place, part in zip(torch.chunk(flat, shards, dim=0), places, incoming, strict=True):
                shard.requires_grad_(True)
                shard.grad = place
                with torch.enable_grad():
                    output = layer(shard)
                torch.autograd.backward(output, part)
            return collected.view(saved.shape)

    return Tiled.apply(x)


# ------------------------------------------------------------------------------------------------ embeddings, attention


def embedding(row: Row) -> Step:
    import torch

    table, beside = (torch.nn.Embedding(row.x, row.size("D"), device="cuda") for _ in range(2))
    tokens = torch.randint(0, row.x, (row.size("B"), row.size("T")), device="cuda")
    return Step(lambda beside=beside: table(tokens), lambda y: y.backward(torch.randn_like(y)))


def rope(row: Row) -> Step:
    import torch

    dtype, length = _dtype(row), row.x if row.x_name == "T" else row.size("seq_len")
    size = (row.x if row.x_name == "H" else row.size("hidden_size")) // row.size("num_q_heads")
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2, device="cuda").float() / size))
    q = _leaf(1, length, row.size("num_q_heads"), size, dtype=dtype).transpose(1, 2)
    k = _leaf(1, length, row.size("num_kv_heads"), size, dtype=dtype).transpose(1, 2)
    gradients = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    cos, sin = _rotation(frequencies, positions, dtype)

    def turned(x: Any) -> Any:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]  # in this order, for backward goes the other way
        return torch.cat((-second, first), dim=-1)

    def forward(beside: Any = (frequencies, positions)) -> Any:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return (q * c) + (turned(q) * s), (k * c) + (turned(k) * s)

    return Step(forward, lambda out: torch.autograd.grad(out, (q, k), gradients, retain_graph=True))


def _angles(frequencies: Any, positions: Any) -> Any:
    """A batched outer product, for which the torch of the time had a workspace of cuBLAS; torch 2.15 takes none."""
    import torch

    _ = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    return (frequencies[None, :, None].float().expand(1, -1, 1) @ positions[:, None, :].float()).transpose(1, 2)


def _rotation(frequencies: Any, positions: Any, dtype: Any) -> Any:
    import torch

    with torch.no_grad():
        angles = _angles(frequencies, positions)
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(dtype), both.sin().to(dtype)


def llama4_rope(row: Row) -> Step:
    import torch

    dtype, length = _dtype(row), row.x if row.x_name == "T" else row.size("seq_len")
    size = (row.x if row.x_name == "H" else row.size("hidden_size")) // row.size("num_q_heads")
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2, device="cuda").float() / size))
    q = _leaf(1, length, row.size("num_q_heads"), size, dtype=dtype)
    k = _leaf(1, length, row.size("num_kv_heads"), size, dtype=dtype)
    gradients = torch.randn_like(q), torch.randn_like(k)
    positions = torch.arange(length, device="cuda").unsqueeze(0)
    with torch.no_grad():
        angles = _angles(frequencies, positions)
        turns = torch.polar(torch.ones_like(angles), angles) * 1.0
        del angles

    def forward(beside: Any = (frequencies, positions)) -> Any:
        complex_q = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        complex_k = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
        q_out = torch.view_as_real(complex_q * turns[:, :, None, :]).flatten(3)
        k_out = torch.view_as_real(complex_k * turns[:, :, None, :]).flatten(3)
        return q_out.type_as(q), k_out.type_as(k)

    return Step(forward, lambda out: torch.autograd.grad(out, (q, k), gradients, retain_graph=True))


def fused_neighborhood_attention(row: Row) -> Step:
    import torch

    dtype, batch, hidden = _dtype(row), row.size("batch_size"), row.size("hidden_size")
    heads = row.size("num_heads")
    query, key, value, out, *beside = (_linear(hidden, hidden, dtype, bias=True) for _ in range(8))
    x = torch.randn(batch, row.x, hidden, dtype=dtype, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)

    def forward(beside: Any = beside) -> Any:
        q, k, v = (layer(x) for layer in (query, key, value))
        q, k, v = (y.view(batch, row.x, heads, -1).transpose(1, 2) for y in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (1.0 / math.sqrt(hidden // heads))
        near = torch.zeros(row.x, row.x, device="cuda", dtype=torch.bool)
        scores = scores.masked_fill(~near, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v)
        mixed = mixed.transpose(1, 2).contiguous().view(batch, row.x, hidden)
        return out(mixed)

    return _fixed(forward, gradient)


def multi_token_attention(row: Row) -> Step:
    import torch

    dtype, channels, kernel = _dtype(row), row.size("C_in"), row.size("K")
    sizes = (channels, channels, kernel, kernel), (channels,)
    weight, bias, *beside = (_leaf(*size, dtype=dtype) for size in sizes * 2)
    x = torch.randn(row.size("B"), channels, row.x, row.x, dtype=dtype, device="cuda")
    gradient = torch.randn_like(x)
    x.requires_grad_(True)
    sparse = row.kernel.startswith("sparse")

    def forward(beside: Any = beside) -> Any:
        mask = torch.tril(torch.ones(row.x, row.x, dtype=torch.bool, device="cuda")).view(1, 1, row.x, row.x)
        lowest = torch.tensor(-1e9, device="cuda", dtype=dtype)
        zero = torch.tensor(0.0, device="cuda", dtype=dtype)
        scores = x.masked_fill(~mask, lowest)
        spread = _sparse(scores) if sparse else torch.softmax(scores, dim=-1)
        out = torch.nn.functional.conv2d(spread, weight, bias, padding=kernel // 2)
        return out.masked_fill(~mask, zero)

    return _fixed(forward, gradient)


def _sparse(z: Any) -> Any:
    import torch

    falling, _ = torch.sort(z, dim=-1, descending=True)
    sums = torch.cumsum(falling, dim=-1)
    places = torch.arange(1, z.shape[-1] + 1, device="cuda", dtype=z.dtype).view(1, 1, 1, -1)
    positive = falling > -1e8
    condition = (1 + places * falling > sums) & positive
    count = torch.sum(condition, dim=-1, keepdim=True)
    safe = torch.max(count, torch.ones_like(count))
    sum_there = torch.gather(sums, dim=-1, index=safe.long() - 1)
    threshold = (sum_there - 1) / safe.to(z.dtype)
    threshold = torch.where(count == 0, torch.full_like(threshold, float("inf")), threshold)
    return torch.clamp(z - threshold, min=0)


# -------------------------------------------------------------------------------------------------- mixture of experts


def fused_moe(row: Row) -> Step:
    """Which tokens each expert gets is random but known here: the virtual GPU computes no `where`."""
    import torch

    dtype, tokens, experts = _dtype(row), row.size("T"), row.size("E")
    hidden, inner, top = row.size("H"), row.size("intermediate_dim"), row.size("K")
    x = _leaf(tokens, hidden, dtype=dtype)
    gate_up = _leaf(experts, 2 * inner, hidden, dtype=dtype) * 0.02
    down = _leaf(experts, hidden, inner, dtype=dtype) * 0.02
    logits = torch.randn(tokens, experts, device="cuda")
    chosen = torch.topk(logits, top, dim=-1).indices.to(torch.int32)
    weights = torch.softmax(torch.gather(logits, 1, chosen.long()), dim=-1).to(dtype).requires_grad_(True)
    del logits
    routed = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(42)).topk(top, dim=-1).indices
    places = [torch.nonzero(routed.t() == expert) for expert in range(experts)]

    def forward() -> Any:
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = torch.nn.functional.one_hot(chosen.long(), num_classes=experts).permute(2, 1, 0)
            hit = torch.arange(experts, device="cuda").unsqueeze(1)
        for expert in range(experts):
            position, token = places[expert].cuda().unbind(1)
            current = x[token]
            gate, up = torch.nn.functional.linear(current, gate_up[expert]).chunk(2, dim=-1)
            current = torch.nn.functional.silu(gate) * up
            current = torch.nn.functional.linear(current, down[expert])
            current = current * weights[token, position, None]
            final.index_add_(0, token, current.to(final.dtype))
        del mask, hit
        return final

    return _random(forward, x, row.mode, torch.randn_like)


KERNELS: dict[str, Callable[[Row], Step]] = {
    "cross_entropy": cross_entropy,
    "distill_cosine_loss": _distillation(_distilled_cosine),
    "distill_jsd_loss": _distillation(_distilled_divergence),
    "embedding": embedding,
    "fused_add_rms_norm": fused_add_rms_norm,
    "fused_linear_cpo_loss": _preference(_contrast(0.0)),
    "fused_linear_cross_entropy": fused_linear_cross_entropy,
    "fused_linear_grpo_loss_sequence": fused_linear_grpo_loss,
    "fused_linear_grpo_loss_token": fused_linear_grpo_loss,
    "fused_linear_jsd": fused_linear_jsd,
    "fused_linear_orpo_loss": _preference(_odds_ratio),
    "fused_linear_simpo_loss": _preference(_contrast(5.0)),
    "fused_moe": fused_moe,
    "fused_neighborhood_attention": fused_neighborhood_attention,
    "geglu": gated,
    "group_norm": group_norm,
    "jsd": jsd,
    "kl_div": kl_div,
    "kto_loss": kto_loss,
    "layer_norm": layer_norm,
    "llama4_rope": llama4_rope,
    "megatron_rms_norm": megatron_rms_norm,
    "megatron_swiglu": megatron_swiglu,
    "multi_token_attention": multi_token_attention,
    "relu_squared": relu_squared,
    "rms_norm": rms_norm,
    "rope": rope,
    "softmax": softmax,
    "sparse_multi_token_attention": multi_token_attention,
    "sparsemax": sparsemax,
    "swiglu": gated,
    "tiled_geglu": gated,
    "tiled_swiglu": gated,
    "tvd": tvd,
}


if __name__ == "__main__":
    known = rows()
    print(json.dumps(list(peaks([known[int(number)] for number in sys.argv[1:]]))))
