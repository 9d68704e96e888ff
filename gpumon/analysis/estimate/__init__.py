"""Estimates what a training step needs, from the model's description alone or with a few measurements."""
