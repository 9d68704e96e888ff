"""Whether the batch that comes will fit."""
