"""Other machines through ssh, with real sshd processes on loopback: each has a runtime directory of its own.

Long: what stands for a machine comes first. It is an alias of an ssh configuration, which a script named `ssh` on the
PATH adds, because OpenSSH does not read HOME.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import select
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

pytestmark = pytest.mark.integration

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SSH = shutil.which("ssh")
ROOT = Path(__file__).parents[2]
TALKER = ROOT / "tests" / "link" / "talker.py"
DDP = ROOT / "tests" / "scenarios" / "ddp.py"
GPUMON = (sys.executable, "-m", "gpumon")
PATH = os.pathsep.join((os.fspath(ROOT), os.fspath(ROOT / "agent")))

if SSHD is None or SSH is None:
    pytest.skip("needs OpenSSH's client and server", allow_module_level=True)


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Machine:
    """An sshd on a port of its own, with the directories of a machine of its own."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str]) -> None:
        self.name, self.folder = name, folder / name
        self.folder.mkdir(mode=0o700)
        self.environment = {"XDG_RUNTIME_DIR": str(self.folder), "TMPDIR": str(self.folder), **environment}
        self.port = _free_port()
        sets = {**self.environment, "PYTHONPATH": PATH}
        said = " ".join(shlex.quote(f"{key}={value}").replace("'", '"') for key, value in sets.items())
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
            f"PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nSetEnv {said}\n"
        )
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert SSHD is not None
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")], stdin=subprocess.DEVNULL, stderr=log
            )
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._server is not None
        assert self._server.poll() is None, (self.folder / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        """As if its network were cut: the server and all its connections end."""
        if self._server is None:
            return
        for each in psutil.Process(self._server.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name() == "sshd" or each.name().startswith("sshd-"):
                    each.kill()
        self._server.kill()
        self._server.wait()
        self._server = None


class Cluster:
    """Machines, what runs on them, and a viewer's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.running: list[subprocess.Popen[Any]] = []
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        tools = folder / "bin"
        tools.mkdir()
        (tools / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/config "$@"\n')
        (tools / "ssh").chmod(0o755)
        (folder / "viewer").mkdir(mode=0o700)
        self.viewer = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": PATH,
            "XDG_RUNTIME_DIR": str(folder / "viewer"),
            "TMPDIR": str(folder / "viewer"),
        }

    def add(self, name: str, **environment: str) -> Machine:
        machine = self.machines[name] = Machine(name, self.folder, environment)
        with (self.folder / "config").open("a") as config:
            config.write(
                f"Host {name}\n HostName 127.0.0.1\n Port {machine.port}\n User {pwd.getpwuid(os.geteuid()).pw_name}\n"
                f" IdentityFile {self.folder}/user\n IdentitiesOnly yes\n UserKnownHostsFile {self.folder}/known\n"
                f" StrictHostKeyChecking accept-new\n LocalForward 127.0.0.1:{_free_port()} 127.0.0.1:9\n"
            )
        machine.start()
        return machine

    def talk(self, machine: Machine, **options: Any) -> IO[str]:
        """An agent there that makes ten steps a second. Commands go to what is returned."""
        talker = subprocess.Popen(
            [sys.executable, str(TALKER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PATH, **machine.environment},
        )
        self.running.append(talker)
        assert talker.stdin is not None
        assert talker.stdout is not None
        talker.stdout.readline()
        talker.stdin.write("background 10\n")
        talker.stdin.flush()
        return talker.stdin

    def attach(self, *words: str) -> subprocess.Popen[str]:
        """Its output goes to files: `out` and `err`."""
        with (self.folder / "out").open("w") as out, (self.folder / "err").open("w") as err:
            viewer = subprocess.Popen(
                [*GPUMON, "attach", *words, "--remote-python", sys.executable],
                env=self.viewer,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,  # no terminal to ask on
            )
        self.running.append(viewer)
        return viewer

    def attached(self, *words: str) -> tuple[int, str, str]:
        code = self.attach(*words).wait(120)
        return code, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def objects(self, kind: str) -> list[dict[str, Any]]:
        whole = (self.folder / "out").read_text().rpartition("\n")[0]
        return [each for each in map(json.loads, whole.splitlines()) if each["type"] == kind]

    def said(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def folders(self) -> list[Path]:
        return list((self.folder / "viewer" / "gpumon").glob("ssh-*"))

    def children(self, viewer: subprocess.Popen[str]) -> list[psutil.Process]:
        return [each for each in psutil.Process(viewer.pid).children() if each.name() == "ssh"]

    def announcing(self) -> list[psutil.Process]:
        """What viewers run on the machines."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[-1:] == ["announce"] and words[:1] == [sys.executable]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.environ().get("XDG_RUNTIME_DIR", "").startswith(str(self.folder)):
                        found.append(process)
        return found

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()
        for machine in self.machines.values():
            machine.stop()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="gs", dir="/tmp"))  # short: a socket's path is at most 107 bytes
    made = Cluster(folder)
    yield made
    made.end()
    shutil.rmtree(folder)


def numbers(steps: list[dict[str, Any]], rank: int) -> list[int]:
    return [each["step"] for each in steps if each["rank"] == rank]


def _forwarded(ssh: psutil.Process) -> set[str]:
    """The sockets on which it listens for an agent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return {each.laddr for each in ssh.net_connections("unix") if each.laddr.endswith((".sock", ".ask"))}
    return set()


def test_ranks_of_two_machines_form_one_job_and_a_lost_link_is_told_and_restored_without_a_gap(cluster: Cluster):
    seven, eight = cluster.add("node7"), cluster.add("node8")
    for rank, machine in enumerate((seven, eight)):
        cluster.talk(machine, name="night", rank=rank, world_size=2, run_id="n1")
    viewer = cluster.attach("node7,node8", "--json")
    wait_for(lambda: all(len(numbers(cluster.objects("step"), rank)) > 10 for rank in (0, 1)))
    assert {(each["rank"], each["host"]) for each in cluster.objects("hello")} == {(0, "node7"), (1, "node8")}

    seven.stop()
    wait_for(lambda: "gpumon: link to node7 lost, trying again: " in cluster.said())
    lost_at = numbers(cluster.objects("step"), 0)[-1]
    elsewhere = numbers(cluster.objects("step"), 1)[-1]
    wait_for(lambda: numbers(cluster.objects("step"), 1)[-1] > elsewhere + 20)  # the other goes on, and so do its steps
    assert numbers(cluster.objects("step"), 0)[-1] <= lost_at + 1
    assert not cluster.objects("goodbye")
    wait_for(lambda: len(cluster.announcing()) == 1)  # what ran on the lost machine has ended

    seven.start()
    wait_for(lambda: "gpumon: link to node7 restored" in cluster.said())
    wait_for(lambda: numbers(cluster.objects("step"), 0)[-1] > lost_at + 60)
    viewer.send_signal(signal.SIGTERM)
    assert viewer.wait(60) == 128 + signal.SIGTERM
    heard = numbers(cluster.objects("step"), 0)
    assert heard == list(range(heard[-1] + 1)), "the steps of the time without a link are missing"
    assert "did not reach this viewer" not in cluster.said()


def test_sockets_are_private_nothing_listens_on_a_network_and_nothing_is_left(cluster: Cluster):
    cluster.talk(cluster.add("node7"), name="night")
    before = psutil.Process(os.getpid()).username()
    viewer = cluster.attach("ssh://node7", "--json")
    wait_for(lambda: cluster.objects("step"))
    (folder,) = cluster.folders
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    sockets = [path for path in modes if path.is_socket()]
    assert {path.suffix for path in sockets} >= {".sock", ".ask"}
    assert {modes[path] for path in modes if not path.is_dir()} == {0o600}
    (ssh,) = cluster.children(viewer)
    assert ssh.username() == before
    assert not [each for each in ssh.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    viewer.kill()  # it cannot clean up: ssh ends by itself, and the next viewer removes what is left
    viewer.wait()
    wait_for(lambda: not ssh.is_running() or ssh.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: not cluster.announcing())
    assert cluster.folders == [folder]
    assert cluster.attached("node7,", "--json", "--once")[0] == 0
    assert not cluster.folders


def test_agents_that_come_later_join_and_one_that_ends_says_goodbye(cluster: Cluster):
    seven, eight = cluster.add("node7"), cluster.add("node8")
    first = cluster.talk(seven, name="night", rank=0, world_size=2, run_id="n1")
    viewer = cluster.attach("node7,node8", "--json")
    wait_for(lambda: cluster.objects("step"))
    second = cluster.talk(eight, name="night", rank=1, world_size=2, run_id="n1")
    wait_for(lambda: {each["rank"] for each in cluster.objects("step")} == {0, 1})
    (ssh,) = [each for each in cluster.children(viewer) if "node7" in each.cmdline()]
    assert _forwarded(ssh)
    for talker in (first, second):
        talker.write("goodbye\n")
        talker.flush()
        wait_for(lambda: not _forwarded(ssh))  # its sockets are not kept for as long as the viewer runs
    assert viewer.wait(60) == 0, cluster.said()
    assert {(each["rank"], each["reason"]) for each in cluster.objects("goodbye")} == {(0, "finished"), (1, "finished")}
    assert not cluster.folders


def test_a_killed_rank_is_dead_and_its_link_is_not_lost(cluster: Cluster):
    cluster.talk(cluster.add("node7"), name="night")
    viewer = cluster.attach("node7,", "--json")
    wait_for(lambda: cluster.objects("step"))
    cluster.running[0].kill()  # with its publisher, which lives in its process: nothing says goodbye
    cluster.running[0].wait()
    assert viewer.wait(60) == 0
    (bye,) = cluster.objects("goodbye")
    assert bye["reason"] == "lost"
    assert "on node7 is gone" in bye["detail"]
    assert "link" not in cluster.said()


@pytest.mark.torch
def test_the_driver_of_each_machine_is_read_there_and_never_here(cluster: Cluster, virtual_gpu):
    """A torchrun on each of two machines; they and the viewer's have devices of different sizes."""

    def of(memory: str) -> dict[str, str]:
        made = virtual_gpu(memory=memory).environment
        return {key: value for key, value in made.items() if os.environ.get(key) != value}

    sizes = {"node7": "20GiB", "node8": "30GiB"}
    cluster.viewer |= of("50GiB")
    port = _free_port()
    for name, memory in sizes.items():
        machine = cluster.add(name, **of(memory))
        torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "n1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        script = [str(DDP), "--steps", "600", "--sleep", "0.1", "--backend", "gloo"]
        cluster.running.append(
            subprocess.Popen(
                [*GPUMON, "run", "--name", "night", sys.executable, "-m", *torchrun, *script],
                env={**os.environ, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1", **machine.environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    viewer = cluster.attach("node7,node8", "--wait", "--json")
    wait_for(lambda: {each["host"] for each in cluster.objects("hello")} == {"node7", "node8"}, 120)
    host_of = {each["rank"]: each["host"] for each in cluster.objects("hello")}
    used = "processes"  # none before its process uses it
    wait_for(lambda: {each["rank"] for each in cluster.objects("host") if each["devices"][0][used]} == {0, 1})
    for each in cluster.objects("host"):
        (device,) = each["devices"]
        assert device["total"] == int(sizes[host_of[each["rank"]]].removesuffix("GiB")) << 30
        assert {process["ours"] for process in device[used]} <= {True}
        assert each["rss"]
    viewer.terminate()
    viewer.wait(60)
    code, out, _ = cluster.attached("node7,node8", "--once", "--ascii")
    assert code == 0
    assert "of 20.0 GiB" in out or "of 30.0 GiB" in out
    for torchrun_there in cluster.running[:2]:
        torchrun_there.terminate()
        torchrun_there.wait(60)


def test_slurm_says_which_machines_and_its_job_is_chosen(cluster: Cluster):
    """With commands that print what SLURM's manual says of `squeue -o %N` and `scontrol show hostnames`."""
    seven, eight = cluster.add("node7"), cluster.add("node8")
    for rank, machine in enumerate((seven, eight)):
        cluster.talk(machine, name="night", rank=rank, world_size=2, run_id="4711.0")
    cluster.talk(seven, name="other", run_id="4712.0")
    tools = {
        "squeue": 'test "$*" = "-j 4711 -h -o %N" && echo "node[7-8]"',
        "scontrol": 'test "$*" = "show hostnames node[7-8]" && printf "node7\\nnode8\\n"',
    }
    for name, body in tools.items():
        (cluster.folder / "bin" / name).write_text(
            f'#!/bin/sh\n{body} || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}\n'
        )
        (cluster.folder / "bin" / name).chmod(0o755)
    code, _, err = cluster.attached("--slurm", "4711", "--json", "--once")
    assert (code, err) == (0, "")
    assert {(each["rank"], each["host"]) for each in cluster.objects("hello")} == {(0, "node7"), (1, "node8")}
    wrong = cluster.attached("--slurm", "9", "--json", "--once")
    assert wrong == (1, "", "Error: squeue: slurm_load_jobs error: Invalid job id specified.\n")
    assert cluster.attached("--slurm", "x", "--once")[2] == (
        "Error: 'x' is no SLURM job: write its number, as squeue shows it.\n"
    )


def test_what_a_machine_sends_is_checked(cluster: Cluster):
    """A login that greets, and a machine that names sockets and files which it should not."""
    seven = cluster.add("node7")
    cluster.talk(seven, name="night")
    forged = cluster.folder / "forged.py"
    forged.write_text(
        "import sys, subprocess, msgspec\n"
        "print('Welcome to node7', flush=True)\n"
        "real = subprocess.Popen([sys.executable, '-m', 'gpumon', 'announce'], stdin=0, stdout=-1)\n"
        "for line in real.stdout:\n"
        "    said = msgspec.json.decode(line)\n"
        "    for each in list(said.get('agents') or ()):\n"
        "        said['agents'] += [{**each, 'nonce': '../../../' + each['nonce']}, {**each, 'pid': 7, 'endpoint':"
        " 'ipc:///x:127.0.0.1:22'}, {**each, 'pid': 8, 'endpoint': ''}]\n"
        "    print(msgspec.json.encode(said).decode(), flush=True)\n"
    )
    python = cluster.folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {forged}\n")
    python.chmod(0o755)
    with (cluster.folder / "out").open("w") as out:
        viewer = subprocess.Popen(
            [*GPUMON, "attach", "node7,", "--json", "--remote-python", str(python)], env=cluster.viewer, stdout=out
        )
    cluster.running.append(viewer)
    wait_for(lambda: cluster.objects("step"))
    (folder,) = cluster.folders
    assert len(list(cluster.folder.rglob("viewer/**/*.json"))) == 1, "only the true agent is forwarded"
    assert len(list(folder.rglob("*.sock"))) == 1
    viewer.terminate()
    viewer.wait(60)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("no.such.host,",), "Error: cannot reach no.such.host: ssh: Could not resolve hostname no.such.host: "),
        (("node7,", "night"), "Error: no job is named 'night'; there is: other."),
        (("node7,", "1"), "Error: no agent has pid 1; there is: other."),
        (("node7,", "--rank", "3"), "Error: There is no rank 3 in this job: "),
        (("node7,", "--inject"), "--inject works on this machine only"),
        (("--", "-oProxyCommand=x,"), "Error: '-oProxyCommand=x' is no machine; write [USER@]HOST"),
        (("12", "night"), "JOB and --remote-python are for other machines: HOST1,HOST2, USER@HOST or ssh://HOST"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(cluster: Cluster, words: tuple[str, ...], says: str):
    cluster.talk(cluster.add("node7"), name="other")
    first = [] if words[0] == "--" else ["--once"]
    with_python = [*first, "--remote-python", sys.executable]
    ran = subprocess.run(
        [*GPUMON, "attach", *with_python, *words], env=cluster.viewer, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert ran.returncode in (1, 2)
    assert says in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not cluster.folders


def test_a_machine_without_gpumon_and_one_that_refuses_are_said(cluster: Cluster):
    cluster.add("node7")
    ran = subprocess.run(
        [*GPUMON, "attach", "node7,", "--once"],
        env=cluster.viewer, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if shutil.which("gpumon", path="/usr/local/bin:/usr/bin:/bin") is None:
        assert ran.stderr == (
            "Error: cannot reach node7: gpumon is not on the PATH of a login there; install it there, or name a Python"
            " that has it: --remote-python PATH.\n"
        )
    (cluster.folder / "user.pub").write_text("")
    code, _, err = cluster.attached("node7,", "--once")
    assert code == 1
    assert "Permission denied (publickey)" in err
    assert "see whether `ssh node7 true` works" in err


def test_the_header_says_that_a_link_is_lost(cluster: Cluster):
    seven = cluster.add("node7")
    cluster.talk(seven, name="night")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    viewer = subprocess.Popen(
        [*GPUMON, "attach", "node7,", "--remote-python", sys.executable, "--ascii"],
        env={**cluster.viewer, "TERM": "xterm-256color"}, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True,
    )  # fmt: skip
    cluster.running.append(viewer)
    os.close(slave)
    seen = ""

    def shows(text: str) -> bool:
        nonlocal seen
        if select.select([master], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # the viewer has ended
                seen += os.read(master, 65536).decode(errors="replace")
        return text in re.sub(r"\x1b\[[0-9;?>=<]*[a-zA-Z$]|\x1b[=>]", "", seen)

    wait_for(lambda: shows("* live"))
    assert not shows("link to node7 lost")
    seven.stop()
    wait_for(lambda: shows("! link to node7 lost, trying again"))
    seen = ""
    seven.start()
    wait_for(lambda: shows("* live"))
    os.write(master, b"q")
    wait_for(lambda: shows("") and viewer.poll() is not None)
    os.close(master)
    assert viewer.returncode == 0
    assert not cluster.folders
