"""A loop on Accelerate that gives gpumon's figures to its tracker, as examples/ has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library_examples import AT_FIRST, EXAMPLES, PEAKS, alone, changed_lines, text_of, watched, without_gpumon

pytestmark = pytest.mark.integration
pytest.importorskip("accelerate")


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_loop(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    run = watched(EXAMPLES / "accelerate_loop.py", virtual_gpu, tmp_path / "run")
    assert run.steps == 24
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [24] * 3
    assert run.progress[0] in AT_FIRST
    assert [each["step"] for each in logged(run.folder)] == [3, 7, 11, 15, 19, 23]
    assert all(each.keys() >= PEAKS for each in logged(run.folder))


def test_the_losses_are_the_same_without_it(tmp_path: Path) -> None:
    assert changed_lines("accelerate_loop") == 1
    texts = {tmp_path / "plain": without_gpumon("accelerate_loop"), tmp_path / "ours": text_of("accelerate_loop")}
    alone(texts)  # no agent runs there: there are no figures
    plain, ours = map(logged, texts)
    assert len(plain) == 6
    assert plain == ours
