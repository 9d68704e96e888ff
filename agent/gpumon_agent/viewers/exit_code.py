"""The process's exit code, for its viewers. The interpreter tells no Python code of it: libc writes it as it ends.

`sys.exit(3)` is no uncaught exception, and atexit runs before the code is final. glibc's `on_exit` calls a function
with the exit status as the process ends, after the interpreter is gone. Here that function is libc's own `fputc`: it
writes the status, as one byte, to a file that was opened for it. Source: on_exit(3).
Known limitations: other C libraries (musl) have no `on_exit`. `os._exit` and signals run no such function.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_at_exit(path: Path) -> bool:
    """To be called once, in an atexit handler. False: this C library cannot. Raises OSError without the file."""
    import ctypes

    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return False
    libc.fdopen.restype = ctypes.c_void_p
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = ctypes.c_void_p(libc.fdopen(fd, b"w"))
    libc.setbuf(file, None)  # written at once, whatever else happens as the process ends
    return bool(libc.on_exit(libc.fputc, file) == 0)


def read(path: Path) -> int | None:
    """None: it is not known, or not yet."""
    with contextlib.suppress(OSError):
        written = path.read_bytes()
        return written[0] if len(written) == 1 else None
    return None
