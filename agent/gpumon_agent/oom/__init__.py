"""Explains an out-of-memory before its exception is raised, in the thread that asked for memory."""
