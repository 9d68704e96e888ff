"""Hugging Face's Trainer and TRL's with gpumon's callback, as examples/ has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library_examples import EXAMPLES, PEAKS, alone, changed_lines, text_of, watched, without_gpumon

pytestmark = pytest.mark.integration
pytest.importorskip("transformers")

CALLBACK = "gpumon_agent.transformers.Callback()"
SAVED = """
import json
json.dump([trainer.state.log_history, trainer.evaluate()], open("history.json", "w"))
"""
SLOWLY = """
import time

class Slow(transformers.TrainerCallback):
    def on_step_begin(self, *args, **kwargs): time.sleep(0.2)
    def on_prediction_step(self, *args, **kwargs): time.sleep(1.1)


class Rows"""


def history(folder: Path) -> list[dict[str, Any]]:
    """What the Trainer's own state has logged of its steps, without what the clock says."""
    logged, evaluated = json.loads((folder / "history.json").read_text())
    assert not any(name.startswith("gpumon/") for name in evaluated)
    return [each for each in logged if "loss" in each]


def test_the_trainer(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    text = text_of("transformers_trainer") + SAVED
    text = text.replace("class Rows", SLOWLY, 1).replace(CALLBACK, f"Slow(), {CALLBACK}")
    run = watched(text, virtual_gpu, tmp_path / "run")
    steps = 2 * 12
    assert run.steps == steps
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [steps] * 3
    assert run.phases["eval"] == 2  # of the first epoch; later ones end no step
    logged = history(run.folder)
    assert [each["step"] for each in logged] == [4, 8, 12, 16, 20, 24]
    assert all(each.keys() >= PEAKS for each in logged)
    assert "agent-part-off" not in run.findings
    assert run.progress[0] == ("transformers", "train", 0, 1, 12)
    told = [each[1:] for each in run.progress]
    assert {(0, 12), (1, 12)} <= {(epoch, batches) for stage, epoch, _, batches in told if stage == "train"}
    assert ("validate", 1, 2, 2) in told
    assert all(batch <= 12 for _, _, batch, _ in told)


def test_the_losses_are_the_same_without_it_and_with_two(tmp_path: Path) -> None:
    assert changed_lines("transformers_trainer") == 1
    two = text_of("transformers_trainer").replace(CALLBACK, f"{CALLBACK}, {CALLBACK}")
    texts = {tmp_path / "plain": without_gpumon("transformers_trainer") + SAVED, tmp_path / "two": two + SAVED}
    alone(texts)
    plain, ours = map(history, texts)
    assert len(plain) == 6
    assert plain == [{name: value for name, value in each.items() if "gpumon/" not in name} for each in ours]


def test_trl_without_gpumon_run(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("trl")
    assert changed_lines("trl_sft") == 1
    run = watched(EXAMPLES / "trl_sft.py", virtual_gpu, tmp_path / "run", launched=False)
    assert run.steps == 10
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [10] * 3
    assert run.progress[0] == ("transformers", "train", 0, 1, 10)
    assert run.output.count("'gpumon/backward_peak_bytes': ") == 2
