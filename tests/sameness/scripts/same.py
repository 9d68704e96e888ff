"""What the scripts share: the device, gpumon's second line, and a file in which each writes down what it saw."""

import json
import os
import sys

device = os.environ["SAME_DEVICE"]
case = sys.argv[1] if len(sys.argv) > 1 else ""

if os.environ["SAME_WATCH"] == "1":
    from gpumon_agent import watch
else:

    def watch(model, optimizer=None):
        pass


def tell(name, value):
    """One more value under `name`. Bare and watched runs must write the same."""
    with open(os.environ["SAME_OUT"], "a") as file:
        file.write(json.dumps([name, value], default=repr) + "\n")


def allocated():
    """Bytes, or None on the CPU."""
    import torch

    return torch.cuda.memory_allocated() if device == "cuda" else None


def bits(tensor):
    """Every bit of it, where the device computes."""
    import hashlib

    if tensor.is_cuda:  # the virtual GPU computes nothing
        return [list(tensor.shape), str(tensor.dtype)]
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def show(mapping):
    """A dict's items, without the addresses and values of what is in it."""
    plain = (int, float, str, bool, type(None), list, tuple)
    return sorted((str(k), repr(v) if type(v) in plain else type(v).__name__) for k, v in mapping.items())
