"""Lightning's Trainer and Fabric with gpumon's callback, as examples/ has them."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from library_examples import AT_FIRST, EXAMPLES, PEAKS, alone, changed_lines, text_of, watched, without_gpumon

pytestmark = pytest.mark.integration
pytest.importorskip("lightning")

STEPS = 2 * 12  # epochs, batches
CALLBACK = "gpumon_agent.lightning.Callback()"


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "logs" / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def losses(folder: Path) -> list[str]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


SLOWLY = """
import time

class Slow(L.Callback):
    def on_train_batch_start(self, *args): time.sleep(0.15)
    def on_validation_batch_start(self, *args): time.sleep(0.6)


class Net"""


@pytest.mark.parametrize("launched", [True, False])
def test_the_trainer(launched: bool, virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    text = text_of("lightning_trainer")
    if launched:  # long enough for several messages
        text = text.replace("class Net", SLOWLY, 1).replace(CALLBACK, f"Slow(), {CALLBACK}")
    run = watched(text, virtual_gpu, tmp_path / "run", launched=launched)
    assert run.steps == STEPS
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [STEPS] * 3
    assert run.phases["eval"] == 2 + 2  # sanity check, and after the first epoch; later ones end no step
    logged = [row for row in rows(run.folder) if "gpumon/peak_bytes" in row]
    assert [int(row["step"]) for row in logged] == [3, 7, 11, 15, 19, 23]
    assert [row["step"] for row in rows(run.folder) if "loss" in row] == [row["step"] for row in logged]
    assert all(row.keys() >= PEAKS for row in logged)
    seen = [each for each in run.objects if each["type"] == "step"]
    assert int(logged[1]["gpumon/peak_bytes"]) == max(p["allocated_peak"] for s in seen[4:8] for p in s["phases"])
    assert "agent-part-off" not in run.findings
    assert run.progress[0] == ("lightning", "sanity check", None, 1, 2)
    if launched:
        told = [each[1:] for each in run.progress]
        assert {(0, 12), (1, 12)} <= {(epoch, batches) for stage, epoch, _, batches in told if stage == "train"}
        assert {(0, 2), (1, 2)} <= {(epoch, batches) for stage, epoch, _, batches in told if stage == "validate"}
        times = [each["t"] for each in run.objects if each["type"] == "progress"]
        assert min(b - a for a, b in pairwise(times)) >= 1.0


def test_the_losses_are_the_same_without_it_with_two_and_of_pytorch_lightning(tmp_path: Path) -> None:
    """The script of the last imports the callback first; both packages are installed."""
    assert changed_lines("lightning_trainer") == 1
    ours = text_of("lightning_trainer")
    other = ours.replace("import lightning as L", "import pytorch_lightning as L")
    other = other.replace("from lightning.pytorch.", "from pytorch_lightning.")
    texts = {
        tmp_path / "plain": without_gpumon("lightning_trainer"),
        tmp_path / "two": ours.replace(CALLBACK, f"{CALLBACK}, {CALLBACK}"),
    }
    if find_spec("pytorch_lightning") is not None:
        texts[tmp_path / "other"] = "import gpumon_agent.lightning\n" + other
    alone(texts)
    plain, *others = map(losses, texts)
    assert len(plain) == 6
    assert others == [plain] * len(others)


def test_fabric(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    run = watched(EXAMPLES / "fabric_loop.py", virtual_gpu, tmp_path / "run")
    assert run.steps == STEPS
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [STEPS] * 3
    assert run.progress[0] in AT_FIRST
    assert len(rows(run.folder)) == 6
    assert all(row.keys() >= PEAKS for row in rows(run.folder))
    assert changed_lines("fabric_loop") == 1
    alone({tmp_path / "plain": without_gpumon("fabric_loop"), tmp_path / "ours": text_of("fabric_loop")})
    assert losses(tmp_path / "plain") == losses(tmp_path / "ours")


def test_fabric_s_callback_watches_without_gpumon_run(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    text = text_of("fabric_loop").replace("import gpumon_agent", "import gpumon_agent.lightning")
    text = text.replace("L.Fabric(", f"L.Fabric(callbacks=[{CALLBACK}], ")
    run = watched(text, virtual_gpu, tmp_path / "run", launched=False)
    assert run.steps == STEPS
    assert all(row.keys() >= PEAKS for row in rows(run.folder))
