"""Every case: which script, with which arguments, what it needs, and what of it gpumon is known to get wrong."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent / "cases"
MODULES = {
    "scikit-learn": "sklearn", "sentence-transformers": "sentence_transformers", "torch-geometric": "torch_geometric",
    "stable-baselines3": "stable_baselines3",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One script with one set of arguments."""

    name: str
    script: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    requires: tuple[str, ...] = ()
    """Packages, by the names that PyPI has for them."""
    launches: bool = False
    """The script starts its ranks itself; otherwise torchrun does."""
    unranked: bool = False
    """What it starts are processes of one job, but no ranks: none knows of another."""
    says: bool = True
    """It prints lines that begin with "case: ", the same in each run."""
    stepless: bool = False
    """It updates parameters by hand and marks no step: gpumon says that it counts none, and how to help."""
    raises: tuple[str, ...] = ()
    """Codes of the warnings that are right."""
    peaks_elsewhere: bool = False
    """Its highest moment lies after its last step, which closes nothing more."""
    fails: Mapping[str, str] = field(default_factory=dict)
    """Check of test_wild.py → what is wrong, with the figures."""

    @property
    def devices(self) -> int:
        return self.ranks

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(MODULES.get(name, name) for name in self.requires)

    def command(self) -> list[str]:
        """The command line a user would type."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        launcher = torchrun if self.ranks > 1 and not self.launches else []
        return [sys.executable, *launcher, str(FOLDER / f"{self.script}.py"), *self.args]


CASES = (
    Case("nanogpt", "nanogpt"),
    Case("nanogpt-accumulation", "nanogpt", ("--accumulate", "4", "--dtype", "bfloat16")),
    Case("nanogpt-fp16-scaler", "nanogpt", ("--accumulate", "2", "--dtype", "float16", "--clip", "1")),
    Case("nanogpt-compile", "nanogpt", ("--compile",)),
    Case("nanogpt-checkpointing", "nanogpt", ("--checkpointing",)),
    Case("nanogpt-ddp", "nanogpt", ("--accumulate", "2"), ranks=2),
    Case("gan", "gan"),
    Case("vae", "vae"),
    Case("resnet-ema", "resnet_ema"),
    Case("lstm", "lstm"),
    Case("muon-adamw", "muon_adamw"),
    Case("ppo", "ppo"),
    Case("dqn", "dqn"),
    Case("sac", "sac"),
    Case("mp-spawn-ddp", "mp_spawn", ranks=2, launches=True),
    Case("hogwild", "hogwild", ranks=2, launches=True, unranked=True),
    Case("fsdp2-dcp", "fsdp2_dcp", ranks=2),
    Case("tensor-parallel", "tensor_parallel", ranks=2),
    Case("lbfgs", "lbfgs"),
    Case("optimizer-in-backward", "optimizer_in_backward"),
    Case("manual-grad", "manual_grad"),
    Case("torch-func", "torch_func"),
    Case("hf-trainer", "hf_trainer", ("--evaluate",), requires=("transformers", "accelerate")),
    Case("hf-trainer-bf16", "hf_trainer", ("--bf16", "--accumulate", "2"), requires=("transformers", "accelerate")),
    Case("hf-trainer-bert-fp16", "hf_trainer", ("--model", "bert", "--fp16"), requires=("transformers", "accelerate")),
    Case("hf-trainer-checkpointing", "hf_trainer", ("--checkpointing",), requires=("transformers", "accelerate")),
    Case("hf-trainer-ddp", "hf_trainer", ("--evaluate",), ranks=2, requires=("transformers", "accelerate")),
    Case("peft-lora", "hf_trainer", ("--model", "llama", "--lora", "--bf16"), requires=("peft", "transformers")),
    Case("trl-sft", "trl_trainer", requires=("trl", "transformers")),
    Case("trl-sft-lora", "trl_trainer", ("--lora", "--accumulate", "2"), requires=("trl", "peft", "transformers")),
    Case("trl-dpo", "trl_trainer", ("--method", "dpo"), requires=("trl", "transformers")),
    Case("trl-dpo-lora", "trl_trainer", ("--method", "dpo", "--lora"), requires=("trl", "peft", "transformers")),
    Case("accelerate-fp16", "accelerate_loop", ("--precision", "fp16"), requires=("accelerate",)),
    Case("accelerate-bf16", "accelerate_loop", ("--precision", "bf16", "--accumulate", "3"), requires=("accelerate",)),
    Case("accelerate-two", "accelerate_loop", ranks=2, requires=("accelerate",)),
    Case("accelerate-two-accumulation", "accelerate_loop", ("--accumulate", "2"), ranks=2, requires=("accelerate",)),
    Case("lightning", "lightning_fit", requires=("lightning",)),
    Case("lightning-16-mixed", "lightning_fit", ("--precision", "16-mixed", "--clip", "1"), requires=("lightning",)),
    Case("lightning-accumulation", "lightning_fit", ("--accumulate", "3"), requires=("lightning",)),
    Case("lightning-two", "lightning_fit", ("--devices", "2"), ranks=2, launches=True, requires=("lightning",)),
    Case("timm", "timm_train", requires=("timm",)),
    Case("diffusers-ema", "diffusers_ddpm", requires=("diffusers",)),
    Case("torchvision-classify", "vision", requires=("torchvision",)),
    Case("torchvision-segment", "vision", ("--task", "segment"), requires=("torchvision",)),
    Case("sb3-ppo", "sb3", requires=("stable-baselines3", "gymnasium")),
    Case("sb3-dqn", "sb3", ("--algorithm", "dqn"), requires=("stable-baselines3", "gymnasium")),
    Case("sb3-sac", "sb3", ("--algorithm", "sac"), requires=("stable-baselines3", "gymnasium")),
    Case("pyg", "pyg", requires=("torch-geometric",)),
    Case("sentence-transformers", "sentence_transformer", requires=("sentence-transformers", "datasets")),
    Case("ultralytics", "yolo", requires=("ultralytics",)),
    Case("deepspeed-zero1", "deepspeed_zero", ("--stage", "1"), ranks=2, requires=("deepspeed",)),
    Case("deepspeed-zero2", "deepspeed_zero", ("--stage", "2"), ranks=2, requires=("deepspeed",)),
    Case("deepspeed-zero3", "deepspeed_zero", ("--stage", "3"), ranks=2, requires=("deepspeed",)),
)

BY_NAME = {case.name: case for case in CASES}
