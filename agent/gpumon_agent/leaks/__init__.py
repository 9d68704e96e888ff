"""What stays: live tensors that nobody owns, who holds them, and checkpoints that were loaded."""
