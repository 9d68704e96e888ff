"""Passes the agent's events through shared memory to a helper process that answers viewers."""
