"""Has a running Python process run a piece of code: by `sys.remote_exec` (Python 3.14, PEP 768), or by gdb or lldb.

`sys.remote_exec` writes a path into the process, whose main thread runs that file when it next looks for signals. It
must be called by the same version of Python: by the process's own program.

A debugger stops the process (gdb for some tenths of a second, lldb for some seconds) and calls two functions in it:
mmap, for a page that holds the code, and `Py_AddPendingCall` (Python/ceval_gil.c), which queues it. The interpreter
runs it in the main thread, between two instructions, as it runs signal handlers: so no lock of the interpreter is held,
and nothing runs while C code blocks. Neither function waits for a lock that the stopped thread may hold, except the
queue's own, which is held for a few instructions. gdb reads the symbols of Python and the C library alone: those of
torch would take seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PAGE_BYTES = 4096
_LIBRARIES = ("libpython", "libc.so", "libc-")


_REMOTE = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
REMOTE_SINCE = 14  # of Python 3


class Refused(Exception):
    """The process cannot be reached. One sentence: why, and what to do."""


def remotely(pid: int, script: Path) -> bool:
    """Has the process run a file by `sys.remote_exec`, in the place of one that waits still. It must not raise: that
    would be printed. False: its Python is older. Raises Refused.
    """
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
    except OSError:
        program = Path()
    version = re.fullmatch(r"python3\.(\d+)t?", program.name)
    if version is None or int(version[1]) < REMOTE_SINCE:
        return False
    _check(pid)
    command = [f"/proc/{pid}/exe", "-I", "-S", "-c", _REMOTE, str(pid), str(script)]
    asked = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if asked.returncode:
        said = asked.stderr.strip().rpartition("\n")[2]
        raise Refused(f"process {pid} refuses sys.remote_exec: {said}" if said else f"process {pid} refuses")
    return True


def queue(pid: int, code: str) -> None:
    """Queues `code`, as a statement of `__main__`. It must not raise: that would end what the process is doing.

    Raises Refused.
    """
    content = code.encode() + b"\0"
    if len(content) > PAGE_BYTES:
        raise ValueError(f"{len(content)} bytes of code; {PAGE_BYTES} are possible")
    gdb, lldb = shutil.which("gdb"), shutil.which("lldb")
    if gdb is None and lldb is None:
        raise Refused("there is no gdb here: install it (apt install gdb), or restart the run under `gpumon run`")
    _check(pid)
    command = _by_gdb(gdb, pid, content) if gdb is not None else _by_lldb(str(lldb), pid, content)
    # in a session of its own, where ctrl-c does not reach it: if it were killed, a call would be left half made
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    ) as child:  # fmt: skip
        said, errors = child.communicate()
    queued = re.search(r"^(?:gpumon: queued |\(int\) \$queued = )(-?\d+)$", said, re.MULTILINE)
    if queued is None:
        raise Refused(_why(pid, errors, "gdb" if gdb is not None else "lldb"))
    if queued[1] != "0":
        raise Refused(f"process {pid} has too much queued already: try again")


_PAGE = f"((void *(*)(void *, unsigned long, int, int, int, long)) mmap)(0, {PAGE_BYTES}, 3, 0x22, -1, 0)"
_RUN = "(void *) &PyRun_SimpleString"
_QUEUE = "((int (*)(void *, void *)) Py_AddPendingCall)($run, $page)"


def _by_gdb(gdb: str, pid: int, content: bytes) -> list[str]:
    commands = [
        *(f"sharedlibrary {name}" for name in _LIBRARIES),
        f"set $page = (char*) {_PAGE}",
        f"set {{char[{len(content)}]}} $page = {{{','.join(map(str, content))}}}",
        f"set $run = {_RUN}",
        f'printf "gpumon: queued %d\\n", {_QUEUE}',
        "detach",
    ]
    before = ("set auto-load off", "set auto-solib-add off", "set debuginfod enabled off", "set confirm off")
    options = [word for each in before for word in ("-iex", each)]
    options += ["-p", str(pid), *(word for each in commands for word in ("-ex", each))]
    return [gdb, "-nx", "-batch", *options]


def _by_lldb(lldb: str, pid: int, content: bytes) -> list[str]:
    commands = (
        "settings set target.preload-symbols false",
        f"process attach --pid {pid}",
        f"expression -- void *$page = {_PAGE}",
        f"memory write --size 1 `$page` {' '.join(map(hex, content))}",
        f"expression -- void *$run = {_RUN}",
        f"expression -- int $queued = {_QUEUE}",
        "expression -- $queued",
        "detach",
    )
    return [lldb, "--batch", "--no-lldbinit", *(word for each in commands for word in ("-o", each))]


def _check(pid: int) -> None:
    try:
        owner = Path(f"/proc/{pid}").stat().st_uid
        status = Path(f"/proc/{pid}/status").read_text()
        spaces = {str(Path(f"/proc/{each}/ns/mnt").readlink()) for each in (pid, "self")}
    except OSError as error:
        raise Refused(f"process {pid} cannot be looked at: {error.strerror}") from None
    if owner != os.geteuid():
        raise Refused(f"process {pid} belongs to another user (uid {owner})")
    traced = re.search(r"^TracerPid:\s*([1-9]\d*)$", status, re.MULTILINE)
    if traced:
        raise Refused(f"process {pid} is traced by process {traced[1]}, a debugger: end that first")
    if len(spaces) > 1:
        raise Refused(f"process {pid} is in another container: run gpumon inside that one")


def _why(pid: int, said: str, debugger: str) -> str:
    if "ptrace" in said and "not permitted" in said:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope")
        if scope.exists() and scope.read_text().strip() in "123":
            return (
                f"the kernel lets no debugger reach process {pid} (kernel.yama.ptrace_scope): "
                "`sudo sysctl kernel.yama.ptrace_scope=0` allows it until the next boot"
            )
        return (
            f"the system lets no debugger reach process {pid}: "
            "a container needs --cap-add=SYS_PTRACE, or restart the run under `gpumon run`"
        )
    if re.search(r"""(No symbol|undeclared identifier) ['"]Py""", said):
        return f"process {pid} is not Python, or its symbols were stripped"
    words = [line.strip() for line in said.splitlines() if line.strip()]
    worst = [line for line in words if line.startswith("error: ")] or words[-1:]
    return f"{debugger} could not reach process {pid}" + (f": {worst[0]}" if worst else "")
