"""Explains an out-of-memory while it happens: before the exception, in the thread that asked for memory."""
