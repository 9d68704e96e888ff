"""Peaks computed from a config.json against transformers' own models trained on PyTorch's own allocator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from transformers_configs import MODELS

from gpumon.analysis.estimate.kernels import CUBLAS_WORKSPACE_HOPPER, Hardware
from gpumon.analysis.estimate.traced import PhaseBytes
from gpumon.analysis.estimate.workload import PRECISIONS, OptimizerChoice, Workload

WITHIN = 0.005
TOO_MUCH = {("llama-1b", "autocast"): 0.08, ("llama-1b", "eager-autocast"): 0.08, ("t5-small", "one"): 0.015}
"""Gradients of what is used twice, as a tied embedding is: where they are added is not traced as it is on a device."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")

DECODERS = ("gpt2", "llama")
FORMS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "eager": {"attention": "eager"},
    "autocast": {"precision": "bf16-autocast"},
    "bf16": {"precision": "bf16"},
    "eager-autocast": {"attention": "eager", "precision": "fp16-autocast"},
    "checkpointing": {"checkpointing": True},
    "one": {"batch": 1, "sequence": 64},
    "inference": {"inference": True},
    "cache": {"inference": True, "cache": True, "precision": "bf16"},
}

GENERATE = [name for name, (config, _, _) in MODELS.items() if config["model_type"] in DECODERS]


def measure(cases: str) -> None:
    """Prints, per case, bytes at load, at each phase's peak and end in the third iteration, and reserved at most."""
    import contextlib
    import json

    import torch
    import transformers

    for case in json.loads(cases):
        config = transformers.AutoConfig.for_model(**case["config"])
        config._attn_implementation = case["attention"]
        half = torch.bfloat16 if case["precision"].startswith("bf16") else torch.float16
        torch.set_default_dtype(torch.float32 if case["precision"] not in ("bf16", "fp16") else half)
        name = case["config"]["architectures"][0]
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        numbers = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        model = model.to_empty(device="cuda")
        model.tie_weights()
        model.train(not case["inference"])
        if case["checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        figures = {"load": torch.cuda.memory_allocated()}
        optimizer = None if case["inference"] else torch.optim.AdamW(model.parameters(), lr=1e-3)
        autocast = torch.autocast("cuda", half) if "autocast" in case["precision"] else contextlib.nullcontext()

        def close(phase: str, figures: dict = figures) -> None:
            figures[phase] = (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()

        for _ in range(3):
            if "vit" in case["name"]:
                side = config.image_size
                given = {"pixel_values": torch.empty(case["batch"], 3, side, side, device="cuda", dtype=numbers)}
            else:
                given = {"input_ids": torch.zeros(case["batch"], case["sequence"], dtype=torch.int64, device="cuda")}
            if not case["inference"]:
                one = "Classification" in name
                given["labels"] = torch.zeros_like(given["input_ids"]) if not one else torch.zeros(
                    case["batch"], dtype=torch.int64, device="cuda")  # fmt: skip
            elif "T5" in name:
                given["decoder_input_ids"] = given["input_ids"].clone()
            if case["inference"] and ("CausalLM" in name or "LMHead" in name or "T5" in name):
                given["use_cache"] = case["cache"]
                if case["cache"]:
                    given["logits_to_keep"] = 1  # as generate() asks of the prompt
            close("between")
            with autocast, torch.set_grad_enabled(not case["inference"]):
                output = model(**given)
            close("forward")
            if optimizer is not None:
                output.loss.backward()
                close("backward")
                optimizer.step()
                close("optimizer")
                optimizer.zero_grad()
            del output, given
        figures["reserved"] = torch.cuda.max_memory_reserved()
        print(json.dumps(figures), flush=True)
        model = optimizer = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def case(name: str, form: str) -> dict[str, Any]:
    config, batch, sequence = MODELS[name]
    config = {**config, **dict.fromkeys(LAYERS, 2)}  # layers are alike
    default = {"attention": "sdpa", "precision": "fp32", "checkpointing": False, "inference": False, "cache": False}
    default["within"] = TOO_MUCH.get((name, form), WITHIN)
    vision = {"sequence": sequence} if name.startswith("vit") else {}
    return {"name": name, "config": config, "batch": batch, "sequence": sequence, **default, **FORMS[form], **vision}


def work(case: dict[str, Any]) -> Workload:
    return Workload(
        batch=case["batch"],
        sequence=case["sequence"],
        precision=PRECISIONS[case["precision"]],
        optimizer=OptimizerChoice.parse("adamw"),
        checkpointing=case["checkpointing"],
        inference=case["inference"],
        kv_cache=case["sequence"] if case["cache"] else 0,
        attention=case["attention"],
        hardware=Hardware(multiprocessors=132, cublas_workspace=CUBLAS_WORKSPACE_HOPPER),
    )


def computed(case: dict[str, Any]) -> tuple[PhaseBytes, ...]:
    from gpumon.analysis.estimate import from_config

    return from_config.of(case["config"]).play(work(case)).phases


@pytest.mark.skipif("GPUMON_VIRTUAL_GPU_PYTHON" in os.environ, reason="written down from this Python's transformers")
@pytest.mark.timeout(600)
def test_peaks_of_known_transformers_are_those_of_the_allocator(virtual_gpu: Callable[..., Any]) -> None:
    cases = [case(name, form) for name in MODELS for form in FORMS if form != "cache" or name in GENERATE]
    printed = virtual_gpu(profile="h200").run(measure, json.dumps(cases), timeout=500).stdout.splitlines()
    wrong = []
    for asked, line in zip(cases, printed, strict=True):
        measured = json.loads(line)
        phases = computed(asked)
        load = next(phase for phase in phases if phase.phase == "load")
        kind = " ".join(str(asked[key]) for key in ("name", "attention", "precision", "checkpointing", "inference"))
        if load.end != measured["load"]:
            wrong.append(f"{kind}: load {load.end} for {measured['load']}")
        theirs = max(measured[phase][0] for phase in ("forward", "backward", "optimizer") if phase in measured)
        ours = max(phase.peak for phase in phases if phase.phase != "load")
        if abs(ours / theirs - 1) > asked["within"]:
            wrong.append(f"{kind}: peak {ours} for {theirs} ({100 * (ours / theirs - 1):+.1f} %)")
    assert not wrong, "\n".join(wrong)
