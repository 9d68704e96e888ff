"""The shared memory: taken at once, sealed, mapped without a descriptor, and gone without a trace."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumon_agent.transport.memory import MAGIC, PAGE_BYTES, VERSION, Memory, Unreadable

RING = 4 * PAGE_BYTES
BEGINS = """
import errno, os, resource, signal, sys
from gpumon_agent.transport.memory import Memory

def traces():
    "What a process has of descriptors and mappings."
    mapped = [line.split(None, 5)[5] for line in open("/proc/self/maps") if "memfd" in line]
    return [(fd, os.readlink(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")[:-1]], mapped

def refused(number):
    "Whether creating fails with this error, and leaves nothing."
    before = traces()
    try:
        Memory.create()
    except OSError as error:
        return error.errno == number and traces() == before
    return "created"
"""


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory.create(RING, RING)
    yield memory
    memory.close()


def said(script: str, *, pass_fds: tuple[int, ...] = ()) -> str:
    """What a process of its own prints; it ends well and says nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", BEGINS + script],
        capture_output=True,
        text=True,
        pass_fds=pass_fds,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_all_its_pages_are_taken_as_it_is_created() -> None:
    memory = Memory.create()
    try:
        status = os.fstat(memory.fd)
        assert status.st_size == len(memory.view)
        assert status.st_blocks * 512 >= status.st_size
        assert len(memory.events) == 2 * 1024 * 1024
        assert len(memory.long) == 1024 * 1024
        assert not any(memory.events)
    finally:
        memory.close()


def test_nobody_can_change_its_size(memory: Memory) -> None:
    size = len(memory.view)
    for other in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, other)
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{memory.fd}", other)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, 1033, 8)  # F_ADD_SEALS, F_SEAL_WRITE
    assert os.fstat(memory.fd).st_size == size
    assert not os.get_inheritable(memory.fd)


def test_it_can_be_read_and_written_and_never_run(memory: Memory) -> None:
    """Some systems refuse memory that could hold a program (vm.memfd_noexec)."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:gpumon" in line]
    assert {line.split()[1] for line in mapped} == {"rw-s"}
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 3):  # older kernels have no such seal
        assert not os.fstat(memory.fd).st_mode & 0o111


def test_another_process_maps_the_same_memory_and_both_do_without_a_descriptor(memory: Memory) -> None:
    memory.events[5] = 17
    opens = f"""
memory = Memory.open({memory.fd})
memory.close_descriptor()
assert str({memory.fd}) not in os.listdir("/proc/self/fd")
assert len(memory.events) == len(memory.long) == {RING}
print(memory.events[5])
memory.long[6] = 18
"""
    assert said(opens, pass_fds=(memory.fd,)) == "17"
    memory.close_descriptor()
    memory.close_descriptor()
    assert memory.fd == -1
    assert (memory.events[5], memory.long[6]) == (17, 18)


def test_a_forked_child_has_the_same_memory() -> None:
    forks = """
memory = Memory.create()
memory.close_descriptor()
memory.events[5] = 17
pid = os.fork()
if not pid:
    memory.long[6] = memory.events[5] + 1
    os._exit(0)
os.waitpid(pid, 0)
print(memory.long[6])
"""
    assert said(forks) == "18"


def test_a_copy_has_the_content_and_is_memory_of_its_own(memory: Memory) -> None:
    memory.events[5] = memory.long[-1] = 17
    copy = memory.copied()
    try:
        assert copy.view == memory.view
        memory.close()
        assert (copy.events[5], copy.long[-1]) == (17, 17)
        again = Memory.open(os.dup(copy.fd))
        assert again.events[5] == 17
        again.close()
    finally:
        copy.close()


def test_closing_leaves_no_descriptor_and_no_mapping() -> None:
    closes = """
before = traces()
for _ in range(3):
    memory = Memory.create()
    assert traces() != before
    copy = memory.copied()
    other = Memory.open(os.dup(memory.fd))
    for each in (memory, copy, other, memory):
        each.close()
    assert traces() == before, (before, traces())
try:
    memory.view[0]
except ValueError as error:
    print(error)
"""
    assert "released memoryview" in said(closes)


def test_a_mapping_that_is_being_copied_from_stays_until_it_is_closed_again() -> None:
    holds = """
import re
before = traces()
memory = Memory.create()
busy = re.finditer(b"x", memory.long)  # holds the buffer, as a thread may that runs without a GIL
memory.close()
print(traces() == before)
assert not list(busy)
del busy
memory.close()
print(traces() == before)
"""
    assert said(holds).split() == ["False", "True"]


@pytest.mark.parametrize(("free", "outcome"), [(0, errno.EMFILE), (1, None)])
def test_one_free_descriptor_is_enough(free: int, outcome: int | None) -> None:
    scarce = f"""
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
held = []
while True:
    try:
        held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
for fd in held[:{free}]:
    os.close(fd)
try:
    memory = Memory.create()
except OSError as error:
    print(error.errno)
else:
    memory.close_descriptor()
    memory.events[5] = 17
    print(None)
for fd in held[{free}:]:
    os.close(fd)
left = os.listdir("/proc/self/fd")
print(len(left))
"""
    assert said(scarce).split() == [str(outcome), "4"]  # 0, 1, 2 and that of listdir


def test_its_descriptor_is_none_of_the_standard_streams() -> None:
    closed = """
sys.stdout.flush()
out = os.dup(1)
for fd in range(3):
    os.close(fd)
memory = Memory.create()
fds = sorted(map(int, os.listdir("/proc/self/fd")))
assert memory.fd > 2, memory.fd
assert not os.get_inheritable(memory.fd)
os.write(out, str([fd for fd in fds if fd != out and fd != memory.fd]).encode())
"""
    assert said(closed) == "[0]"  # that of listdir: all three are free


def test_too_little_address_space_is_an_error() -> None:
    limited = """
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20), size + (2 << 20)))
print(refused(errno.ENOMEM))
"""
    assert said(limited) == "True"


def test_a_limit_of_file_sizes_is_an_error_and_no_signal() -> None:
    limited = """
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(refused(errno.EFBIG))
"""
    assert said(limited) == "True"


def test_a_profilers_signals_do_not_keep_it_from_being_created() -> None:
    """Older kernels than 6.18 give up at each, and the C library begins anew."""
    interrupted = """
count = 0
def handler(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
while count < 100:
    Memory.create().close()
signal.setitimer(signal.ITIMER_REAL, 0)
print("created")
"""
    assert said(interrupted) == "created"


def test_a_kernel_that_does_not_know_all_flags_is_asked_for_fewer() -> None:
    """Linux before 6.3: here a seccomp filter answers EINVAL to memfd_create with MFD_NOEXEC_SEAL, as it would."""
    older = """
import ctypes, platform, struct
def code(operation, jump_if, jump_if_not, value):
    return struct.pack("=HBBI", operation, jump_if, jump_if_not, value)
load, equal, has, answer = 0x20, 0x15, 0x45, 0x06
number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
allow = code(answer, 0, 0, 0x7fff0000)
filters = [code(load, 0, 0, 0), code(equal, 0, 3, number), code(load, 0, 0, 24), code(has, 0, 1, 8),
           code(answer, 0, 0, 0x00050000 | errno.EINVAL), allow]
program = ctypes.create_string_buffer(b"".join(filters))
described = struct.pack("@HP", len(filters), ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, described, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
assert libc.memfd_create(b"", 8) == -1
memory = Memory.create()
memory.events[5] = 17
print(memory.events[5])
"""
    assert said(older) == "17"


def test_sizes_that_are_no_power_of_two_are_a_mistake() -> None:
    for events_bytes, long_bytes in ((RING + 8, RING), (RING, 0), (RING, 2 * PAGE_BYTES), (-RING, RING)):
        with pytest.raises(ValueError, match="no sizes of rings"):
            Memory.create(events_bytes, long_bytes)


# ----------------------------------------------------------------------------------------- other things than a memory


def memfd(header: bytes, size: int, *, seals: int = 7) -> int:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, header, 0)
    fcntl.fcntl(fd, 1033, seals)
    return fd


def header(magic: int = MAGIC, version: int = VERSION, events: int = RING, long: int = RING) -> bytes:
    return struct.pack("=QQQQ", magic, version, events, long)


def sound_size() -> int:
    memory = Memory.create(RING, RING)
    memory.close()
    return memory._size


def regular_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.write(header().ljust(sound_size(), b"\0"))
        return os.dup(file.fileno())


def closed() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


STRANGE: dict[str, tuple[Callable[[], int], str]] = {
    "closed": (closed, "Bad file descriptor"),
    "a pipe": (lambda: os.pipe()[0], "no memory of gpumon"),
    "a device": (lambda: os.open("/dev/zero", os.O_RDWR), "no memory of gpumon"),
    "a file on disk": (regular_file, "no memory of gpumon"),
    "not sealed": (lambda: memfd(header(), sound_size(), seals=0), "others could change its size"),
    "may shrink": (lambda: memfd(header(), sound_size(), seals=4 | 1), "others could change its size"),
    "empty": (lambda: memfd(b"", 0), "does not begin like one"),
    "somebody else's": (lambda: memfd(header(magic=1), sound_size()), "does not begin like one"),
    "newer": (lambda: memfd(header(version=VERSION + 1), sound_size()), f"version {VERSION + 1}; this"),
    "too small": (lambda: memfd(header(), sound_size() - 1), "not the one that it states"),
    "huge sizes": (lambda: memfd(header(events=1 << 63, long=1 << 63), sound_size()), "not the one"),
    "odd sizes": (lambda: memfd(header(events=RING + 8, long=RING - 8), sound_size()), "not the one"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_memory_of_ours_is_refused_in_one_sentence(what: str) -> None:
    make, reason = STRANGE[what]
    fd = make()
    maps = Path("/proc/self/maps").read_text().count("memfd:other")
    with pytest.raises(Unreadable, match=reason) as raised:
        Memory.open(fd)
    assert "\n" not in str(raised.value)
    assert Path("/proc/self/maps").read_text().count("memfd:other") == maps
    if what != "closed":
        os.close(fd)


def test_a_sound_one_is_not_refused() -> None:
    """The figures of the tests above are those of a memory that can be opened."""
    fd = memfd(header(), sound_size())
    memory = Memory.open(fd)
    assert bytes(memory.view[:32]) == header()
    memory.close()
