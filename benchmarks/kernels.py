"""Peaks of single kernels, published for physical GPUs, beside those on the virtual GPU, in about two minutes.

`python benchmarks/kernels.py [--write docs/physical-kernels.md]`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from common import options, write

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from physical.kernels import MIB, PROFILES, Row, constants, difference, exact, measured, rows

HEAD = """linkedin/Liger-Kernel publishes the peak memory of its kernels and of plain PyTorch modules beside them
(`benchmark/data/all_benchmark_data.csv`, here at commit ead96b61). The plain ones need no Triton:
`tests/physical/kernels.py` builds them anew, with the inputs and the order of operations of each benchmark, and runs
them on the virtual GPU of the same architecture. Nothing in it was fitted to a published peak, except what
[Inferred](#inferred) names. The published figures say MB and are MiB; *equal* means equal to the last digit
printed, which is a float32.
"""

FOOT = """## Inferred

- **cuBLAS workspaces.** The peaks of modules with matrix products fit only if each thread that multiplies keeps a
  workspace: 8,519,680 B on the A100, 3090 and 4090, 33,554,432 B on the H100. Forward and backward make two. torch
  before 2.15 does so by itself; here `TORCH_CUBLAS_WORKSPACE_CACHE=1` asks for it. The published rows do not say their
  torch: their dates are from September 2024 to July 2026.
- **A batched outer product** (the angles of `rope` and `llama4_rope`) takes no workspace in torch 2.15. The published
  peaks contain one, so a product of 2×2 is made first.
- **Blocks larger than requested.** The allocator hands out a cached block whole if at most 1 MiB of it would remain.
  So a peak depends on what is cached, by up to 1 MiB a tensor. The benchmarks measure speed before memory and do not
  empty the cache between sizes. Here every size runs once first, in the order of the file; Liger's own kernels, which
  ran in between, do not.
- **The median counts**, of five iterations here, of ten in the benchmarks. In some iterations autograd's thread still
  holds gradients of the one before.
- **Routing.** `fused_moe` routes at random. The virtual GPU computes no values, so the number of tokens of each expert
  comes from another random generator of the same distribution.
- **Preferences.** In `kto_loss` half of the sequences are preferred, because which ones were is not known.

## Left in: where the two differ

- **A constant.** The rows of `embedding`, `fused_linear_cpo_loss`, `fused_linear_orpo_loss`, `fused_linear_simpo_loss`
  and `kto_loss` are higher than ours by one number of MiB in each configuration, whatever the size. Memory that does
  not depend on the size is not the module's: the process held it from its earlier runs. For `embedding` there is an
  explanation: the benchmark compiles the module as a third provider. 12,240 MiB are three times the 4,080 MiB of the
  eight tables of D 4096, and 13,770 MiB are these and twice the 765 MiB of the eight tables of D 768. For the others
  there is none yet; Liger's loss is compiled there, too.
- **`distill_jsd_loss`.** Not explained. The rows are of December 3rd 2024, the first script in the repository is of
  January 31st 2025.
- **`fused_linear_orpo_loss`, T 4096.** Not run. The published peaks grow by 7 bytes for each logit, those of T 1024 by
  14, as the script in the repository does. It was another script; that one needs more than 80 GiB at the largest size.
- **`multi_token_attention`.** A convolution in bfloat16. `sparse_multi_token_attention` is the same convolution in
  float32, and equal but for one row. cuDNN's workspaces are 0 bytes on the virtual GPU;
  at L 1024 what is missing, 48.97 MiB, is about three activations of 16 MiB, so transposed copies probably.
- **`sparse_multi_token_attention`, L 32.** 5.5 KiB of 464. Not explained.
- **`fused_neighborhood_attention`, 3090, T 128.** 1 MiB of 70: a block larger than requested. The same row of the H100
  is equal. Others of this kernel are off by 0.002 to 1 MiB, up to 0.6 %.

## Not compared

Liger's own kernels (Triton), compiled modules, and Megatron's SwiGLU and cross entropy.
"""


def main() -> None:
    args = options(__doc__, write=True).parse_args()
    published = rows()
    found = measured(published)
    more = constants(published, found)
    table = "\n".join(lines(published, found, more))
    machine = f"Measured on the virtual GPU ({', '.join(sorted(set(PROFILES.values())))}), torch {version('torch')}"
    text = f"{HEAD}\n{summary(published, found, more)}\n{table}\n\n{FOOT}"
    write("Published peaks of single kernels", text, args.write, machine)


def summary(published: list[Row], found: list[int | None], more: dict[tuple[str, str], int]) -> str:
    ran = [(row, peak) for row, peak in zip(published, found, strict=True) if peak is not None]
    count = len(published)
    near = sum(abs(difference(*pair)) <= 0.01 for pair in ran)
    nearer = sum(abs(difference(*pair)) <= 0.001 for pair in ran)
    same = sum(exact(*pair) for pair in ran)
    held = [row for row, peak in ran if constant(row, peak, more)]
    total = near + len(held)
    return f"""Of {count} rows {len(ran)} ran. **{same} are equal, {nearer} within 0.1 %, {near} within 1 %** \
({100 * near / count:.1f} % of all); {len(ran) - near} are beyond.
Of those beyond, {len(held)} differ by a constant of their configuration, the median of its rows' differences: \
without it they are
within 0.1 %. Counted so, which is a fit, {total} rows ({100 * total / count:.1f} %) are within 1 %.
"""


def constant(row: Row, peak: int, more: dict[tuple[str, str], int]) -> bool:
    """More than 1 % off, and within 0.1 % of the published peak with what the configuration's rows have in common."""
    return abs(difference(row, peak)) > 0.01 and abs(difference(row, peak + more[row.series])) <= 0.001


def lines(published: list[Row], found: list[int | None], more: dict[tuple[str, str], int]) -> Iterator[str]:
    yield "| kernel | GPUs | rows | equal | within 0.1 % | within 1 % | largest difference | constant, MiB |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for kernel in sorted({row.kernel for row in published}):
        mine = [pair for pair in zip(published, found, strict=True) if pair[0].kernel == kernel]
        ran = [(row, peak) for row, peak in mine if peak is not None]
        gpus = ", ".join(sorted({PROFILES[row.gpu] for row, _ in mine}))
        counts = (
            sum(exact(*pair) for pair in ran),
            sum(abs(difference(*pair)) <= 0.001 for pair in ran),
            sum(abs(difference(*pair)) <= 0.01 for pair in ran),
        )
        worst = 100 * max((difference(*pair) for pair in ran), key=abs)
        largest = "0" if counts[0] == len(ran) else f"{worst:+.3f} %"
        held = {row.series for row, peak in ran if constant(row, peak, more)}
        constants_mib = ", ".join(f"{more[series] / MIB:,.2f}" for series in sorted(held))
        number = f"{len(mine)}" if len(ran) == len(mine) else f"{len(mine)} ({len(ran)} ran)"
        yield f"| {kernel} | {gpus} | {number} | {' | '.join(map(str, counts))} | {largest} | {constants_mib} |"


if __name__ == "__main__":
    main()
