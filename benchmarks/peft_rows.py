"""PEFT's published memory, repeated: `python benchmarks/peft_rows.py [--only NAME] [--write docs/physical-peft.md]`.

huggingface/peft trains Llama-3.2-3B with each of its methods on an NVIDIA L40S and publishes, among others, the mean of
`torch.cuda.memory_allocated()` after each of the first 250 steps. Here the same model (from its configuration, without
its values), adapter and optimizer do the same steps on a virtual L40S, each row in its own process.

Run by hand, without a GPU; nothing is downloaded. Beside torch it needs, without being a dependency of the project:
`pip install git+https://github.com/huggingface/peft@d787f51bb transformers accelerate scikit-learn`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

from common import options, write

from gpumon import virtual_gpu

PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "peft_rows.json"
FORK = multiprocessing.get_context("fork")
WORKERS = os.cpu_count() or 1
BATCH, STEPS, BUCKET, EMPTIED_EVERY, LONGEST = 4, 20, 80, 10, 768
SPREAD = 0.35
NOT_SUPPORTED = (
    *("_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_inv_ex", "_linalg_solve_ex"),
    *("_fft_r2c", "_fft_c2r", "_fft_c2c"),
)
MODEL_BYTES = 2 * 3_212_749_824
NOTE = """
PEFT reads `memory_allocated()` after each step, less 2 MiB that its script had reserved before. Weights, gradients and
optimizer states are alive then, and so are the step's outputs, the logits and the key/value cache that transformers
keeps unless told not to, and the cuBLAS workspaces, which torch 2.13 kept (`TORCH_CUBLAS_WORKSPACE_CACHE=1` here). The
model's weights are the same 6,425.5 MB in every row; "of the rest" divides the difference by the published figure less
these. A row and its twin with another learning rate count as two.

The four rows beyond 0.1 % (OSF −20 MB; AdaMSS, SHiRA, RandLoRA +10 to +12 MB) are not explained.

Published with torch 2.13.0+cu130, transformers 5.13.1 and peft 0.19.2.dev0 at d787f51bb (LoKr: 5.15.0, 0.20.1.dev0).
All rows here ran with that peft. With 0.21.2 OSF keeps other factors (13.1 GB instead of 16.4), and the 58 others that
could be tried with it were within 0.1 %, but for RandLoRA (0.14 %).

Inferred:

- The lengths of the batches. PEFT publishes 211,719 tokens for the first 250 batches (time × tokens/s), 210.7 a sample.
  Here their lengths are lognormal with that mean, sorted and padded as in PEFT's script; 20 batches, not 250. Of three
  tries this was the closest for plain LoRA of rank 32 (spread 0.35, 20 batches: −0.015 %; 0.35, 40: +0.043 %; 0.45, 40:
  +0.057 %). Nothing else was fitted, and all rows have the same batches.
- Values do not exist. SVD, QR, inverse, solve and FFT return zeros of the right shape. BOFT's extension, FRoD's basis,
  AdaMSS's clusters (equal here) and SHiRA's mask (the first elements here) are replaced by tensors of the same size.
- The loss before training is computed on two batches of 4 × 768 tokens, not 25.
- The prefix of `tokens50-init_prefix` is not initialized from a text; its parameters are the same.

The step's own peak is not compared: the published maximum is that of an evaluation.
"""
LLAMA = {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--only", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    published = json.loads(PUBLISHED.read_text())
    rows = [row for row in published["rows"] if not args.only or args.only in row["experiment"]]
    if args.child:
        import peft

        print(
            json.dumps(
                {
                    "peft": peft.__version__,
                    "rows": all_rows(rows, lengths(published["tokens_of_250_batches"] / 1000 - 1)),
                }
            )
        )
        return
    environment = virtual_gpu.environment(profile="l40s", memory=f"{48 * WORKERS}GiB")
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child", *sys.argv[1:]],
            env={**environment, "TORCH_CUBLAS_WORKSPACE_CACHE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        virtual_gpu.remove_session(environment["VGPU_SESSION"])
    found = json.loads(done.stdout.splitlines()[-1])
    torch, transformers = (importlib.metadata.version(name) for name in ("torch", "transformers"))
    machine = f"Virtual L40S, torch {torch}, transformers {transformers}, peft {found['peft']}"
    write("PEFT's published memory, repeated", page(rows, found["rows"]), args.write, machine)


def all_rows(rows: list[dict[str, Any]], lengths: list[int]) -> list[dict[str, Any]]:
    """Each row in its own process, forked from this one, which has imported what they need but not used CUDA."""
    import transformers.models.llama.modeling_llama

    del transformers

    def forked(row: dict[str, Any]) -> dict[str, Any]:
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=in_fork, args=(row, lengths, sender))
        process.start()
        sender.close()
        try:
            found: dict[str, Any] = receiver.recv()
        except EOFError:
            process.join()
            found = {"error": f"exit code {process.exitcode}"}
        process.join()
        print(row["experiment"], found, file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(forked, rows))


def in_fork(row: dict[str, Any], lengths: list[int], sender: Connection) -> None:
    sender.send(repeated(row, lengths))


def lengths(tokens: float) -> list[int]:
    """The padded lengths of the batches, in order, if a sample has `tokens` tokens on average.

    PEFT sorts each 80 samples by length, longest first, and pads batches of 4 to their longest. The lengths of samples
    are inferred: lognormal with a deviation of `SPREAD`.
    """
    count = STEPS * BATCH
    samples = [math.exp(NormalDist(0, SPREAD).inv_cdf((i + 0.5) / count)) for i in range(count)]
    random.Random(0).shuffle(samples)
    found = [min(LONGEST, round(tokens * sample / mean(samples))) for sample in samples]
    return [
        length
        for first in range(0, count, BUCKET)
        for length in sorted(found[first : first + BUCKET], reverse=True)[::BATCH]
    ]


def repeated(row: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Trains as PEFT's method_comparison/MetaMathQA/run.py does, and reads what it reads when it reads it."""
    import peft
    import torch
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers import AutoModelForCausalLM, LlamaConfig

    replaced = without_values()
    torch.manual_seed(0)
    torch.nn.Linear(1, 1).to("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_reserved()  # 2 MiB: what PEFT's script subtracts

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA), dtype=torch.bfloat16)
    kind = None
    if row["adapter"]:
        settings = dict(row["adapter"])
        kind = settings.pop("peft_type")
        config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](task_type="CAUSAL_LM", **settings)
        if kind in STAND_INS:
            STAND_INS[kind](config)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=row.get("autocast_adapter_dtype", True))
    optimizer = an_optimizer(model, row)
    trainable = model.get_nb_trainable_parameters()[0] if kind else model.num_parameters()

    model.eval()
    tokens = torch.zeros(BATCH, LONGEST, dtype=torch.long).to("cuda")
    base = model.disable_adapter() if kind else torch.no_grad()
    with base, torch.inference_mode():  # the loss of the model before training
        for _ in range(2):
            outputs = model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    del outputs, tokens
    model.train()

    allocated = []
    for step, length in enumerate(lengths, 1):
        inputs = torch.zeros(BATCH, length, dtype=torch.long)
        batch = {"input_ids": inputs.to("cuda"), "attention_mask": torch.ones_like(inputs).to("cuda")}
        batch["labels"] = batch["input_ids"].clone()
        optimizer.zero_grad()
        outputs = model(**batch, num_items_in_batch=BATCH * length)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if kind in ("ADALORA", "ADAMSS"):
            model.base_model.update_and_allocate(step)
        allocated.append(torch.cuda.memory_allocated() - before)
        if step % EMPTIED_EVERY == 0:
            torch.cuda.empty_cache()
    del replaced
    return {"allocated_bytes": mean(allocated), "trainable": trainable}


def without_values() -> Any:
    """Replaces the kernels of cuSOLVER and cuFFT, which the virtual GPU does not have, by zeros of the same shapes.

    Those of the CPU too: some methods factorize each weight there, which takes long and means nothing here.

    Returns the library: the replacements end with it.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    library = torch.library.Library("aten", "IMPL")

    def replace(name: str) -> None:
        operator = getattr(torch.ops.aten, name).default

        def zeros(*args: Any, **kwargs: Any) -> Any:
            described = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
            shapes = operator(*described[0], **described[1])
            device = next(value.device for value in args if isinstance(value, torch.Tensor))
            return tree_map_only(
                torch.Tensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).zero_(),
                shapes,
            )

        library.impl(name, zeros, "CUDA")
        library.impl(name, zeros, "CPU")

    for name in NOT_SUPPORTED:
        replace(name)
    return library


# ------------------------------------------- parts of PEFT whose shapes or time depend on values, by adapter type


def tuner(name: str) -> Any:
    return importlib.import_module(f"peft.tuners.{name}")


class BlockDiagonal:
    """BOFT's CUDA extension, compiled at first use: (N, D, H, H) to (N, D·H, D·H) and back."""

    @staticmethod
    def forward(blocks: Any) -> tuple[Any]:
        count, number, size, _ = blocks.shape
        return (blocks.new_empty(count, number * size, number * size),)

    @staticmethod
    def backward(_: Any, blocks: Any) -> tuple[Any]:
        return (blocks.new_empty(blocks.shape),)


def boft(_: Any) -> None:
    tuner("boft.layer")._FBD_CUDA = BlockDiagonal


def frod(_: Any) -> None:
    """The common basis of a kind of projection: square, on the CPU. And sparse tensors as if without duplicates."""
    import torch

    def coalesce(sparse: Any) -> Any:
        indices, values = sparse._indices().clone(), sparse._values().clone()
        return torch.sparse_coo_tensor(indices, values, sparse.shape, is_coalesced=True)

    torch.library.impl("aten::_coalesce", "SparseCUDA", coalesce)
    tuner("frod.model")._projection_from_weights = lambda matrices, _: matrices[0].new_zeros(2 * [matrices[0].shape[1]])


def adamss(_: Any) -> None:
    """Clusters of equal size. On real weights k-means makes them, of different sizes with the same sum."""
    import torch

    tuner("adamss.layer").clustering_Z = lambda rows, count, _: (torch.arange(rows.shape[0]) % count, count)


def shira(config: Any) -> None:
    """As many trained elements, in the first rows instead of random ones: `nonzero` needs the mask's values."""
    import torch

    def mask(base: Any, r: int, **_: Any) -> Any:
        elements = torch.zeros(base.weight.numel())
        elements[: r * sum(base.weight.shape)] = 1
        return elements.view(base.weight.shape)

    config.mask_fn = mask


STAND_INS: dict[str, Callable[[Any], None]] = {"BOFT": boft, "FROD": frod, "ADAMSS": adamss, "SHIRA": shira}


def an_optimizer(model: Any, row: dict[str, Any]) -> Any:
    import torch
    from peft.optimizers import create_lorafa_optimizer

    settings = row.get("optimizer_kwargs", {"lr": 1e-4, "weight_decay": 0.1})
    if row.get("optimizer_type") == "lora-fa":
        return create_lorafa_optimizer(model, **settings)
    return torch.optim.AdamW(model.parameters(), **settings)


# --------------------------------------------------------------------------------------------------------- page


def page(rows: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    pairs = [(row, got) for row, got in zip(rows, found, strict=True) if "error" not in got]
    more = {row["experiment"]: got["allocated_bytes"] - row["allocated_bytes"] for row, got in pairs}
    whole = {row["experiment"]: 100 * more[row["experiment"]] / row["allocated_bytes"] for row, _ in pairs}
    rest = {
        row["experiment"]: 100 * more[row["experiment"]] / (row["allocated_bytes"] - MODEL_BYTES) for row, _ in pairs
    }
    lines = [
        f"Of {len(rows)} rows {within(whole, 0.1)} are within 0.1 % of the published figure, {within(whole, 0.5)} "
        f"within 0.5 %, {within(whole, 1)} within 1 %;\n{len(pairs) - within(whole, 1)} are beyond, and "
        f"{len(rows) - len(pairs)} could not be repeated. Without the model's weights, the same in every row,\n"
        f"{within(rest, 0.1)} are within 0.1 %, {within(rest, 0.5)} within 0.5 %, {within(rest, 1)} within 1 %, "
        f"{within(rest, 3)} within 3 %.",
        NOTE,
        "| adapter | published MB | repeated MB | difference MB | % | % of the rest | trainable parameters |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for row, got in zip(rows, found, strict=True):
        name, published = row["experiment"], f"{row['allocated_bytes'] / 1e6:,.1f}"
        if "error" in got:
            lines.append(f"| {name} | {published} | not repeated: {got['error']} |  |  |  |  |")
            continue
        same = "equal" if got["trainable"] == row["trainable"] else f"{got['trainable']:,}, not {row['trainable']:,}"
        lines.append(
            f"| {name} | {published} | {got['allocated_bytes'] / 1e6:,.1f} | {more[name] / 1e6:+,.1f} "
            f"| {whole[name]:+.3f} | {rest[name]:+.2f} | {same} |"
        )
    return "\n".join(lines) + "\n"


def within(differences: dict[str, float], percent: float) -> int:
    return sum(abs(difference) <= percent for difference in differences.values())


if __name__ == "__main__":
    main()
