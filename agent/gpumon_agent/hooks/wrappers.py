"""Wrapper modules of torch and other packages. Matched by class name, so that nothing is imported."""

from __future__ import annotations

from torch.nn import Module

_WRAPPERS = {  # class name → the child that is the user's own model
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "DeepSpeedEngine": "module",
}


def unwrapped(root: Module) -> Module:
    """The user's own model inside DistributedDataParallel, torch.compile and the like."""
    while (child := _WRAPPERS.get(type(root).__name__)) is not None:
        inner = root._modules.get(child)
        if inner is None:
            break
        root = inner
    return root


def is_wrapper(module: Module) -> bool:
    return type(module).__name__ in _WRAPPERS
