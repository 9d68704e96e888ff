"""The memory that the training process and its helper share: one sealed memfd, mapped, with a fixed layout.

Not a plain file: other processes can truncate it, and a sparse file on a full tmpfs has no page left; both raise SIGBUS
in the writer. Here all pages are allocated at creation (posix_fallocate(3)), so that too little memory is an OSError at
start, and seals (fcntl(2), F_ADD_SEALS) fix the size.

The training process keeps no descriptor: it calls `close_descriptor` once the helper has its own; the mapping stays
valid (mmap(2)). ctypes is used because Python's `mmap` keeps a duplicate descriptor before 3.13, and because
`os.memfd_create` is missing if Python was built against an older C library (uv's and conda-forge's builds).

A forked child inherits the mapping but must not write to it. The caller ensures that.

Layout, all numbers in the machine's own byte order:

    0       the header: magic, version, bytes of the event ring, bytes of the queue
    64 …    single words (u64), each in a cache line of its own, so that the two processes do not contend for one
    4096    what training is doing now (`pages.Status`)
    8192    pairs of alternating pages (`pages.Pages`)
    …       the event ring, then the queue of long messages (`ring`)
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import struct
from typing import NamedTuple

from gpumon_agent.guard import pass_on

MAGIC = int.from_bytes(b"gpumon\r\n", "little")
VERSION = 5
PAGE_BYTES = 64 * 1024
"""No record of the ring crosses a multiple of this: a reader that lost its place resumes at the next."""


class Pair(NamedTuple):
    """Where two alternating pages are, and the word that names the newest."""

    latest: int
    offset: int
    page_bytes: int


# Words, counted from the beginning, each in a cache line of its own: the end of the newest record of the event ring, of
# the queue, and its reader's position; the newest status and pages; the exit code, as libc writes it (an int);
# the step and phase of a step that is not read (quiet_mark); the number of the newest request or line in ANSWER.
EVENTS_HEAD, LONG_HEAD, LONG_TAIL, STATUS_LATEST, _START_LATEST, _ANSWER_LATEST, EXIT, QUIET, CALLED = range(8, 80, 8)

STATUS_OFFSET = 4096
START = Pair(_START_LATEST, offset=8192, page_bytes=64 * 1024)  # the helper's parameters; written before it starts
ANSWER = Pair(_ANSWER_LATEST, offset=START.offset + 2 * START.page_bytes, page_bytes=16 * 1024)  # what viewers request
_RING_OFFSET = ANSWER.offset + 2 * ANSWER.page_bytes

_HEADER = struct.Struct("=QQQQ")

# linux/memfd.h, linux/fcntl.h; Python has these names only if it was built with headers that do.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING, _MFD_NOEXEC_SEAL = 1, 2, 8
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class Unreadable(Exception):
    """Not a descriptor of our memory. The text is one sentence for a person."""


class Memory:
    """One mapping. `view` is all of it, `words` the same as u64, `events` and `long` the two rings.

    `close` releases them. Keep no slices: they would outlive the mapping.
    """

    def __init__(self, fd: int, events_bytes: int, long_bytes: int) -> None:
        """Use `create` or `open`, which check. Raises OSError."""
        self.fd = fd
        self._size = _RING_OFFSET + events_bytes + long_bytes
        self._address: int | None = _mapped(fd, self._size)
        try:
            long_offset = _RING_OFFSET + events_bytes
            self.view = memoryview((ctypes.c_char * self._size).from_address(self._address)).cast("B")
            self.words = self.view.cast("Q")
            self.events = self.view[_RING_OFFSET:long_offset]
            self.long = self.view[long_offset:]
        except BaseException:
            _libc.munmap(self._address, self._size)
            raise

    @classmethod
    def create(cls, events_bytes: int = 2 * 1024 * 1024, long_bytes: int = 1024 * 1024) -> Memory:
        """New memory, all zero after the header. Both sizes are powers of two, of at least four pages.

        Raises OSError (EMFILE, ENFILE, ENOMEM, ENOSPC, EFBIG; ENOSYS without memfd_create(2)) and leaves nothing
        behind. Takes one descriptor; briefly two, if the first was 0, 1 or 2.

        Known limitation: a signal handler that raises exactly when a call here returns leaks the descriptor. A
        finalizer could close it, but what a handler raises in a finalizer is lost.
        """
        if not (_is_ring(events_bytes) and _is_ring(long_bytes)):
            raise ValueError(f"no sizes of rings: {events_bytes}, {long_bytes}")
        size = _RING_OFFSET + events_bytes + long_bytes
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY and limit < size:  # the kernel would send SIGXFSZ
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        fd = _memfd()
        try:
            for offset in range(0, size, PAGE_BYTES):  # after a signal the kernel restarts a call from the beginning
                os.posix_fallocate(fd, offset, min(PAGE_BYTES, size - offset))
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            os.pwrite(fd, _HEADER.pack(MAGIC, VERSION, events_bytes, long_bytes), 0)
            return cls(fd, events_bytes, long_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int) -> Memory:
        """Maps memory of another process. Raises Unreadable, or OSError if it cannot be mapped.

        `fd` stays open until `close_descriptor`.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            size = os.fstat(fd).st_size
            header = os.pread(fd, _HEADER.size, 0)
        except OSError as error:
            raise Unreadable(f"descriptor {fd} is no memory of gpumon: {error.strerror}") from error
        if seals & _SEALS != _SEALS:
            raise Unreadable(f"descriptor {fd} is no memory of gpumon: others could change its size")
        magic, version, events_bytes, long_bytes = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != MAGIC:
            raise Unreadable(f"descriptor {fd} is no memory of gpumon: it does not begin like one")
        if version != VERSION:
            raise Unreadable(f"the memory has version {version}; this gpumon reads version {VERSION}")
        if not (_is_ring(events_bytes) and _is_ring(long_bytes)) or size != _RING_OFFSET + events_bytes + long_bytes:
            raise Unreadable(f"the memory's size, {size} bytes, is not the one that it states")
        return cls(fd, events_bytes, long_bytes)

    @property
    def exit_address(self) -> int:
        """Address of the word EXIT, for libc. Invalid after `close`."""
        assert self._address is not None
        return self._address + 8 * EXIT

    def copied(self) -> Memory:
        """New memory with the same content, for a restarted helper. Raises OSError."""
        copy = Memory.create(len(self.events), len(self.long))
        copy.view[:] = self.view
        return copy

    def close_descriptor(self) -> None:
        """The mapping stays."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def close(self) -> None:
        """Closes the descriptor and unmaps. Later use raises ValueError (pack_into: TypeError).

        If another thread is copying (without a GIL), the mapping stays until `close` is called again.
        """
        self.close_descriptor()
        try:
            for view in (self.words, self.events, self.long, self.view):
                view.release()
        except BufferError as error:
            pass_on(error)
            return
        if self._address is not None:
            address, self._address = self._address, None
            _libc.munmap(address, self._size)


def _is_ring(size_bytes: int) -> bool:
    return size_bytes >= 4 * PAGE_BYTES and size_bytes & (size_bytes - 1) == 0


def _memfd() -> int:
    """A new memfd above 2: standard streams may be closed."""
    if not hasattr(_libc, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    usual = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    fd = _libc.memfd_create(b"gpumon", usual | _MFD_NOEXEC_SEAL)  # required if vm.memfd_noexec is 2
    if fd < 0 and ctypes.get_errno() == errno.EINVAL:  # unknown before Linux 6.3
        fd = _libc.memfd_create(b"gpumon", usual)
    if fd < 0:
        raise _last_error()
    if fd > 2:
        return int(fd)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _mapped(fd: int, size_bytes: int) -> int:
    address = _libc.mmap(None, size_bytes, _PROT_READ | _PROT_WRITE, _MAP_SHARED, fd, 0)
    if address == _FAILED:
        raise _last_error()
    return int(address)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
