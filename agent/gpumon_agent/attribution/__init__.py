"""Bytes by owner of a device: at the end of a phase, and at the peak."""
