"""A library's callback without its library, and loops that libraries copy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest

from gpumon_agent.loop import Loop


@pytest.mark.parametrize(
    ("module", "libraries", "command"),
    [
        ("lightning", ("lightning", "pytorch_lightning", "lightning_fabric"), "pip install lightning"),
        ("transformers", ("transformers",), "pip install transformers"),
        ("keras", ("keras",), "pip install keras"),
    ],
)
def test_without_its_library_a_callback_says_what_to_install(
    module: str, libraries: tuple[str, ...], command: str
) -> None:
    absent = f"import sys; sys.modules.update(dict.fromkeys({libraries!r})); "
    ran = subprocess.run(
        [sys.executable, "-c", f"{absent}import gpumon_agent.{module}"], capture_output=True, text=True, timeout=300
    )
    *_, last = ran.stderr.splitlines()
    assert last.startswith(f"ModuleNotFoundError: gpumon_agent.{module} needs "), ran.stderr
    assert last.endswith(f": {command}")


def test_a_loop_can_be_copied_and_pickled_as_libraries_do_with_callbacks() -> None:
    for again in (copy.deepcopy(Loop("keras")), pickle.loads(pickle.dumps(Loop("keras")))):
        assert again.due()
        assert again.figures() == {}
