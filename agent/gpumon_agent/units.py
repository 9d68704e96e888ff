"""Bytes as text in PyTorch's format, since the agent's messages appear next to PyTorch's."""


def torch_size(count: int) -> str:
    """Bytes as in PyTorch's messages: two decimals, in the largest unit below the size."""
    if count <= 1 << 10:
        return f"{count} bytes"
    for scale, name in ((1 << 20, "KiB"), (1 << 30, "MiB")):
        if count <= scale:
            return f"{count / (scale >> 10):.2f} {name}"
    return f"{count / (1 << 30):.2f} GiB"
