"""Keras on PyTorch with gpumon's callback, as examples/ has it."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from library_examples import PEAKS, alone, changed_lines, text_of, watched, without_gpumon

pytestmark = pytest.mark.integration
if find_spec("keras") is None:  # to import it is to choose its backend
    pytest.skip("keras is not installed", allow_module_level=True)

STEPS = 2 * 10
CALLBACK = "gpumon_agent.keras.Callback()"
SAVED = """
import json
json.dump(model.history.history, open("history.json", "w"))
"""
SLOWLY = """
import time

class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, *args, **kwargs): time.sleep(0.15)
    def on_test_batch_begin(self, *args, **kwargs): time.sleep(0.6)


keras.utils"""


def epochs(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("launched", [True, False])
def test_fit(launched: bool, virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    text = text_of("keras_fit") + SAVED
    if launched:
        text = text.replace("keras.utils", SLOWLY, 1).replace(CALLBACK, f"Slow(), {CALLBACK}")
    run = watched(text, virtual_gpu, tmp_path / "run", launched=launched)
    assert run.steps == STEPS
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [STEPS] * 3
    assert run.phases["eval"] == 2  # of the first epoch; later ones end no step
    assert [each["epoch"] for each in epochs(run.folder)] == ["0", "1"]
    assert all(each.keys() >= PEAKS for each in epochs(run.folder))
    assert '"gpumon/peak_bytes": [' in (run.folder / "history.json").read_text()
    assert "agent-part-off" not in run.findings
    assert run.progress[0] == ("keras", "train", 1, 1, 10)
    if launched:
        told = [each[1:] for each in run.progress]
        assert {(1, 10), (2, 10)} <= {(epoch, batches) for stage, epoch, _, batches in told if stage == "train"}
        assert {(1, None), (2, None)} <= {(epoch, batches) for stage, epoch, _, batches in told if stage == "validate"}


def test_the_losses_are_the_same_without_it_and_with_two(tmp_path: Path) -> None:
    assert changed_lines("keras_fit") == 1
    two = text_of("keras_fit").replace(CALLBACK, f"{CALLBACK}, {CALLBACK}")
    texts = {tmp_path / "plain": without_gpumon("keras_fit"), tmp_path / "two": two}
    alone(texts)
    plain, ours = map(epochs, texts)
    assert len(plain) == 2
    assert plain == [{name: value for name, value in each.items() if "gpumon/" not in name} for each in ours]
