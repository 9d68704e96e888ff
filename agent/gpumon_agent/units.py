"""Sizes of PyTorch's allocator, and bytes as text in its format, since messages appear next to PyTorch's."""

BLOCK_BYTES = 512
"""Sizes of blocks are multiples: kMinBlockSize in c10/core/AllocatorConfig.h."""


def rounded(nbytes: int) -> int:
    """The size of the block that holds `nbytes`."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def torch_size(count: int) -> str:
    """Bytes as in PyTorch's messages: two decimals, in the largest unit below the size."""
    if count <= 1 << 10:
        return f"{count} bytes"
    for scale, name in ((1 << 20, "KiB"), (1 << 30, "MiB")):
        if count <= scale:
            return f"{count / (scale >> 10):.2f} {name}"
    return f"{count / (1 << 30):.2f} GiB"
