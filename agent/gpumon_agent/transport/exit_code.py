"""Passes the process's exit code to viewers. No Python code can read it, so libc writes it when the process ends.

`sys.exit(3)` is no uncaught exception, and atexit runs before the code is final. glibc's `on_exit` calls a function
with the exit status when the process ends, after the interpreter is gone. That function is libc's `putw`, its file a
word of the memory shared with the helper (`fmemopen`). Sources: on_exit(3), fmemopen(3), putw(3).
Known limitations: other C libraries (musl) have no `on_exit`. `os._exit` and signals do not run it.
"""

from __future__ import annotations

import ctypes

from gpumon_agent.transport.memory import EXIT, Memory

_AWAITED = 3 << 31  # libc will replace the lower half, 2³¹, which is no exit code: sys.exit(-1) is 2³² − 1


def write_at_exit(memory: Memory) -> bool:
    """Call once, in an atexit handler, and keep the memory mapped. False: this C library cannot."""
    libc = ctypes.CDLL(None)
    memory.words[EXIT] = _AWAITED
    if not hasattr(libc, "on_exit") or not hasattr(libc, "putw"):
        return False
    libc.fmemopen.restype = ctypes.c_void_p
    file = libc.fmemopen(ctypes.c_void_p(memory.exit_address), ctypes.c_size_t(memory.words.itemsize), b"r+")
    if not file:
        return False
    libc.setbuf(ctypes.c_void_p(file), None)  # unbuffered, whatever else happens at exit
    return bool(libc.on_exit(libc.putw, ctypes.c_void_p(file)) == 0)


def read(memory: Memory) -> int | None:
    """None if unknown."""
    word = memory.words[EXIT]
    return word & 0xFF if word and word != _AWAITED else None
