"""How the predicted figures were checked: the one statement of it that verbs print, true to docs/physical.md."""

from __future__ import annotations

VIRTUAL_GPU = (
    "Eight public runs made here the requests of a physical GPU, event by event. Of 22 recorded traces the "
    "reserved peak is at most 0.5 % off (docs/physical.md)."
)
"""Of the virtual GPU, by `gpumon dryrun`. tests/physical holds these figures."""

ESTIMATE = (
    "Compared with PyTorch's allocator on the virtual GPU (docs/estimate.md), and that with physical GPUs "
    "(docs/physical.md). Not with yours: the context is assumed, and so are cuBLAS workspaces beyond sm_90."
)
"""Of `gpumon estimate`. The traces of docs/physical.md have the workspaces of sm_90 and of an older device."""
