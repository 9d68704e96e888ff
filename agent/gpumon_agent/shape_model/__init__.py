"""Predicts from a batch's shapes how many bytes a step needs, and says whether it fits. Agent and viewer both use it.

It needs no torch.
"""
