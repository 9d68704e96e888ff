"""Hides the agent's reads of tensors from the program's own TorchFunctionModes and tensor subclasses.

Each read of an attribute (`tensor.shape`) calls a TorchFunctionMode, and the subclass's `__torch_function__`. A program
that counts or logs such calls would see ours.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def unseen() -> type[AbstractContextManager[Any]]:
    """A context in which neither is called, in this thread. Costs 0.2 µs.

    Functions of the user must not run in it. Before torch is imported there is no tensor to read.
    """
    return getattr(sys.modules.get("torch._C"), "DisableTorchFunction", nullcontext)
