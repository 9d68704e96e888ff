"""Published figures, computed: bert-large's load, what stands phase by phase, and Hugging Face's anatomy of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers_configs import MODELS

from gpumon.analysis.estimate import families
from gpumon.analysis.estimate.memory import Memory, PhaseBytes
from gpumon.analysis.estimate.replay import Replay
from gpumon.analysis.estimate.workload import Optimizer, Workload
from gpumon_agent import wire

MIB = 2**20
BERT_LARGE = families.parse(MODELS["bert-large"][0])
ANATOMY = Workload(batch=4, sequence=512, optimizer=Optimizer.parse("adamw"))
"""Hugging Face's "anatomy of model's memory": batch 4, 512 tokens, AdamW."""


def played(work: Workload, memory: Memory | None = None) -> list[PhaseBytes]:
    tape = families.record(BERT_LARGE, work)
    return Replay(families.model_of(BERT_LARGE, tape), work, tape, memory or Memory()).run()


def phase(phases: list[PhaseBytes], name: str, iteration: int) -> PhaseBytes:
    return next(found for found in phases if (found.phase, found.iteration) == (name, iteration))


def test_bert_large_takes_1288_mib_of_a_device_that_has_been_touched() -> None:
    """As Hugging Face measured it: one element first, which takes a small segment that the model's biases then use."""
    memory = Memory()
    memory.allocator.malloc(4)
    before = memory.allocator.reserved
    load = played(ANATOMY, memory)[0]
    assert load.reserved - before == 1288 * MIB


def test_each_phase_of_an_adam_loop_holds_what_is_known_of_it() -> None:
    phases = played(ANATOMY)
    weights = families.describe(BERT_LARGE).bytes

    def held(name: str, iteration: int) -> tuple[float, ...]:
        """Weights, gradients and states at the end of a phase, in multiples of the weights."""
        lines = phase(phases, name, iteration).at_end
        return tuple((part or 0) / weights for part in (lines.weights, lines.gradients, lines.optimizer))

    assert held(wire.LOAD, 0) == (1, 0, 0)
    assert held(wire.FORWARD, 1) == (1, 0, 0)
    assert (phase(phases, wire.FORWARD, 1).at_end.activations or 0) > 2 * weights
    assert held(wire.BACKWARD, 1) == (1, 1, 0)
    assert held(wire.OPTIMIZER, 1) == (1, 1, 2)
    assert held(wire.FORWARD, 2) == (1, 0, 2)
    assert held(wire.OPTIMIZER, 2) == (1, 1, 2)
    second = max(found.peak for found in phases if found.iteration == 2)
    assert second == max(found.peak for found in phases) > 5 * weights


@pytest.mark.parametrize(
    ("attention", "form", "set_to_none", "peak", "reserved"),
    [
        ("sdpa", "foreach", True, 7_094, 7_714),
        ("eager", "foreach", True, 10_547, 11_132),
        ("eager", "loop", False, 11_822, 12_056),
    ],
)
def test_the_anatomy_of_memory_from_todays_settings_to_those_of_2022(
    attention: str, form: str, set_to_none: bool, peak: int, reserved: int
) -> None:
    """`peak` and `reserved` in MiB: PyTorch 2.15 on a virtual V100. docs/estimate.md tells the steps."""
    work = replace(ANATOMY, attention=attention, set_to_none=set_to_none, optimizer=Optimizer("adamw", form))
    phases = played(work)
    assert max(found.peak for found in phases) / MIB == pytest.approx(peak, rel=0.005)
    assert max(found.reserved for found in phases) / MIB == pytest.approx(reserved, rel=0.025)
