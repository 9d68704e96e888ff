"""How what the agent knows leaves the training process: through shared memory, to a helper that answers viewers."""
