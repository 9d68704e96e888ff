"""Attributes a device's bytes to owners, at the end of each phase and at the peak."""
