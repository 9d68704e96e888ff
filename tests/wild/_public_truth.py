"""Runs a public script as it is and counts what it does: `_public_truth.py FOLDER SCRIPT [ARGUMENT …]`.

A model is a module with parameters that is called from outside every other one.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "cases"))

import _count
import torch
from torch.nn.modules import module as modules

_seen: set[int] = set()
_open: list[Any] = []


def _begins(module: torch.nn.Module, args: Any) -> None:
    if not _open and next(module.parameters(), None) is None:
        return  # a loss, an activation
    if not _open:
        _count._forward_begins(module, args)
        inner = module.module if hasattr(module, "module") else module  # of DistributedDataParallel
        if id(inner) not in _seen and torch.is_grad_enabled():
            _seen.add(id(inner))
            parameters = sum(p.numel() for p in inner.parameters())
            _count.models.append({"name": type(inner).__name__, "parameters": parameters})
    _open.append(module)


def _ended(module: torch.nn.Module, args: Any, output: Any) -> None:
    if _open and _open[-1] is module:
        _open.pop()
        if not _open:
            _count._forward_ended(module, args, output)


if __name__ == "__main__":
    folder, script, *arguments = sys.argv[1:]
    modules.register_module_forward_pre_hook(_begins)
    modules.register_module_forward_hook(_ended, always_call=True)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(folder, script).parent)
    sys.path.append(folder)  # as where the repository is installed
    runpy.run_path(script, run_name="__main__")
