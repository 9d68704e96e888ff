"""A loop on DeepSpeed's engine that gives gpumon's figures to its monitor, as examples/ has it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from library_examples import EXAMPLES, PEAKS, alone, changed_lines, text_of, watched, without_gpumon

pytestmark = pytest.mark.integration
if find_spec("deepspeed") is None:  # to import it is to look for compilers
    pytest.skip("deepspeed is not installed", allow_module_level=True)

ON_THE_CPU = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for half a minute; one process shares nothing
"""


def test_the_engine(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    run = watched(EXAMPLES / "deepspeed_engine.py", virtual_gpu, tmp_path / "run")
    assert run.steps == 12
    assert [run.phases[name] for name in ("forward", "backward", "optimizer")] == [12] * 3
    assert run.progress[0] == (None, None, 0, None, None)
    for name in PEAKS:
        (path,) = run.folder.glob(f"logs/**/{name.replace('/', '_')}.csv")
        assert [line.split(",")[0] for line in path.read_text().split()] == ["step", "64", "128", "192"]


def test_the_losses_are_the_same_without_it(tmp_path: Path) -> None:
    assert changed_lines("deepspeed_engine") == 1
    texts = {tmp_path / "plain": without_gpumon("deepspeed_engine"), tmp_path / "ours": text_of("deepspeed_engine")}
    printed = alone({folder: text.replace("import deepspeed\n", ON_THE_CPU) for folder, text in texts.items()})
    plain, ours = ([line for line in text.splitlines() if line[:1].isdigit()] for text in printed.values())
    assert [line.split()[0] for line in plain] == ["0", "1", "2"]
    assert plain == ours
