"""Every scenario by name: which script, with which arguments, on how many devices, what it raises, and its clean twin.

Other tests parametrize over it. A twin is the same script with --clean, its name ends in "-clean", and it raises
nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CONTEXT_MIB = 450
"""What a process costs each virtual device beside its allocator."""

OLDER_TORCH = os.environ.get("GPUMON_OLDER_TORCH") == "1"
"""Set by tests/virtual_gpu/versions.py."""

WITHOUT_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"} if OLDER_TORCH else {}
"""Before 2.15 torch keeps cuBLAS workspaces; sizes and figures that are derived from shapes are without them."""

UNHURRIED = ("--sleep", "0.3") if OLDER_TORCH else ()
"""For scenarios of several ranks: only every 100 ms does torch 2.8's NCCL let go of what a collective used that DDP
waits for by its future. Steps that take less find old buckets still there, or not, and new ones lie elsewhere."""


@dataclass(frozen=True)
class Scenario:
    """One training script with one set of arguments."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    """Processes; more than one are started by torchrun, each on a device of its own."""
    raises: tuple[str, ...] = ()
    """Codes of the findings it must raise; every other code is a false alarm."""
    bytes_per_step: int | None = None
    """What allocated grows by with each step, where it grows by the same bytes each time."""
    has_twin: bool = False
    memory_mib: int | None = None
    """Capacity of the device it is about; None where any will do."""
    fails: str = ""
    """The exception that ends it, by name; empty where it ends well."""
    virtual_only: bool = False
    """True where it cannot run on a real device, as when its peers do not exist."""

    @property
    def devices(self) -> int:
        """Devices it needs."""
        return self.ranks

    @property
    def options(self) -> dict[str, Any]:
        """What the `virtual_gpu` fixture is to be asked for."""
        memory = f"{self.memory_mib}MiB" if self.memory_mib else None
        return {"devices": self.devices, "profile": "a100-40", "memory": memory, "context": f"{CONTEXT_MIB}MiB"}

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.script}.py"

    @property
    def shows(self) -> str:
        """The script's first line."""
        return self.path.read_text().split('"""', 2)[1].splitlines()[0]

    @property
    def capacity(self) -> tuple[str, ...]:
        """Arguments that limit it on a larger device to what its allocator has on a device of `memory_mib`."""
        return ("--capacity", str(self.memory_mib - CONTEXT_MIB)) if self.memory_mib else ()

    def command(self, *more: object, python: str = sys.executable) -> list[str]:
        """The command line a user would type, with `more` arguments for the script."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        return [python, *(launcher if self.ranks > 1 else ()), str(self.path), *self.args, *map(str, more)]

    def twin(self) -> Scenario:
        """The same without what is wrong."""
        if not self.has_twin:
            raise ValueError(f"{self.name} has no clean twin")
        return replace(
            self,
            name=f"{self.name}-clean",
            args=(*self.args, "--clean"),
            raises=(),
            bytes_per_step=None,
            has_twin=False,
            fails="",
        )


PLAIN = (
    Scenario("mlp", "mlp"),
    Scenario("gpt-fp32", "gpt"),
    Scenario("gpt-bf16", "gpt", ("--precision", "bf16")),
    Scenario("gpt-fp16", "gpt", ("--precision", "fp16")),
    Scenario("bert-large", "bert_large"),
    Scenario("cnn", "cnn"),
    Scenario("accumulation", "accumulation"),
    Scenario("checkpointing-none", "checkpointing", ("--form", "none")),
    Scenario("checkpointing-reentrant", "checkpointing", ("--form", "reentrant")),
    Scenario("checkpointing-non-reentrant", "checkpointing", ("--form", "non-reentrant")),
    Scenario("gan", "gan"),
    Scenario("eval-between", "eval_between"),
    Scenario("generate-between", "eval_between", ("--generate",)),
    Scenario("variable-lengths", "variable_lengths"),
    Scenario("tied-embeddings", "tied_embeddings"),
    Scenario("untied-embeddings", "tied_embeddings", ("--untied",)),
    Scenario("sparse-embedding", "sparse_embedding"),
    Scenario("dense-embedding", "sparse_embedding", ("--dense",), raises=("dominant-embedding",)),
    Scenario("lora", "lora"),
    Scenario("ema", "ema", has_twin=True),
    Scenario("kept-list", "kept_in_variables", ("--what", "list")),
    Scenario("kept-data", "kept_in_variables", ("--what", "data")),
    Scenario("kept-batch", "kept_in_variables", ("--what", "batch")),
    Scenario("fsdp2", "fsdp2", ranks=2),
    Scenario("fsdp2-rank-0-of-8", "fsdp2", ("--fake-world", "8"), virtual_only=True),
    Scenario("fsdp1-rank-0-of-8", "fsdp1", ("--fake-world", "8"), virtual_only=True),
    Scenario("compile-module", "compile", ("--form", "module", "--backend", "aot_eager")),
    Scenario("compile-inplace", "compile", ("--form", "inplace", "--backend", "aot_eager")),
    Scenario("compile-fullgraph", "compile", ("--form", "fullgraph", "--backend", "aot_eager")),
    Scenario("compile-inductor", "compile", ("--form", "module", "--backend", "inductor")),
    Scenario("double-backward", "double_backward"),
    Scenario("loss-without-root", "loss_without_root"),
    Scenario("scaler-skips", "scaler_skips"),
    Scenario("exception-forward", "exception", ("--where", "forward")),
    Scenario("exception-backward", "exception", ("--where", "backward")),
    Scenario("exception-fatal", "exception", ("--where", "backward", "--fatal"), fails="Refused"),
    Scenario("hf-trainer", "hf_trainer"),
    Scenario(
        "hf-trainer-all",
        "hf_trainer",
        ("--accumulate", "2", "--bf16", "--checkpointing", "--evaluate", "--model", "bert"),
    ),
    Scenario("hf-trainer-compile", "hf_trainer", ("--compile", "--compile-backend", "aot_eager")),
)
"""Ordinary training, nothing wrong with it, except that an exception may end it."""

HOLDERS = ("list", "dict", "deque", "global", "attribute", "closure", "lru_cache", "generator", "traceback")
"""Ways in which tensor_leak.py holds what it leaks."""

_OUTPUTS = 128 * 64 * 4  # the perceptron's outputs, fp32
_HIDDEN = 128 * 1024 * 4  # its hidden activations, saved for backward

WRONG = (
    *(
        Scenario(
            f"tensor-leak-{holder}",
            "tensor_leak",
            ("--holder", holder),
            raises=("tensor-leak",),
            bytes_per_step=_OUTPUTS,
            has_twin=holder == "list",
        )
        for holder in HOLDERS
    ),
    Scenario("checkpoint-save", "checkpoint_save", raises=("tensor-leak",), has_twin=True),
    Scenario("retained-graph-loss", "retained_graph", raises=("retained-graph",), bytes_per_step=512, has_twin=True),
    Scenario(
        "retained-graph-output",
        "retained_graph",
        ("--keep", "output"),
        raises=("retained-graph",),
        bytes_per_step=_OUTPUTS + _HIDDEN,
        has_twin=True,
    ),
    Scenario("retained-checkpoint", "retained_checkpoint", raises=("retained-checkpoint",), has_twin=True),
    Scenario("checkpoint-device", "checkpoint_device", ranks=2, raises=("checkpoint-device",), has_twin=True),
    Scenario("grad-in-eval", "grad_in_eval", raises=("grad-in-eval",), has_twin=True),
    Scenario("outlier-batch", "outlier_batch", raises=("outlier-batch",), has_twin=True),
    Scenario("dominant-embedding", "dominant_embedding", raises=("dominant-embedding",), has_twin=True),
    Scenario("ddp", "ddp", ranks=2, raises=("bucket-copy",), has_twin=True),
    Scenario("ddp-gloo", "ddp", ("--backend", "gloo"), ranks=2, raises=("bucket-copy",), has_twin=True),
    Scenario("ddp-large", "ddp", ("--large",), ranks=2, raises=("bucket-copy",), has_twin=True),
    Scenario("foreach-peak", "foreach_peak", raises=("foreach-peak",), has_twin=True),
    Scenario("fragmentation", "fragmentation", raises=("fragmentation",), has_twin=True),
    Scenario("allocator-retries", "allocator_retries", raises=("allocator-retries",), has_twin=True, memory_mib=1024),
    Scenario("zeroed-gradients", "zeroed_gradients", raises=("zeroed-gradients",), has_twin=True),
    Scenario("host-leak", "host_leak", raises=("host-leak",), has_twin=True),
    Scenario("host-leak-worker", "host_leak", ("--where", "worker"), raises=("host-leak",), has_twin=True),
    Scenario("stray-context", "stray_context", ranks=2, raises=("stray-context",), has_twin=True),
    Scenario("other-process", "other_process", raises=("other-process",), has_twin=True),
    Scenario("rank-skew", "rank_skew", ranks=2, raises=("rank-skew",), has_twin=True),
    Scenario(
        "near-capacity",
        "near_capacity",
        raises=("near-capacity", "allocator-retries"),
        has_twin=True,
        memory_mib=1024,
    ),
    Scenario(
        "oom-ahead",
        "oom_ahead",
        raises=("oom-ahead", "allocator-retries"),
        has_twin=True,
        memory_mib=1024,
        fails="OutOfMemoryError",
    ),
    *(
        Scenario(
            f"oom-{where}",
            "oom",
            ("--where", where),
            has_twin=where == "forward",
            memory_mib=1024,
            fails="OutOfMemoryError",
        )
        for where in ("forward", "backward", "optimizer")
    ),
)
"""Each finding of the project's catalogue, and each place where memory runs out."""

SCENARIOS = (*PLAIN, *WRONG, *(scenario.twin() for scenario in (*PLAIN, *WRONG) if scenario.has_twin))
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
CLEAN = tuple(scenario for scenario in SCENARIOS if not scenario.raises and not scenario.fails)
