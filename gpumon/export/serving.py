"""Serves metrics over HTTP; clients that only open connections cannot block it.

A request must arrive within `REQUEST_S`; its answer must be read within `ANSWER_S`. At `CONNECTIONS_MAX` connections, a
new one replaces the oldest idle one (or, without one, the oldest busy one). One request per connection, of at most
`REQUEST_BYTES_MAX`. prometheus_client's WSGI application renders the metrics in a thread, one scrape at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

REQUEST_S = 5.0
ANSWER_S = 10.0
RETRY_S = 0.1
CONNECTIONS_MAX = 64
REQUEST_BYTES_MAX = 16 * 1024
TOKEN_BYTES_MAX = 4096

Headers = list[tuple[str, str]]


class RequestRefused(Exception):
    """It cannot serve. The text is one sentence."""


class _Request(NamedTuple):
    method: str
    path: str
    query: str
    headers: Mapping[str, str]  # by lower-case name


class _Wrong(Exception):
    def __init__(self, status: HTTPStatus, *headers: tuple[str, str]) -> None:
        self.status = status
        self.headers = headers


class Scrapes:
    """Answers `GET /metrics` from the registry. `token`: required as bearer token."""

    def __init__(self, registry: CollectorRegistry, token: bytes | None = None) -> None:
        from prometheus_client import make_wsgi_app

        self._application: Callable[..., Any] = make_wsgi_app(registry)
        self._token = token
        self._rendering = asyncio.Lock()
        self._idle: dict[asyncio.Task[None], None] = {}  # no request being answered; oldest first
        self._busy: dict[asyncio.Task[None], None] = {}  # request received, answer not yet sent

    async def serve(self, listening: socket.socket) -> None:
        """Runs until cancelled. Accepts one connection at a time: asyncio's servers accept all that wait, beyond the
        process's file limit.
        """
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except OSError:  # too many open files, or the client is gone
                    await asyncio.sleep(RETRY_S)
                    continue
                if len(self._idle) + len(self._busy) >= CONNECTIONS_MAX:
                    oldest = next(iter(self._idle or self._busy))
                    self._forget(oldest)
                    oldest.cancel()
                task = asyncio.create_task(self._connected(connection))
                self._idle[task] = None
                task.add_done_callback(self._forget)
                await asyncio.sleep(0)
        finally:
            for task in [*self._idle, *self._busy]:
                task.cancel()

    async def _connected(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        with connection, contextlib.suppress(OSError, asyncio.TimeoutError):  # the client is gone or too slow
            connection.setblocking(False)
            method = ""
            try:
                request = await asyncio.wait_for(_request(connection), REQUEST_S)
                method = request.method
                if task in self._idle:
                    self._busy[task] = self._idle.pop(task)
                self._check(request)
                async with self._rendering:
                    status, headers, body = await asyncio.to_thread(self._render, request)
            except _Wrong as wrong:
                status, body = wrong.status, f"{wrong.status.phrase}\n".encode()
                headers = [*wrong.headers, ("Content-Type", "text/plain; charset=utf-8")]
            answer = _head(status, headers, len(body)) + (b"" if method == "HEAD" else body)
            await asyncio.wait_for(loop.sock_sendall(connection, answer), ANSWER_S)
            if task in self._busy:
                self._idle[task] = self._busy.pop(task)
            connection.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(loop.sock_recv(connection, REQUEST_BYTES_MAX), REQUEST_S)  # else a close is a reset

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._idle.pop(task, None)
        self._busy.pop(task, None)

    def _check(self, request: _Request) -> None:
        if self._token is not None:
            kind, _, token = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
                raise _Wrong(HTTPStatus.UNAUTHORIZED, ("WWW-Authenticate", 'Bearer realm="gpumon"'))
        if request.method not in ("GET", "HEAD"):
            raise _Wrong(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", "GET, HEAD"))
        if request.path not in ("/", "/metrics"):
            raise _Wrong(HTTPStatus.NOT_FOUND)

    def _render(self, request: _Request) -> tuple[HTTPStatus, Headers, bytes]:
        status: list[HTTPStatus] = []
        headers: Headers = []

        def start(line: str, given: Headers) -> None:
            status.append(HTTPStatus(int(line.split()[0])))
            headers.extend(given)

        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        body = b"".join(self._application(environ, start))
        return status[0], headers, body


async def _request(connection: socket.socket) -> _Request:
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) >= REQUEST_BYTES_MAX:
            raise _Wrong(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        more = await asyncio.get_running_loop().sock_recv(connection, REQUEST_BYTES_MAX)
        if not more:
            raise ConnectionResetError
        data += more
    head = data[: data.index(b"\r\n\r\n")].decode("latin-1")
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        raise _Wrong(HTTPStatus.BAD_REQUEST)
    path, _, query = words[1].partition("?")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.isascii() or name != name.strip():
            raise _Wrong(HTTPStatus.BAD_REQUEST)
        headers[name.lower()] = value.strip()
    return _Request(words[0], path, query, headers)


def _head(status: HTTPStatus, headers: Headers, length: int) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in headers if name.lower() != "content-length"]
    lines += [f"Content-Length: {length}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


# ------------------------------------------------------------------------------------------------ tokens and sockets


def read_token(path: Path) -> bytes:
    """The token in the file, without the newline. Raises OSError or `RequestRefused`."""
    with path.open("rb") as file:
        token = file.read(TOKEN_BYTES_MAX + 1).strip()
    if not token:
        raise RequestRefused(f"{path} is empty: the token is its only line")
    if len(token) > TOKEN_BYTES_MAX or not token.isascii() or any(byte <= 32 or byte == 127 for byte in token):
        raise RequestRefused(f"{path} holds no token: a token is one line of ASCII characters without spaces")
    return token


def listen_at(host: str, port: int) -> socket.socket:
    """Raises OSError if it cannot listen there."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)


def listen_on(path: Path) -> socket.socket:
    """A UNIX socket with mode 0600 in a directory of ours. Raises OSError or `RequestRefused`.

    Replaces only a stale socket of ours.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  a symbolic link must not be followed
    folder = path.parent.stat()
    if folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
        raise RequestRefused(
            f"{path.parent} belongs to another user, or others can write to it: choose one that only you can write to"
        )
    _make_room(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        umask = os.umask(0o177)  # the process is our own
        try:
            listening.bind(os.fspath(path))
            listening.listen(socket.SOMAXCONN)
        finally:
            os.umask(umask)
    except OSError as error:
        listening.close()
        if error.errno is None:
            raise RequestRefused(f"{path} is too long for a socket") from None  # Python's own check, without an errno
        raise
    return listening


def _make_room(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise RequestRefused(f"{path} exists and is no socket of yours")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except (TimeoutError, BlockingIOError):
            pass  # it is overloaded, but listening
    raise RequestRefused(f"another process listens at {path}")


@contextlib.contextmanager
def removed_at_the_end(listening: socket.socket) -> Iterator[None]:
    """Removes a UNIX socket's file at the end, unless it was replaced."""
    if listening.family != socket.AF_UNIX:
        yield
        return
    path = Path(listening.getsockname())
    own = path.lstat().st_ino
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == own:
                path.unlink()
