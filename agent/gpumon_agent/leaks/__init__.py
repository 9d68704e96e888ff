"""Finds live tensors without an owner, the variables that hold them, and loaded checkpoints that stay in memory."""
