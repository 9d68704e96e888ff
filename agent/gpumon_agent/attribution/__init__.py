"""Whose the bytes of a device are: at the end of a phase, and at the peak."""
