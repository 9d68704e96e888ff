"""Starts the helper process so that the training script cannot notice it.

A plain child would be noticed: `os.wait()` waits for it, its end calls a SIGCHLD handler, psutil lists it. So the
helper is a child of init, like a daemon, and the process between the two is gone when `start` returns:

    trainer -- clone --> middle -- posix_spawn --> helper        then the middle ends, and the trainer reaps it

- The middle has no exit signal, where others have SIGCHLD (clone(2)): its end sends no signal, and wait() without
  __WCLONE ignores it. exec would make it an ordinary child (de_thread, fs/exec.c), so it never execs.
- It shares the trainer's memory while the calling thread sleeps (CLONE_VM, CLONE_VFORK): no page table is copied,
  however much is mapped. No Python runs in it. It runs a prepared chain of contexts (makecontext(3)), each of which
  calls a libc function and continues with the next.
- The trainer's part is such a chain too: one call from Python with every signal blocked, which no signal handler or
  exception can interrupt.

What user code can still notice: in that millisecond, from another thread, the middle in /proc/PID/task/*/children; a
grandchild orphaned then goes to init although the trainer is a subreaper; audit events of ctypes.

In a container, orphans become children of process 1. If that is the trainer, os.wait() would wait for the helper. So
there the middle stays as the helper's parent: one of its threads waits until the helper ends. psutil lists both, the
middle as a zombie. If that trainer execs, the new program keeps both, and its old memory, until the helper ends.

A start costs the trainer 0.9 to 1.1 ms of CPU (least and median of 40) and returns after 1.2 ms (least of 40; Python
3.11, glibc 2.36, Linux 6.18, two cores that others used as well). Each process on the way waits for a core: 9 ms in the
median at a load of 3, 20 ms beside two more busy processes, where subprocess.Popen took 2.4 and 0.4. With 8 GB of
touched memory it is the same as with 10 MB (medians of 60 starts 11.76 and 11.77 ms; a fork took 473 and 1.6 ms).

Needs glibc on x86-64 or aarch64; else CannotStart. If init does not reap (`sleep` as process 1 of a container), the
helper leaves a zombie when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpumon_agent.guard import pass_on
from gpumon_agent.registry import REGISTRY
from gpumon_agent.transport.process import DESCRIPTOR

KEPT = {
    "HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TEMP", "TMP", "TMPDIR", "TZ", "USER", "XDG_RUNTIME_DIR",
    "XDG_STATE_HOME",
}  # fmt: skip
KEPT_PREFIXES = ("GPUMON_", "LC_")
"""The trainer's variables that the helper gets. LD_PRELOAD and PYTHON* are meant for the training alone."""

_SETSIGDEF, _SETSIGMASK, _SETSID = 0x04, 0x08, 0x80  # spawn.h
_CLONE_VM, _CLONE_FILES, _CLONE_SIGHAND = 0x100, 0x400, 0x800  # linux/sched.h
_CLONE_VFORK, _CLONE_THREAD, _CLONE_PARENT_SETTID = 0x4000, 0x10000, 0x100000
_WNOHANG, _WEXITED, _WCLONE, _P_ALL = 1, 4, 0x80000000, 0  # linux/wait.h
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # prctl(2)

_OPAQUE_BYTES = 1024  # glibc's sigset_t, posix_spawnattr_t and posix_spawn_file_actions_t have 128, 336 and 80
_CONTEXT_BYTES, _STACK_BYTES = 8 * 1024, 56 * 1024  # its ucontext_t has 968 on x86-64, 4,560 on aarch64


class CannotStart(Exception):
    """There is no helper. The text is one sentence for a person."""


class _Machine(NamedTuple):
    """Offsets in glibc's ucontext_t (sys/ucontext.h), system call numbers."""

    mask: int  # uc_sigmask
    argument: int  # the register of a function's first argument
    exit: int
    waitid: int


_MACHINES = {"x86_64": _Machine(296, 104, 60, 247), "aarch64": _Machine(40, 184, 93, 95)}


def start(bootstrap: str, descriptor: int, *, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the Python code `bootstrap` in its own process, with `descriptor` as its DESCRIPTOR. Returns the pid.

    It has the trainer's limits and, until it calls `process.prepare`, its working directory, CPUs and priority. Its
    sys.path has the standard library only. Raises CannotStart.
    """
    try:
        libc: Any = ctypes.CDLL("libc.so.6")  # not what LD_PRELOAD puts first
        machine = _MACHINES.get(os.uname().machine)
        if machine is None or not hasattr(libc, "makecontext"):
            raise CannotStart("the helper needs the GNU C library on x86-64 or aarch64")
        argv = [_interpreter(), "-I", "-B", "-S", "-c", bootstrap]
        with _attributes(libc, descriptor) as attributes:
            return _spawn(libc, machine, argv, _kept(environment), attributes)
    except (OSError, MemoryError, SystemError) as error:
        pass_on(error)
        # CPython raises a bare SystemError if it has no memory for the frame of a call
        reason = str(error) if isinstance(error, OSError) else "out of memory"
        raise CannotStart(f"the helper could not be started: {reason}") from error


def _spawn(libc: Any, machine: _Machine, argv: list[str], environment: list[str], attributes: tuple[Any, Any]) -> int:
    own = os.getpid()
    pid, middle, error, subreaper = (ctypes.c_int(value) for value in (0, own, 0, 0))
    program, arguments, variables = _text(argv[0]), _vector(argv), _vector(environment)
    libc.__errno_location.restype = ctypes.c_void_p
    errno = libc.__errno_location()  # of this thread; the middle and what it spawns share it
    libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(subreaper), 0, 0, 0)

    contexts = _Contexts(libc, machine, middle)
    flags = _CLONE_VM | _CLONE_VFORK | _CLONE_PARENT_SETTID
    ends = contexts.chain((libc._exit, 0))
    here = contexts.take()
    if own == 1:
        _give_back(libc)
        REGISTRY.clone_contexts.append(contexts)
        flags |= _CLONE_FILES  # no copy of the trainer's descriptors lasts
        waits = contexts.chain((libc.syscall, machine.waitid, _P_ALL, 0, 0, _WEXITED, 0), then=ends)
        thread = _CLONE_VM | _CLONE_FILES | _CLONE_SIGHAND | _CLONE_THREAD
        ends = contexts.chain(contexts.clone(thread, waits), (libc.syscall, machine.exit, 0))
        before, after, argument = ([], here, ctypes.addressof(middle))
    else:
        # if the trainer is a subreaper when the middle ends, the helper becomes its child
        before, restored = ([(libc.prctl, _SET_CHILD_SUBREAPER, on, 0, 0, 0)] * subreaper.value for on in (0, 1))
        # no process is its own child: waitpid returns at once, unless the kernel has put the middle's pid there
        after = contexts.chain((libc.waitpid, own, 0, _WCLONE), *restored, then=here)
        argument = after + machine.argument
    # the middle's own session: otherwise Ctrl-C for the trainer's process group could end the helper before it has left
    # that group
    spawn = (libc.posix_spawn, pid, program, *attributes, arguments, variables)
    spawns = contexts.chain((libc.setsid,), spawn, then=ends)
    first = contexts.chain(*before, contexts.clone(flags, spawns, argument), (libc.memcpy, error, errno, 4), then=after)
    libc.swapcontext(ctypes.c_void_p(here), ctypes.c_void_p(first))
    if not pid.value:
        if own == 1:
            libc.waitpid(middle, None, _WCLONE)
            REGISTRY.clone_contexts.remove(contexts)
        raise OSError(error.value, os.strerror(error.value))
    return pid.value


class _Contexts:
    """Memory of contexts, each with its own stack. `middle` is the pid of the process that runs on them."""

    def __init__(self, libc: Any, machine: _Machine, middle: ctypes.c_int) -> None:
        self.middle = middle
        self._libc = libc
        self._machine = machine
        self._memory: list[ctypes.c_char] = []

    def take(self) -> int:
        """The address of a context to fill."""
        memory = mmap.mmap(-1, _CONTEXT_BYTES + _STACK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.append(ctypes.c_char.from_buffer(memory))
        return ctypes.addressof(self._memory[-1])

    def chain(self, *calls: tuple[Any, ...], then: int = 0) -> int:
        """Contexts that make one call each, `(function, argument, …)`, with every signal blocked. Returns the first.

        The last one continues with the context `then`.
        """
        for function, *arguments in reversed(calls):
            context = self.take()
            self._libc.getcontext(ctypes.c_void_p(context))
            ctypes.memset(context + self._machine.mask, 0xFF, 8)
            link_stack = (then, context + _CONTEXT_BYTES, 0, _STACK_BYTES)  # uc_link, uc_stack
            ctypes.memmove(context + 8, (ctypes.c_uint64 * 4)(*link_stack), 32)
            words = [ctypes.c_uint64(each if isinstance(each, int) else ctypes.addressof(each)) for each in arguments]
            self._libc.makecontext(ctypes.c_void_p(context), function, len(words), *words)
            then = context
        return then

    def clone(self, flags: int, context: int, argument: int = 0) -> tuple[Any, ...]:
        """The call that starts a process or thread at `context`. With CLONE_PARENT_SETTID its pid goes to `told`."""
        stack_end = self.take() + _CONTEXT_BYTES + _STACK_BYTES
        setcontext = ctypes.cast(self._libc.setcontext, ctypes.c_void_p).value
        return self._libc.clone, setcontext, stack_end, flags, context, argument


def _give_back(libc: Any) -> None:
    """Reaps the middle processes of helpers that have ended."""
    for each in list(REGISTRY.clone_contexts):
        if libc.waitpid(each.middle, None, ctypes.c_uint(_WNOHANG | _WCLONE)) == each.middle.value:
            REGISTRY.clone_contexts.remove(each)


@contextlib.contextmanager
def _attributes(libc: Any, descriptor: int) -> Iterator[tuple[Any, Any]]:
    """posix_spawn's file actions and attributes: own session, default signals, DESCRIPTOR only."""
    actions, attributes = ctypes.create_string_buffer(_OPAQUE_BYTES), ctypes.create_string_buffer(_OPAQUE_BYTES)
    none, every = ctypes.create_string_buffer(_OPAQUE_BYTES), ctypes.create_string_buffer(b"\xff" * _OPAQUE_BYTES)
    spare = DESCRIPTOR + 1  # before glibc 2.29, dup2 to the same number keeps close-on-exec

    def do(function: Any, *arguments: Any) -> None:
        number = function(*arguments)
        if number != 0:
            raise OSError(number, os.strerror(number))

    do(libc.posix_spawn_file_actions_init, actions)
    try:
        do(libc.posix_spawn_file_actions_adddup2, actions, descriptor, spare)
        do(libc.posix_spawn_file_actions_adddup2, actions, spare, DESCRIPTOR)
        for standard in range(3):
            do(libc.posix_spawn_file_actions_addopen, actions, standard, b"/dev/null", os.O_RDWR, 0)
        if hasattr(libc, "posix_spawn_file_actions_addclosefrom_np"):  # glibc 2.34; `process.prepare` does it too
            do(libc.posix_spawn_file_actions_addclosefrom_np, actions, spare)
        do(libc.posix_spawnattr_init, attributes)
        do(libc.posix_spawnattr_setflags, attributes, _SETSIGDEF | _SETSIGMASK | _SETSID)
        do(libc.posix_spawnattr_setsigmask, attributes, none)
        do(libc.posix_spawnattr_setsigdefault, attributes, every)
        yield actions, attributes
    finally:
        libc.posix_spawn_file_actions_destroy(actions)


def _interpreter() -> str:
    """This process's Python. If embedded, sys.executable is empty or another program. Raises CannotStart."""
    version = "python{}.{}".format(*sys.version_info)
    try:
        running = str(Path("/proc/self/exe").readlink())
    except OSError as error:  # a process that has changed its user may not read it
        pass_on(error)
        running = ""
    for path in (
        sys.executable,
        getattr(sys, "_base_executable", None),
        running,
        f"{sys.exec_prefix}/bin/{version}",
        f"{sys.base_exec_prefix}/bin/{version}",
    ):
        # running a frozen application again would train again
        if path and Path(path).name.startswith("python") and shutil.which(path) == path:
            return path
    raise CannotStart("no Python interpreter was found to run the helper")


def _kept(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items() if name in KEPT or name.startswith(KEPT_PREFIXES)]


def _text(text: str) -> Any:
    return ctypes.create_string_buffer(os.fsencode(text))


def _vector(texts: list[str]) -> Any:
    """Like argv: pointers, the last one NULL."""
    return (ctypes.c_char_p * (len(texts) + 1))(*map(os.fsencode, texts))
