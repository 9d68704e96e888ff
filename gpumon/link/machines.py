"""The machines that a viewer watches through ssh instead of this one: their agents' folders, and their readings."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType

from gpumon_agent import endpoint, wire

from .errors import LinkError
from .ssh import Remote

FIRST_S = 90.0  # for a machine's first line: Python starts there, perhaps from a network file system
_LOOK_S = 0.05
_FOLDER = re.compile(r"ssh-([0-9a-f]+)-([0-9a-f]+)")
_FOLDER_BYTES_MAX = 70  # of what comes below the directory of endpoint, with the name that ssh binds at first


class Failed(LinkError):
    """No machine could be reached."""


class Machines:
    """The machines that a viewer watches, while it is entered. Leaves nothing behind.

    `python`: the Python that runs gpumon there; None: gpumon is on the PATH. Raises LinkError.
    """

    def __init__(self, destinations: Sequence[str], python: str | None = None) -> None:
        if shutil.which("ssh") is None:
            raise Failed("there is no ssh here", "install OpenSSH's client")
        for each in destinations:
            if not each.removeprefix("ssh://") or each.startswith("-"):
                raise Failed(f"{each!r} is no machine", "write [USER@]HOST, or a Host of ~/.ssh/config")
        self._received: deque[wire.Received] = deque(maxlen=4096)
        self._folder = _private_folder()
        try:
            self.remotes = [
                Remote(destination, self._folder / str(at), python, self._received.append)
                for at, destination in enumerate(dict.fromkeys(destinations))
            ]
        except OSError as error:
            raise Failed(f"{self._folder}: {error.strerror}", "free some space there") from error

    @property
    def folders(self) -> list[Path]:
        return [remote.agents for remote in self.remotes]

    def connect(self, tell: Callable[[str], object], *, ask: bool) -> None:
        """To all at once, then to those that need it one by one, asking on the terminal if `ask`.

        Returns when all have said which agents they have; `tell` gets a sentence for each that could not be reached.
        Raises Failed if none could.
        """
        for remote in self.remotes:
            remote.connect(ask=False, tell=tell)
        until = time.monotonic() + FIRST_S
        for remote in self.remotes:
            remote.settled.wait(max(0.0, until - time.monotonic()))
        for remote in self.remotes:
            if ask and remote.failure is not None and remote.may_ask:
                remote.connect(ask=True, tell=tell)
                remote.settled.wait()  # as long as a person needs
        silent = ("it sends nothing", "see whether it can be logged in to")
        failed = [
            (remote.name, remote.failure or silent)
            for remote in self.remotes
            if remote.failure is not None or not remote.settled.is_set()
        ]
        if len(failed) == len(self.remotes):
            name, (what, remedy) = failed[0]
            raise Failed(f"cannot reach {name}: {what.removeprefix(f'{name}: ')}", remedy)
        for name, (what, _) in failed:
            tell(f"{name} is left out: {what.removeprefix(f'{name}: ')}")

    def readings(self, pids: Callable[[], Collection[int]] = tuple) -> Readings:
        return Readings(self._received)

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending = [threading.Thread(target=remote.close) for remote in self.remotes]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)


class Readings:
    """What the machines report: `wire.Host` and `wire.Link`. In the place of a `host.Sampler`."""

    def __init__(self, received: deque[wire.Received]) -> None:
        self._received = received

    def __aiter__(self) -> Readings:
        return self

    async def __anext__(self) -> wire.Received:
        while not self._received:
            await asyncio.sleep(_LOOK_S)
        return self._received.popleft()

    def hurry(self, hurries: bool) -> None:
        """The machines read at their own rate."""

    async def aclose(self) -> None:
        """The links stay: `Machines` ends them."""

    async def __aenter__(self) -> Readings:
        return self

    async def __aexit__(self, *_: object) -> None:
        return


def _private_folder() -> Path:
    """A new folder in a directory of `endpoint`, after removing those of viewers that were killed."""
    reasons: list[str] = []
    for directory, fd in endpoint.openings(reasons):
        os.close(fd)
        if len(os.fsencode(directory)) + _FOLDER_BYTES_MAX > endpoint.PATH_BYTES_MAX:
            reasons.append(f"{directory} is too long a path for sockets")
            continue
        for left in directory.glob("ssh-*"):
            found = _FOLDER.fullmatch(left.name)
            if found and endpoint.start_time(int(found[1], 16)) != int(found[2], 16):
                shutil.rmtree(left, ignore_errors=True)
        folder = directory / f"ssh-{os.getpid():x}-{endpoint.start_time(os.getpid()) or 0:x}"
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
        else:
            return folder
    raise Failed("there is no place for the forwarded sockets: " + "; ".join(reasons), "set XDG_RUNTIME_DIR")
