"""All that goes on between this process and its viewers: sockets, files, the one thread."""
