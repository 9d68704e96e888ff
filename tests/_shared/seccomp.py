"""A process to which the kernel refuses system calls, as a container's seccomp filter may."""

from __future__ import annotations

import os

import pytest

X86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are x86-64's")
REFUSE = """
def refuse(*numbers, errno):
    "From now on the kernel answers these system calls with an error (seccomp(2))."
    import ctypes, struct
    libc = ctypes.CDLL(None)
    steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for number in numbers:
        steps += [struct.pack("HBBI", 0x15, 0, 1, number), struct.pack("HBBI", 0x06, 0, 0, 0x50000 | errno)]
    steps.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    filters = ctypes.create_string_buffer(b"".join(steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(filters))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
"""
"""Defines `refuse` in a script."""
