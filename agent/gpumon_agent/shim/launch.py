"""Replaces this process by the user's real command, with the agent's sitecustomize on its PYTHONPATH."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ON_PATH = str(Path(__file__).resolve().parent / "on_path")
_SCRIPT_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")
_TAKE_A_VALUE = "cmWX"  # of Python's own options; -c and -m also end them


class Refused(Exception):
    """The command cannot be started. The text is one sentence for a person; `exit_code` is 2 for wrong arguments."""

    def __init__(self, sentence: str, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def execute(words: Sequence[str], *, name: str | None = None, track_cpu: bool = False) -> NoReturn:
    """Replaces this process by the command that `words` mean. Raises `Refused`."""
    argv = command(words)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], argv, environment(os.environ, name=name, track_cpu=track_cpu))
    except OSError as error:
        raise Refused(f"{argv[0]}: {error.strerror or error}", exit_code=1) from error


def command(words: Sequence[str]) -> list[str]:
    """The real argv: `train.py …` and `-m pkg.train …` get a Python in front, `torchrun …` stays as it is.

    Raises `Refused` for commands certain to fail, before anything starts.
    """
    if not words:
        raise Refused("nothing to run: give a script, -m MODULE, or a command (torchrun …, accelerate launch …)")
    first = words[0]
    if first.startswith("-"):
        return [python(), *_checked_options(words)]
    if first.endswith(_SCRIPT_SUFFIXES):
        _check_exists(first)
        return [python(), *words]
    if shutil.which(first) is None:
        if Path(first).exists():  # a script without a suffix, or a folder with a __main__.py
            return [python(), *words]
        beside = shutil.which(first, path=str(Path(sys.executable).parent))  # a venv used but not activated
        if beside is None:
            from gpumon_agent.wire.masking import masked

            raise Refused(f"{next(masked([first]))}: neither a script nor a command on PATH")
        first = beside
    if Path(first).name.startswith(("python", "pypy")):
        return [first, *_checked_options(words[1:])]
    return [first, *words[1:]]


def environment(outer: Mapping[str, str], *, name: str | None = None, track_cpu: bool = False) -> dict[str, str]:
    """`outer` with `ON_PATH` in front of PYTHONPATH, and the agent's variables."""
    inner = dict(outer)
    entries = [entry for entry in outer.get("PYTHONPATH", "").split(os.pathsep) if entry != ON_PATH]
    # PYTHONPATH="" means no entry, but an empty entry among others means the current folder
    inner["PYTHONPATH"] = os.pathsep.join([ON_PATH, *entries] if entries != [""] else [ON_PATH])
    if name is not None:
        inner["GPUMON_NAME"] = name
    if track_cpu:
        inner["GPUMON_TRACK_CPU"] = "1"
    return inner


def python() -> str:
    """The interpreter for a bare script: this one if it has torch, else `python` on PATH."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    return shutil.which("python") or shutil.which("python3") or sys.executable


def _check_exists(script: str) -> None:
    if not Path(script).exists():
        raise Refused(f"{script}: no such file; give the path of the training script")


def _checked_options(words: Sequence[str]) -> Sequence[str]:
    """`words`, after checking Python's own options for those that keep the agent out, and the script's path."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            if word.endswith(_SCRIPT_SUFFIXES):
                _check_exists(word)
            break
        if word.startswith("--"):
            continue
        for position, letter in enumerate(word[1:], 1):
            if letter in "IES":
                raise Refused(
                    f"python -{letter} starts the script without the agent (it ignores PYTHONPATH or sitecustomize): "
                    "leave it out, or call gpumon_agent.watch() in the script"
                )
            if letter in _TAKE_A_VALUE:
                if position == len(word) - 1 and next(rest, None) is None:
                    raise Refused(f"python -{letter} needs a value")
                if letter in "cm":
                    return words
                break
    return words
