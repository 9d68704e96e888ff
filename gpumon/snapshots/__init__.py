"""PyTorch's memory snapshots: read from a file, summarized, compared."""
