"""Output for other programs."""
