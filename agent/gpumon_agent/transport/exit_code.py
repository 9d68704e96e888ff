"""The process's exit code, for its viewers. The interpreter tells no Python code of it: libc writes it as it ends.

`sys.exit(3)` is no uncaught exception, and atexit runs before the code is final. glibc's `on_exit` calls a function
with the exit status as the process ends, after the interpreter is gone. Here that function is libc's own `putw`, and
its file is a word of the memory that is shared with the helper (`fmemopen`). Sources: on_exit(3), fmemopen(3), putw(3).
Known limitations: other C libraries (musl) have no `on_exit`. `os._exit` and signals run no such function.
"""

from __future__ import annotations

import ctypes

from gpumon_agent.transport.memory import EXIT, Memory

_BYTES = 8
_AWAITED = 1 << 32  # in the upper half: a code may come, in the lower one
_UNKNOWN = 1 << 31  # no exit code: sys.exit(-1) is 2³² − 1


def write_at_exit(memory: Memory) -> bool:
    """To be called once, in an atexit handler; the memory must stay mapped. False: this C library cannot."""
    libc = ctypes.CDLL(None)
    memory.words[EXIT] = _AWAITED | _UNKNOWN
    if not hasattr(libc, "on_exit") or not hasattr(libc, "putw"):
        return False
    libc.fmemopen.restype = ctypes.c_void_p
    file = libc.fmemopen(ctypes.c_void_p(memory.exit_address), ctypes.c_size_t(_BYTES), b"r+")
    if not file:
        return False
    libc.setbuf(ctypes.c_void_p(file), None)  # written at once, whatever else happens as the process ends
    return bool(libc.on_exit(libc.putw, ctypes.c_void_p(file)) == 0)


def read(memory: Memory) -> int | None:
    """None: it is not known."""
    word = memory.words[EXIT]
    return word & 0xFF if word >> 32 and word & 0xFFFFFFFF != _UNKNOWN else None
