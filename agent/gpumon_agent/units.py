"""Bytes as text in PyTorch's own format, because the agent's sentences are read next to PyTorch's messages."""


def torch_size(count: int) -> str:
    """Bytes as PyTorch's messages write them: two decimals of the largest unit that is not above the size."""
    if count <= 1 << 10:
        return f"{count} bytes"
    for scale, name in ((1 << 20, "KiB"), (1 << 30, "MiB")):
        if count <= scale:
            return f"{count / (scale >> 10):.2f} {name}"
    return f"{count / (1 << 30):.2f} GiB"
