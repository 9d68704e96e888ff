"""The exporter's server against those who hold connections open, and against those who must not read it."""

from __future__ import annotations

import contextlib
import gzip
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")

from gpumon.export import serving

EXPORTER = [sys.executable, "-m", "gpumon", "export", "prometheus"]
SCRAPE_S = 60.0  # of a hang: a scrape takes milliseconds
DESCRIPTORS = 256
Serve = Callable[..., tuple[subprocess.Popen[str], str]]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path, and closed to others."""
    path = Path(tempfile.mkdtemp(prefix="gm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """`serve(*options)`: the exporter, and where its first line says that it serves."""
    begun: list[subprocess.Popen[str]] = []

    def serve(*options: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [*EXPORTER, *(("--listen", "127.0.0.1:0") if "--socket" not in options else ()), *options],
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        begun.append(process)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving "), line + process.communicate()[1]
        return process, line.split()[1].rstrip(";")

    yield serve
    for process in begun:
        process.kill()
        process.communicate()


def refused(*options: str) -> str:
    """What the exporter says where it does not begin."""
    ran = subprocess.run([*EXPORTER, *options], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode in (1, 2)
    assert "Traceback" not in ran.stderr
    return ran.stderr.splitlines()[-1]


def place(url: str) -> tuple[str, int]:
    host, _, port = url.split("/")[2].rpartition(":")
    return host, int(port)


def scrape(url: str, **headers: str) -> str:
    asked = urllib.request.Request(url, headers={name.replace("_", "-"): text for name, text in headers.items()})
    with urllib.request.urlopen(asked, timeout=SCRAPE_S) as answer:
        return answer.read().decode()


def status(url: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        scrape(url, **headers)
    caught.value.close()
    return caught.value.code


def raw(url: str, request: bytes) -> bytes:
    """All that comes back until the other side closes."""
    with socket.create_connection(place(url), SCRAPE_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def over_socket(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SCRAPE_S)
        connection.connect(path)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


# ----------------------------------------------------------------------------------------------- held open by others


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX: "], ids=["silent", "half a request"])
def test_300_open_connections_stop_no_scrape(serve: Serve, sent: bytes) -> None:
    process, url = serve()
    with contextlib.ExitStack() as held:
        for _ in range(300):
            connection = held.enter_context(socket.create_connection(place(url), SCRAPE_S))
            connection.sendall(sent)
        for _ in range(3):
            assert "gpumon_jobs 0.0" in scrape(url)
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 64 + 32  # noqa: PTH208
        assert len(os.listdir(f"/proc/{process.pid}/task")) < 16  # noqa: PTH208
    assert "gpumon_jobs 0.0" in scrape(url)


def test_who_sends_a_byte_now_and_then_is_dropped_and_stops_no_scrape(serve: Serve) -> None:
    _, url = serve()
    ended = threading.Event()
    dropped = threading.Event()

    def drips() -> None:
        with socket.create_connection(place(url), SCRAPE_S) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            try:
                while not ended.wait(0.2):
                    connection.sendall(b"x")
            except OSError:
                dropped.set()

    threads = [threading.Thread(target=drips) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert "gpumon_jobs 0.0" in scrape(url)
    assert dropped.wait(SCRAPE_S)
    assert "gpumon_jobs 0.0" in scrape(url)
    ended.set()
    for thread in threads:
        thread.join()


def test_who_does_not_take_the_answer_stops_no_scrape(serve: Serve) -> None:
    _, url = serve()
    with contextlib.ExitStack() as held:
        for _ in range(64 + 8):
            connection = held.enter_context(socket.create_connection(place(url), SCRAPE_S))
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "gpumon_jobs 0.0" in scrape(url)


def test_many_scrapes_at_once_are_all_answered(serve: Serve) -> None:
    _, url = serve()
    got: list[str] = []
    threads = [threading.Thread(target=lambda: got.append(scrape(url))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("gpumon_jobs 0.0" in text for text in got) == 32


def test_an_answer_larger_than_every_buffer_arrives_whole() -> None:
    """Taken slowly, by a reader with a small window."""
    import asyncio

    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    gauge = Gauge("figure", "x" * 100, ["label"], registry=registry)
    for number in range(100_000):
        gauge.labels(f"{number:0100}").set(number)

    def take(address: tuple[str, int]) -> bytes:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(SCRAPE_S)
            connection.connect(address)
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(65536), b""))

    async def run() -> bytes:
        with serving.listen_at("127.0.0.1", 0) as listening:
            serves = asyncio.create_task(serving.Scrapes(registry).serve(listening))
            got = await asyncio.to_thread(take, listening.getsockname()[:2])
            serves.cancel()
            return got

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert int(head.split(b"Content-Length: ")[1].split()[0]) == len(body) > 10_000_000


# ------------------------------------------------------------------------------------------------------ what is asked


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET /metrics?name[]=gpumon_jobs HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405 Method Not Allowed"),
        (b"nonsense\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", b"400 Bad Request"),
        (b"GET \xff HTTP/1.1\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000, b"431 Request Header Fields Too Large"),
    ],
    ids=["get", "head", "name", "other", "post", "nonsense", "no colon", "no path", "large"],
)
def test_a_request_is_answered_and_the_connection_closed(serve: Serve, request_: bytes, expected: bytes) -> None:
    process, url = serve()
    head, _, body = raw(url, request_).partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"HTTP/1.1 " + expected
    assert b"Connection: close" in head
    assert int(head.split(b"Content-Length: ")[1].split()[0]) == (len(body) or 0) or request_.startswith(b"HEAD")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


def test_the_librarys_formats_and_compression_stay(serve: Serve) -> None:
    _, url = serve()
    assert scrape(url, Accept="application/openmetrics-text; version=1.0.0").endswith("# EOF\n")
    asked = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(asked, timeout=SCRAPE_S) as answer:
        assert b"gpumon_jobs 0.0" in gzip.decompress(answer.read())


# ------------------------------------------------------------------------------------------------------- who may ask


def test_only_who_sends_the_token_is_answered(serve: Serve, folder: Path) -> None:
    token = folder / "token"
    token.write_text("open-sesame\n")
    process, url = serve("--token-file", str(token))
    assert "gpumon_jobs 0.0" in scrape(url, Authorization="Bearer open-sesame")
    assert "gpumon_jobs 0.0" in scrape(url, Authorization="bearer  open-sesame")
    for wrong in ("", "Bearer", "Bearer open-sesam", "Bearer open-sesame2", "Basic open-sesame", "Bearer \xe9"):
        assert status(url, **({"Authorization": wrong} if wrong else {})) == 401
    assert b'WWW-Authenticate: Bearer realm="gpumon"' in raw(url, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert b"open-sesame" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "{} is empty: the token is its only line."),
        (b" \n\n", "{} is empty: the token is its only line."),
        (b"two\nlines\n", "{} holds no token: a token is one line of ASCII characters without spaces."),
        (b"x" * 5000, "{} holds no token: a token is one line of ASCII characters without spaces."),
        (b"\xc3\xa9", "{} holds no token: a token is one line of ASCII characters without spaces."),
        (None, "{} cannot be read: No such file or directory."),
    ],
    ids=["empty", "blank", "two lines", "long", "not ascii", "missing"],
)
def test_a_file_that_holds_no_token_is_one_sentence(folder: Path, content: bytes | None, expected: str) -> None:
    path = folder / "token"
    if content is not None:
        path.write_bytes(content)
    assert refused("--token-file", str(path)) == "Error: " + expected.format(path)


def test_an_address_that_others_reach_is_said_to_be_open(serve: Serve, folder: Path) -> None:
    (folder / "token").write_text("x")
    process, _ = serve("--listen", "0.0.0.0:0")
    assert process.stderr is not None
    assert "everyone who can reach this address can read the metrics" in process.stderr.readline()
    process, _ = serve("--listen", "0.0.0.0:0", "--token-file", str(folder / "token"))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[1] == ""


@pytest.mark.parametrize("umask", [0, 0o777])
def test_a_unix_socket_is_its_owners_alone(serve: Serve, folder: Path, umask: int) -> None:
    path = folder / "metrics.sock"
    before = os.umask(umask)
    try:
        process, where = serve("--socket", str(path))
    finally:
        os.umask(before)
    assert where == str(path)
    found = path.lstat()
    assert (stat.S_ISSOCK(found.st_mode), stat.S_IMODE(found.st_mode), found.st_uid) == (True, 0o600, os.geteuid())
    assert "gpumon_jobs 0.0" in over_socket(where)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert not path.exists()


@needs_root
def test_another_user_cannot_open_the_socket(serve: Serve, folder: Path) -> None:
    path = folder / "metrics.sock"
    serve("--socket", str(path))
    folder.chmod(0o755)  # what protects it now is its own mode
    code = f"""
import os, socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect({str(path)!r})
except PermissionError:
    print("refused")
"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "refused\n"
    )


def test_a_socket_that_nobody_listens_at_is_replaced(serve: Serve, folder: Path) -> None:
    path = folder / "metrics.sock"
    first, _ = serve("--socket", str(path))
    first.kill()
    first.wait()
    assert path.exists()
    serve("--socket", str(path))
    assert "gpumon_jobs 0.0" in over_socket(str(path))
    assert refused("--socket", str(path)) == f"Error: another process listens at {path}."
    assert "gpumon_jobs 0.0" in over_socket(str(path))


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_nothing_else_is_replaced(folder: Path, what: str) -> None:
    path = folder / "metrics.sock"
    if what == "file":
        path.write_text("mine")
    elif what == "folder":
        path.mkdir()
    else:
        (folder / "target").write_text("mine")
        path.symlink_to(folder / "target")
    before = path.lstat().st_ino
    assert refused("--socket", str(path)) == f"Error: {path} exists and is no socket of yours."
    assert path.lstat().st_ino == before


@needs_root
@pytest.mark.parametrize("what", ["its socket", "its folder"])
def test_nothing_of_another_user_is_touched(folder: Path, what: str) -> None:
    path = folder / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
    os.chown(path if what == "its socket" else folder, 65534, 65534)
    assert refused("--socket", str(path)).startswith(f"Error: {path if what == 'its socket' else folder} ")
    assert path.exists()


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o1777)
    assert refused("--socket", str(folder / "x")).endswith("choose one that only you can write to.")
    assert list(folder.iterdir()) == []


def test_a_path_that_cannot_be_is_one_sentence(folder: Path) -> None:
    assert refused("--socket", str(folder / ("x" * 200))).endswith("is too long for a socket.")
    assert refused("--socket", str(folder / "no" / "x")).endswith("No such file or directory.")
    assert "exclude each other" in refused("--socket", str(folder / "x"), "--listen", "127.0.0.1:1")
