"""Where agents are found: a private directory with a socket and a descriptor file per agent.

The directory is `$XDG_RUNTIME_DIR/gpumon`, else `gpumon-UID` in the system's temporary directory. It is used only if it
is ours, not a symbolic link and closed to others: a user who can write there could pose as a training process. If
another user created `gpumon-UID` before us, it is `gpumon-UID-` and eight random characters beside it, which cannot be
created in advance. Viewers look into all that are ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from gpumon_agent import wire
from gpumon_agent._version import __version__
from gpumon_agent.guard import pass_on

PATH_BYTES_MAX = 106  # sockaddr_un holds 108 with its final NUL; libzmq wants one less
DESCRIPTOR_BYTES_MAX = 128 * 1024
CONTROL = ".ask"  # suffix of a control socket
_DIR_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_THIS_MACHINE = ("127.", "localhost:", "::1:")  # a rendezvous that says nothing about other machines
_BESIDE = re.compile("-[0-9a-f]{8}")


class Unavailable(Exception):
    """No safe place for a socket. The text is one sentence for a person."""


class Descriptor(msgspec.Struct, frozen=True):
    """One agent, as in its file in the runtime directory. File names consist of `pid` and `nonce`."""

    pid: int
    start_time: int  # field 22 of /proc/PID/stat, clock ticks since boot; 0 without /proc
    boot_id: str
    pid_ns: str  # a pid is valid only in its namespace
    nonce: str  # hex; the same as in Hello
    name: str
    host: str
    argv: tuple[str, ...]
    endpoint: str = ""  # ipc://PATH; empty until the publisher has bound it
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    run_id: str | None = None
    parent: int = 0  # the pid that started this process: ranks of one launcher share it
    protocol: tuple[int, int] = (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR)
    agent: str = __version__
    unix_ns: int = 0  # when the agent began
    control: str = ""  # ipc://PATH of the socket for wire.Request; empty if there is none
    program: str = ""  # see `program`; empty if unknown
    rendezvous: str = ""  # MASTER_ADDR:MASTER_PORT, where the ranks of a job meet
    spawned: bool = False  # by multiprocessing, of `parent`
    via: str = ""  # the machine from which a viewer forwards it through ssh; empty: it runs on this one
    ahead_ns: int = 0  # what that machine's wall clock lacks to this one's

    @property
    def stem(self) -> str:
        return f"{self.pid}-{self.nonce[:8]}"

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the ranks of one job. torchrun's run id is the word "none" unless the user chose one.

        Processes started by multiprocessing may not know their rank yet, and torchrun's ranks use another port after
        each restart: both are grouped by their parent. Forwarded ranks belong together whichever machine they are on.
        """
        if self.run_id not in (None, "", "none"):
            return ("" if self.via else self.host, self.name, self.run_id)
        several = self.world_size is not None and self.world_size > 1
        if several and self.via and self.rendezvous and not self.rendezvous.startswith(_THIS_MACHINE):
            return ("", self.name, self.rendezvous)
        if several and self.rendezvous and not self.spawned and self.run_id is None:
            return (self.host, self.name, self.rendezvous)
        return (self.host, self.name, self.parent) if several or self.spawned else (self.nonce,)


def describe(
    name: str,
    *,
    unix_ns: int = 0,
    rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    run_id: str | None = None,
) -> Descriptor:
    """This process, with a new nonce from the system's randomness, never from a generator of the training."""
    pid = os.getpid()
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    return Descriptor(
        pid=pid,
        start_time=start_time(pid) or 0,
        boot_id=boot_id(),
        pid_ns=pid_namespace(),
        nonce=os.urandom(8).hex(),
        name=wire.clean(name),
        host=os.uname().nodename,
        argv=wire.clean_argv(sys.argv),
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        run_id=run_id,
        parent=(parent.pid if parent is not None else None) or os.getppid(),
        unix_ns=unix_ns,
        program=program(pid),
        rendezvous=rendezvous(),
        spawned=parent is not None,
    )


def rendezvous() -> str:
    """Where the ranks of a job meet in `init_process_group` (its method env://); empty if not set."""
    where, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return wire.clean(f"{where}:{port}") if where and port.isdecimal() else ""


def notebook(environment: Mapping[str, str], folder: str) -> str:
    """What a Jupyter kernel is called: its notebook's file, as Jupyter's server tells it, or else where it runs."""
    name, dot, _ = Path(environment.get("JPY_SESSION_NAME", "")).name.partition(".ipynb")  # VS Code appends to it
    return wire.clean(f"{name}{dot}" if dot and name else f"notebook in {Path(folder).name or folder}")


# ------------------------------------------------------------------------------------------------ processes' identity


def start_time(pid: int) -> int | None:
    """When `pid` began, in clock ticks since boot. None: there is no such process, or it is a zombie."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def program(pid: int) -> str:
    """Identifies the program of `pid` by where its code and its stack begin. Empty if the system does not say.

    exec keeps pid and start time but randomizes these addresses again. They fail only if address randomization is off
    (as in a debugger) and a program is replaced by itself.
    """
    fields = _stat(pid)
    code, stack = (fields[23], fields[25]) if fields else ("0", "0")
    return "" if stack == "0" else f"{int(code):x}-{int(stack):x}"


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from its third field on (proc(5) counts from 1); empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError as error:
        pass_on(error)
        return []
    return text[text.rindex(")") + 2 :].split()  # the command before it may contain spaces and brackets


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        pass_on(error)
        return ""


def pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError as error:
        pass_on(error)
        return ""


# --------------------------------------------------------------------------------------------------------- directory


def candidates() -> Iterator[Path]:
    """Directories that an agent of this user may use, preferred first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_absolute():
        yield Path(runtime, "gpumon")
    usual = _in_temporary()
    if usual is not None:
        yield usual
        yield from _beside(usual)


def openings(reasons: list[str]) -> Iterator[tuple[Path, int]]:
    """Directories for this process's files, preferred first, created if needed. The caller closes the descriptors.

    Adds to `reasons` why others cannot be used.
    """
    for directory in candidates():
        try:
            fd = open_directory(directory, create=True)
        except (Unavailable, OSError) as error:
            reasons.append(str(error))
        else:
            yield directory, fd
    usual = _in_temporary()
    if usual is not None and _is_taken(usual):
        directory = usual.with_name(f"{usual.name}-{os.urandom(4).hex()}")
        try:
            fd = open_directory(directory, create=True)
        except (Unavailable, OSError) as error:
            reasons.append(str(error))
        else:
            yield directory, fd


_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")  # where gettempdir() looks before the current folder


def _in_temporary() -> Path | None:
    try:
        import tempfile  # imports random and OpenSSL: a megabyte of the helper's memory

        folder = tempfile.gettempdir()
        named = folder in _TEMPORARY or any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
        if not named and folder == os.getcwd():  # noqa: PTH109
            return None  # Python's last resort: a viewer in another folder would not find it
    except FileNotFoundError:  # nothing can be written anywhere
        return None
    return Path(folder, f"gpumon-{os.geteuid()}")


def _beside(usual: Path) -> list[Path]:
    """Our directories used instead of `usual`, if another user has that."""
    found, name = [], usual.name
    with contextlib.suppress(OSError), os.scandir(usual.parent) as entries:
        for entry in entries:
            if entry.name.startswith(name) and _BESIDE.fullmatch(entry.name, len(name)):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode):
                    found.append(usual.with_name(entry.name))
    return sorted(found)


def _is_taken(path: Path) -> bool:
    """Something other than a directory of ours exists there."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode)


def kept() -> Path | None:
    """What a logout leaves: `gpumon` in `$XDG_STATE_HOME`, by default in ~/.local/state. None: there is no home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if state.is_absolute():  # the XDG specification demands it
        return state / "gpumon"
    home = Path(os.environ.get("HOME", ""))
    return home / ".local" / "state" / "gpumon" if home.is_absolute() and home.is_dir() else None


def open_kept(name: str) -> tuple[Path, int]:
    """`name` in `kept()`, created if missing. The caller closes the descriptor. Raises Unavailable, or OSError."""
    place = kept()
    if place is None:
        raise Unavailable("there is no home directory")
    for folder in reversed((place, *place.parents)):
        if folder == place or not folder.is_dir():
            os.close(open_directory(folder, create=True))
    return place / name, open_directory(place / name, create=True)


def open_directory(path: Path, *, create: bool) -> int:
    """A descriptor of the directory at `path`, checked to be ours and closed to others. The caller closes it.

    Raises Unavailable with the reason; FileNotFoundError only if `create` is false.
    """
    try:
        _check_parent(path.parent)
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        fd = _open(path)
    except FileNotFoundError:
        if not create:
            raise
        raise Unavailable(f"{path.parent} does not exist") from None
    except OSError as error:
        refused = path.is_symlink() or (path.exists() and not path.is_dir())
        raise Unavailable(f"{path} is no directory of ours" if refused else f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        _check_owner(path, status)
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(fd, 0o700)  # a strict umask removed our own rights, or it was open to others
    except (OSError, Unavailable):
        os.close(fd)
        raise
    return fd


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | _DIR_FLAGS)  # a symbolic link: ELOOP or ENOTDIR
    except PermissionError:  # another user's, or ours, created under a umask that left us no rights
        fd = os.open(path, os.O_PATH | _DIR_FLAGS)
        try:
            _check_owner(path, os.fstat(fd))
            os.chmod(f"/proc/self/fd/{fd}", 0o700)  # noqa: PTH101
        finally:
            os.close(fd)
        return os.open(path, os.O_RDONLY | _DIR_FLAGS)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise Unavailable(f"{path} belongs to another user (uid {status.st_uid})")


def _check_parent(parent: Path) -> None:
    """Others must not be able to replace the directory: the parent is ours or root's, and sticky if shared."""
    status = parent.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise Unavailable(f"{parent} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise Unavailable(f"{parent} can be changed by other users")


def claim(descriptor: Descriptor) -> Place:
    """The first usable directory, with unused file names for `descriptor`. Raises Unavailable."""
    reasons: list[str] = []
    for directory, fd in openings(reasons):
        os.close(fd)
        path = directory / f"{descriptor.stem}.sock"
        if len(os.fsencode(path)) > PATH_BYTES_MAX:
            reasons.append(f"{directory} is too long a path for a socket")
        elif not os.access(directory, os.W_OK | os.X_OK):
            reasons.append(f"{directory} cannot be written to")
        elif os.path.lexists(path) or os.path.lexists(path.with_suffix(CONTROL)):
            reasons.append(f"{path} exists already")  # libzmq would replace any file
        else:
            stands_in = reasons and _BESIDE.fullmatch(directory.name[-9:])
            return Place(directory, descriptor.stem, f"{reasons[-1]}: {directory} is used instead" if stands_in else "")
    raise Unavailable("; ".join(reasons) or "no directory for temporary files can be written to")


def remove_left(descriptor: Descriptor) -> None:
    """Removes the files that an earlier, killed helper of the same agent left."""
    for directory in candidates():
        Place(directory, descriptor.stem).remove()


class Place:
    """An agent's sockets and descriptor file in a directory that `claim` found to be ours.

    `instead`: one sentence for a person if it is not the usual directory, else empty.
    """

    def __init__(self, directory: Path, stem: str, instead: str = "") -> None:
        self.instead = instead
        self.socket = directory / f"{stem}.sock"
        self.control = self.socket.with_suffix(CONTROL)
        self._file = directory / f"{stem}.json"
        self._pid = os.getpid()

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.socket}"

    def give_up_socket(self) -> None:
        """Removes its file, so that it can be bound again."""
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)

    def close_to_others(self) -> None:
        """Makes the sockets private whatever the umask. Call after each bind."""
        for path in (self.socket, self.control):
            with contextlib.suppress(OSError):
                path.chmod(0o600)

    def lacks_socket(self) -> bool:
        return not os.path.lexists(self.socket)

    def lacks_control(self) -> bool:
        return not os.path.lexists(self.control)

    def lacks_descriptor(self) -> bool:
        return not os.path.lexists(self._file)

    def publish(self, descriptor: Descriptor) -> None:
        """Writes the descriptor, completely or not at all. Raises Unavailable (a full disk)."""
        draft = self._file.with_suffix(".new")
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o600)  # whatever the umask
                file.write(msgspec.json.encode(descriptor))
            draft.replace(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise Unavailable(f"{self._file}: {error.strerror}") from error

    def remove(self) -> None:
        """Removes its files, but not in a forked child: they are the parent's."""
        if os.getpid() == self._pid:
            for path in (self._file, self.socket, self.control):
                try:
                    path.unlink(missing_ok=True)
                except OSError:  # the directory is gone or read-only: viewers remove what is left
                    return


def read_descriptor(path: Path) -> Descriptor | None:
    """Reads a descriptor file; None if it is gone or invalid (its name must match its content)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            raw = file.read(DESCRIPTOR_BYTES_MAX)
        descriptor = msgspec.json.decode(raw, type=Descriptor)
    except (OSError, msgspec.DecodeError):
        return None
    if path.name != f"{descriptor.stem}.json":
        return None
    return msgspec.structs.replace(
        descriptor,
        endpoint=f"ipc://{path.with_suffix('.sock')}",  # never a path from the file's content
        control=f"ipc://{path.with_suffix(CONTROL)}" if descriptor.control else "",
        name=wire.clean(descriptor.name),
        host=wire.clean(descriptor.host),
        argv=wire.clean_argv(descriptor.argv),
        run_id=None if descriptor.run_id is None else wire.clean(descriptor.run_id),
    )
