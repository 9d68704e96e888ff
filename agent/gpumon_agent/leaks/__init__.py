"""Tensors that stay without an owner, the variables that hold them, and checkpoints that were loaded."""
