"""Out of memory, explained: from a message, a log, a recording or the moment itself to what failed, when and why."""
