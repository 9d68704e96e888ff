"""Other machines through OpenSSH: the sockets of their agents, forwarded into a private folder of this one.

For each machine one `ssh` child runs `gpumon announce` there. Its lines say which agents there are and what the
machine's driver and system report. A second, short `ssh` asks the first to forward the sockets of each new agent
(ssh's multiplexing, with a control socket in the same folder). What then lies in the folder looks like a directory of
`gpumon_agent.endpoint`: `discovery.watch_elsewhere` reads it. Nothing listens on a network, and authentication is
ssh's alone; the agent there sees its own user's sshd.

A machine is named as the user named it, everywhere: readings belong to the ranks of one name. Wall clocks are related
when a machine is first heard, exact to the network's delay; monotonic clocks of two machines are never compared.

When a link is lost, the sockets go and the agents' files stay: `Connection` waits for the sockets. They come back with
the link, which is tried again after 1, 2, 4 … seconds, without asking anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from gpumon_agent import endpoint, wire
from gpumon_agent.endpoint import Descriptor

SSH_FAILED = 255  # the exit code of ssh itself; any other is the remote command's
NOT_FOUND = 127  # the shell's
LINE_BYTES_MAX = 16 << 20  # 128 descriptors of the largest size
AGENTS_MAX = 256  # of one machine: each costs two sockets
CONNECT_S = 15
ALIVE_S, ALIVE_TIMES = 5, 3  # ssh notices a dead network after 15 s
AGAIN_MAX_S = 30.0
_END_S = 3.0
ENDS_IN_S = 1.0
_PATH = re.compile(r"/[^:\\%$\x00-\x1f\x7f]+")  # that ssh's -L takes as it is
_NONCE = re.compile(r"[0-9a-f]{16}")


class Announced(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of `gpumon announce`."""

    unix_ns: int  # of that machine, when it was written
    protocol: tuple[int, int] = (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR)
    agents: tuple[Descriptor, ...] | None = None  # None: as before
    reading: wire.Host | None = None


class Remote:
    """One machine. A thread of its own listens to it; `settled` is set when it was heard, or could not be reached."""

    def __init__(
        self, destination: str, folder: Path, python: str | None, put: Callable[[wire.Received], object]
    ) -> None:
        self.name = destination.removeprefix("ssh://")
        self.agents = folder / "a"
        self.failure: tuple[str, str] | None = None
        self.may_ask = False
        """It failed in ssh itself, which perhaps wants a password or to ask about the host's key."""
        self.settled = threading.Event()
        self._destination = destination
        self._command = "gpumon announce" if python is None else f"{shlex.quote(python)} -m gpumon announce"
        self._python = python
        self._control = folder / "c"
        self._put = put
        self._heard = False
        self._ahead_ns = 0
        self._forwarded: dict[str, Descriptor] = {}  # by stem; agents as that machine describes them
        self._lost: str | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._said: deque[str] = deque(maxlen=20)  # by ssh and the command there
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        folder.mkdir(mode=0o700)
        self.agents.mkdir(mode=0o700)

    def connect(self, *, ask: bool, tell: Callable[[str], object]) -> None:
        """Begins. `ask`: ssh may ask on the terminal, and `tell` gets what it says meanwhile."""
        self.failure = None
        self.settled.clear()
        self._thread = threading.Thread(target=self._run, args=(ask, tell), name=f"gpumon-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._end_child()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _end_child(self) -> None:
        child = self._child
        if child is None or child.poll() is not None:
            return
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    # ------------------------------------------------------------------------------------------------- its thread

    def _run(self, ask: bool, tell: Callable[[str], object]) -> None:
        code = self._listen(ask, tell)
        if not self._heard:
            self.may_ask = code == SSH_FAILED
            self.failure = self._why(code)
            self.settled.set()
            return
        again_s = 1.0
        while not self._closing.is_set():
            self._lose(self._why(code)[0])
            until = time.monotonic() + again_s
            while (left := until - time.monotonic()) > 0:
                self._tell_link()  # again and again, for sessions that begin meanwhile
                if self._closing.wait(min(1.0, left)):
                    return
            again_s = min(2 * again_s, AGAIN_MAX_S)
            code = self._listen(False, tell)
            if self._lost is None:  # it was heard
                again_s = 1.0

    def _listen(self, ask: bool, tell: Callable[[str], object]) -> int:
        """Runs ssh until it ends. Returns its exit code."""
        self._said.clear()
        with contextlib.suppress(FileNotFoundError):
            self._control.unlink()
        self._child = child = subprocess.Popen(
            self._ssh(ask),
            stdin=subprocess.DEVNULL,  # it asks on the terminal itself
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=not ask,  # no terminal to ask on, and none whose Ctrl-C reaches it
        )
        if self._closing.is_set():
            self._end_child()
        assert child.stdout is not None
        errors = threading.Thread(target=self._read_errors, args=(child, tell if ask else None), daemon=True)
        errors.start()
        with child.stdout:
            while (line := child.stdout.readline(LINE_BYTES_MAX)).endswith(b"\n"):
                try:
                    announced = msgspec.json.decode(line, type=Announced)
                except msgspec.DecodeError:  # what a login shell prints, or a line of another version
                    continue
                if announced.protocol[0] != wire.PROTOCOL_MAJOR:
                    self._said.append(wire.mismatch_sentence(announced.protocol))
                    break
                self._take(announced)
            if line and not line.endswith(b"\n"):
                self._said.append("it sends a line without an end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDS_IN_S)  # its exit code says why, once it has closed its output
        self._end_child()
        errors.join(_END_S)
        return child.wait()

    def _read_errors(self, child: subprocess.Popen[bytes], tell: Callable[[str], object] | None) -> None:
        assert child.stderr is not None
        with child.stderr:
            while line := child.stderr.readline(wire.TEXT_CHARS_MAX):
                text = wire.clean(line.decode(errors="replace").strip(), wire.TEXT_CHARS_MAX)
                if text:
                    self._said.append(text)
                    if tell is not None and not self._heard:
                        tell(text)

    def _ssh(self, ask: bool) -> list[str]:
        options = {
            "BatchMode": "no" if ask else "yes",
            "ClearAllForwardings": "yes",  # the user's own: nothing may listen because of us
            "ConnectTimeout": str(CONNECT_S),
            "ControlMaster": "yes",
            "ControlPath": os.fspath(self._control),
            "ControlPersist": "no",
            "ForkAfterAuthentication": "no",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "ServerAliveCountMax": str(ALIVE_TIMES),
            "ServerAliveInterval": str(ALIVE_S),
            "StdinNull": "no",
            "StreamLocalBindMask": "0177",
            "StreamLocalBindUnlink": "yes",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", "-a", "-x", *words, "--", self._destination, self._command]

    def _take(self, announced: Announced) -> None:
        if not self._heard:
            self._ahead_ns = time.time_ns() - announced.unix_ns
            self._heard = True
        if announced.agents is not None:
            self._forward(announced.agents)
            self.settled.set()
            if self._lost is not None:
                self._lost = None
                self._tell_link()
        if announced.reading is not None:
            reading = msgspec.structs.replace(announced.reading, host=self.name)
            written = max(0, announced.unix_ns + self._ahead_ns)  # not now: it is matched with the agents' steps
            self._put(wire.Received(f"host:{self.name}", written, reading))

    def _forward(self, agents: Iterable[Descriptor]) -> None:
        """Makes the folder show `agents`."""
        there = {agent.stem: agent for agent in agents if _is_sound(agent)}
        there = dict(list(there.items())[:AGENTS_MAX])
        for stem in [stem for stem in self._forwarded if stem not in there]:
            self._ask_ssh("cancel", [self._forwarded.pop(stem)])
        for path in self.agents.glob("*.json"):  # also of agents that ended while the link was lost
            if path.stem not in there:
                endpoint.Place(self.agents, path.stem).remove()
        new = {stem: agent for stem, agent in there.items() if stem not in self._forwarded}
        if not new or not self._ask_ssh("forward", list(new.values())):
            return
        for stem, agent in new.items():
            self._forwarded[stem] = agent
            endpoint.Place(self.agents, stem).publish(
                msgspec.structs.replace(
                    agent,
                    host=self.name,
                    via=self.name,
                    pid_ns=f"ssh:{self.name}",  # its pids are other processes here
                    ahead_ns=self._ahead_ns,
                )
            )

    def _ask_ssh(self, what: str, agents: Sequence[Descriptor]) -> bool:
        """`what`: forward or cancel. Asks the running ssh about the sockets of `agents`; False: it refuses."""
        words = []
        for agent in agents:
            place = endpoint.Place(self.agents, agent.stem)
            words += ["-L", f"{place.socket}:{_path(agent.endpoint)}"]
            if agent.control:
                words += ["-L", f"{place.control}:{_path(agent.control)}"]
        # "-F none": no forwarding of the user's configuration may join in
        command = ["ssh", "-F", "none", "-S", os.fspath(self._control), "-O", what, *words, "--", "gpumon"]
        try:
            asked = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONNECT_S, check=False, text=True
            )
        except subprocess.TimeoutExpired:
            return False
        if asked.returncode and what == "forward":
            self._said.append(wire.clean(asked.stderr.strip(), wire.TEXT_CHARS_MAX))
        return asked.returncode == 0

    def _lose(self, why: str) -> None:
        for stem in self._forwarded:
            for path in (self.agents / f"{stem}.sock", self.agents / f"{stem}{endpoint.CONTROL}"):
                path.unlink(missing_ok=True)
        self._forwarded = {}
        self._lost = why
        self._tell_link()

    def _tell_link(self) -> None:
        self._put(wire.Received(f"link:{self.name}", time.time_ns(), wire.Link(self.name, self._lost)))

    def _why(self, code: int) -> tuple[str, str]:
        """What happened, and a remedy."""
        last = self._said[-1] if self._said else f"exit code {code}"
        if code == NOT_FOUND or "No module named" in last:
            runs = (
                f"{self._python} there has no gpumon" if self._python else "gpumon is not on the PATH of a login there"
            )
            return f"{self.name}: {runs}", "install it there, or name a Python that has it: --remote-python PATH"
        if "No such command 'announce'" in " ".join(self._said):
            return f"gpumon on {self.name} is older than this one", "upgrade it there"
        if code == SSH_FAILED:
            return f"ssh: {last.removeprefix('ssh: ').rstrip('.')}", f"see whether `ssh {self._destination} true` works"
        return f"{self.name}: {last}", f"see what `ssh {self._destination} {self._command}` prints"


def _path(ipc: str) -> str:
    return ipc.removeprefix("ipc://")


def _is_sound(agent: Descriptor) -> bool:
    """Whether its names can be used in file names and in ssh's arguments."""
    paths = [_path(each) for each in (agent.endpoint, agent.control) if each]
    sound = all(_PATH.fullmatch(path) and len(path) <= endpoint.PATH_BYTES_MAX for path in paths)
    return bool(agent.endpoint and sound and agent.pid > 0 and _NONCE.fullmatch(agent.nonce))
