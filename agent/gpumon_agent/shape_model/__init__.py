"""Predicts from a batch's shapes how many bytes a step needs, and whether they fit. Used by agent and viewer.

It needs no torch.
"""
