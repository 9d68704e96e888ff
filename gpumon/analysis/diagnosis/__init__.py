"""Explains an out-of-memory from a message, a log, a recording or the live event: what failed, when and why."""
