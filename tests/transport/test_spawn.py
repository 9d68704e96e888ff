"""The helper is started so that the training script cannot notice it, and has nothing of the trainer's but one memory.

Each script stands for a training script. Its helpers sleep for half a minute at most, and are killed when a test ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from seccomp import REFUSE, X86_64

from gpumon.cli.subreaper import under_subreaper

PRELUDE = (
    """
import ctypes, fcntl, json, os, platform, resource, signal, struct, subprocess, sys, threading, time
from pathlib import Path
from gpumon_agent.transport import spawn

SLEEPS = "import os, time; os.pwrite(3, b'ready', 0); time.sleep(30)"
memory = os.memfd_create("ours")
libc = ctypes.CDLL(None)
helpers = []

def start(bootstrap=SLEEPS, descriptor=None, **options):
    helpers.append(spawn.start(bootstrap, memory if descriptor is None else descriptor, **options))
    Path(os.environ["HELPERS"], str(helpers[-1])).mkdir()  # takes no descriptor; for the test to kill it
    return helpers[-1]

def ready():
    "The helper's interpreter has begun with the code."
    until = time.monotonic() + 30
    while os.pread(memory, 5, 0) != b"ready":
        assert time.monotonic() < until
        time.sleep(0.01)

def wait():
    try:
        return os.wait()
    except ChildProcessError:
        return "no child"

def children():
    return [Path(task, "children").read_text() for task in Path("/proc/self/task").iterdir()]

def buried():
    "Not even __WALL knows a child."
    try:
        return os.waitpid(-1, os.WNOHANG | 0x40000000)
    except ChildProcessError:
        return "no child"

def status(pid, *names):
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [lines[name].split()[0] for name in names]
"""
    + REFUSE
)

SLEEPS = b"time.sleep("
Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for each helper that was started; what is left of them is killed."""
    folder = tmp_path / "helpers"
    folder.mkdir()
    monkeypatch.setenv("HELPERS", str(folder))
    yield folder
    for pid in _pids(folder):
        if SLEEPS in _command(pid):  # what a process 1 says is a number of its own container, and somebody else's here
            os.kill(pid, signal.SIGKILL)


def _pids(folder: Path) -> list[int]:
    return [int(each.name) for each in folder.iterdir()]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _is_alive(pid: int) -> bool:
    """A zombie is not: of this machine's init nobody knows when it reaps."""
    return _command(pid) != b""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """What a script prints, its last line read as JSON."""

    def run(script: str, *before: str, python: str = sys.executable, **options: Any) -> Any:
        done = subprocess.run(
            [*before, python, "-c", PRELUDE + textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            **options,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


# ------------------------------------------------------------------------------------------------- not to be noticed


def test_nothing_in_the_process_tells_of_it(run: Run) -> None:
    before, after = run("""
        import psutil
        def looked():
            return [
                wait(), buried(), children(), sorted(os.listdir("/proc/self/fd")), os.listdir("/proc/self/task"),
                threading.active_count(), len(psutil.Process().children(recursive=True)), os.umask(0o22), os.getcwd(),
                sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), sorted(os.sched_getaffinity(0)),
                os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0), os.getpgid(0), sorted(signal.sigpending()),
            ]
        os.umask(0o22)
        before = looked()
        start()
        print(json.dumps([before, looked()]))
    """)
    assert before == after
    assert before[:2] == ["no child", "no child"]


def test_no_child_signal_comes(run: Run) -> None:
    """Neither as it starts nor as it ends: to a handler, to who waits for it, to a signalfd."""
    called, waited, readable, pending = run("""
        import select
        called = []
        signal.signal(signal.SIGCHLD, lambda *_: called.append(1))
        ended = start("pass")
        while Path(f"/proc/{ended}").exists() and status(ended, "State") != ["Z"]:
            time.sleep(0.01)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        mask = struct.pack("Q", 1 << (signal.SIGCHLD - 1))
        fd = libc.signalfd(-1, mask + bytes(120), 0)
        start("pass")
        start()
        os.kill(helpers[-1], signal.SIGKILL)
        waited = signal.sigtimedwait([signal.SIGCHLD], 0.5)
        print(json.dumps([called, waited, select.select([fd], [], [], 0)[0], sorted(signal.sigpending())]))
    """)
    assert (called, waited, readable, pending) == ([], None, [], [])


def test_a_script_that_ignores_child_signals(run: Run) -> None:
    """The kernel buries ordinary children of such a process by itself: ours is not one."""
    assert run("""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        start()
        print(json.dumps([wait(), buried(), signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN]))
    """) == ["no child", "no child", True]


def test_own_children_are_waited_for_as_ever(run: Run) -> None:
    assert run("""
        own = subprocess.Popen(["sleep", "0.2"])
        start()
        pid, code = os.wait()
        print(json.dumps([pid == own.pid, code, wait()]))
    """) == [True, 0, "no child"]


def test_a_subreaper_does_not_adopt_it(run: Run) -> None:
    waited, listed, attribute, adopted = run("""
        libc.prctl(36, 1, 0, 0, 0)
        start()
        waited, listed = wait(), children()
        attribute = ctypes.c_int()
        libc.prctl(37, ctypes.byref(attribute), 0, 0, 0)
        orphan = subprocess.run(["sh", "-c", "sleep 0.2 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, text=True)
        print(json.dumps([waited, listed, attribute.value, os.wait()[0] == int(orphan.stdout)]))
    """)
    assert (waited, listed) == ("no child", [""])
    assert (attribute, adopted) == (1, True), "it is no subreaper any more"


def test_process_1_of_a_container(run: Run, as_init: list[str]) -> None:
    own, called, waited, listed, alive = run(
        """
        import psutil
        called = []
        signal.signal(signal.SIGCHLD, lambda *_: called.append(1))
        fds = os.listdir("/proc/self/fd")
        pid = start()
        ready()
        waited = wait()
        assert os.listdir("/proc/self/fd") == fds
        listed = [(each.pid == pid, each.status() == "zombie") for each in psutil.Process().children(recursive=True)]
        print(json.dumps([os.getpid(), called, waited, listed, psutil.Process(pid).is_running()]))
        """,
        *as_init,
    )
    assert own == 1
    assert (called, waited, alive) == ([], "no child", True)
    assert listed == [[False, True], [True, False]], "documented: the process between the two, and the helper"


def test_process_1_starts_helpers_again_and_again(run: Run, as_init: list[str]) -> None:
    """What stays for one of them goes with it."""
    listed, lasting, failed, called, waited = run(
        """
        called = []
        signal.signal(signal.SIGCHLD, lambda *_: called.append(1))
        def ended(pid):
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.01)
            (middle,) = [int(each) for each in children()[0].split()]
            while status(middle, "Threads") != ["1"]:
                time.sleep(0.01)
        for _ in range(20):
            ended(start("pass"))
        start()
        listed, lasting = children()[0].split(), len(spawn.REGISTRY.clone_contexts)
        for _ in range(20):
            try:
                start(descriptor=-1)
            except spawn.CannotStart as error:
                failed = str(error)
        assert children()[0].split() == listed and len(spawn.REGISTRY.clone_contexts) == lasting
        print(json.dumps([len(listed), lasting, failed, called, wait()]))
        """,
        *as_init,
    )
    assert (listed, lasting) == (1, 1)
    assert "Bad file descriptor" in failed
    assert (called, waited) == ([], "no child")


def test_process_1_that_closes_files_is_obeyed(run: Run, as_init: list[str]) -> None:
    """No process of ours keeps the far end of the script's pipes open."""
    read, alive = run(
        """
        read, write = os.pipe()
        pid = start()
        os.close(write)
        print(json.dumps([os.read(read, 1).decode(), Path(f"/proc/{pid}").exists()]))
        """,
        *as_init,
    )
    assert (read, alive) == ("", True)


def test_process_1_that_starts_another_helper_does_not_wait_for_the_first(run: Run, as_init: list[str]) -> None:
    alive = run(
        """
        first = start()
        start()
        print(json.dumps(Path(f"/proc/{first}").exists()))
        """,
        *as_init,
    )
    assert alive


def test_signals_to_the_group_do_not_reach_it(run: Run) -> None:
    """Ctrl-C, `timeout` and `kill -- -PGID` signal a process group."""
    session, group, interrupted, alive = run(
        """
        interrupted = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, _: interrupted.append(number))
        pid = start()
        ready()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.killpg(0, number)
        time.sleep(0.3)
        print(json.dumps([os.getsid(pid) == pid, os.getpgid(pid) == pid, len(interrupted), status(pid, "State")]))
        """,
        start_new_session=True,
    )
    assert (session, group, interrupted) == (True, True, 4)
    assert alive == ["S"]


def test_signals_while_it_starts_are_taken_once_and_by_the_script(run: Run) -> None:
    """The middle shares the script's memory: a handler that ran in it would run for the script, a second time.

    Real-time signals are counted, not merged, and the C handler writes a byte for each that it takes.
    """
    taken, started, alive = run(
        """
        number = signal.SIGRTMIN + 1
        read, write = os.pipe2(os.O_NONBLOCK)
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 16)
        signal.set_wakeup_fd(write)
        signal.signal(number, lambda *_: None)
        sender = subprocess.Popen([sys.executable, "-c", '''if 1:
            import os, signal, time
            signal.signal(signal.SIGRTMIN + 1, signal.SIG_IGN)
            for _ in range(3000):
                os.killpg(0, signal.SIGRTMIN + 1)
                time.sleep(0.0003)
        '''])
        while sender.poll() is None:
            start("import time; time.sleep(20)")
            time.sleep(0.02)
        taken = len(os.read(read, 1 << 16))
        alive = sum(status(pid, "State") != ["Z"] for pid in helpers if Path(f"/proc/{pid}").exists())
        print(json.dumps([taken, len(helpers), alive]))
        """,
        start_new_session=True,
    )
    assert taken == 3000
    assert alive == started > 5


def test_a_pipe_ends_with_the_script(helpers: Path) -> None:
    """`train.py | tee log` returns although the helper lives."""
    script = PRELUDE + "print(start(), flush=True)"
    began = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" 2>&1 | cat', sys.executable, script], capture_output=True, text=True, timeout=240
    )
    (pid,) = _pids(helpers)
    assert done.stdout == f"{pid}\n"
    assert _is_alive(pid), f"it ended by itself, after {time.monotonic() - began:.0f} s"


def test_dryrun_does_not_wait_for_it(helpers: Path) -> None:
    """`gpumon dryrun` is a subreaper and leaves nothing of what it ran."""
    done = subprocess.run(
        under_subreaper([sys.executable, "-c", PRELUDE + "start(); ready(); sys.exit(7)"]), timeout=240
    )
    (pid,) = _pids(helpers)
    assert done.returncode == 7
    assert not _is_alive(pid)


def test_closing_all_descriptors_does_not_matter(run: Run) -> None:
    assert run("""
        pid = start()
        ready()
        os.closerange(3, 4096)
        time.sleep(0.2)
        print(json.dumps(status(pid, "State")))
    """) == ["S"]


def test_a_forked_child_has_no_part_in_it(run: Run) -> None:
    assert (
        run("""
        start()
        child = os.fork()
        if child == 0:
            os._exit(wait() == "no child" and children() == [""])
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    """)
        == 1
    )


def test_a_thousandth_start_leaves_no_more_than_the_first(run: Run) -> None:
    """With threads that allocate, start threads and look at errno. GPUMON_FUZZ_TIMES=10 for a thousand."""
    times = 100 * int(os.environ.get("GPUMON_FUZZ_TIMES", "1"))
    first, last, maps, wrong = run(f"""
        going, wrong = True, []
        def works():
            n = 0
            while going:
                n = n * 31 % 997 + 1
                blocks = [bytearray(n * 300) for _ in range(20)]
                thread = threading.Thread(target=len, args=[blocks])
                thread.start()
                thread.join()
                threading.Event().wait(0.0005)
                try:
                    os.stat("/not there")
                except OSError as error:
                    if error.errno != 2:
                        wrong.append(error.errno)
        def state():
            old = ctypes.c_int()
            found = [sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), sorted(os.listdir("/proc/self/fd"))]
            for change in (libc.pthread_setcancelstate, libc.pthread_setcanceltype):
                change(0, ctypes.byref(old))
                found.append(old.value)
            return [*found, wait(), buried(), Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()]
        def maps():
            return len(Path("/proc/self/maps").read_text().splitlines())
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        start("pass")
        first, before = state(), maps()
        workers = [threading.Thread(target=works, daemon=True) for _ in range(3)]
        for worker in workers:
            worker.start()
        for _ in range({times}):
            start("import os; os._exit(0)")
            last = state()
            if last != first:
                break
        going = False
        for worker in workers:
            worker.join()
        print(json.dumps([first, last, maps() - before, wrong]))
    """)
    assert first == last
    assert wrong == []
    assert maps < 40, "malloc's arenas for three threads, and nothing for each start"


def test_an_exception_at_any_line_leaves_nothing(run: Run) -> None:
    """Raised by a signal handler or a debugger: signals are not left blocked, a subreaper is one, no child is left."""
    lines, found = run("""
        libc.prctl(36, 1, 0, 0, 0)
        def state():
            attribute = ctypes.c_int()
            libc.prctl(37, ctypes.byref(attribute), 0, 0, 0)
            return [sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), attribute.value, wait(), buried()]
        class Late(Exception):
            pass
        def starts_but_for(line):
            seen = 0
            def trace(frame, event, _):
                nonlocal seen
                if not frame.f_code.co_filename.endswith("transport/spawn.py"):
                    return None
                if event == "line":
                    seen += 1
                    if seen == line:
                        raise Late
                return trace
            sys.settrace(trace)
            try:
                spawn.start("pass", memory)
            except Late:
                return False
            finally:
                sys.settrace(None)
            return True
        line, found = 1, []
        while not starts_but_for(line):
            if state() != [[], 1, "no child", "no child"]:
                found.append([line, state()])
            line += 1
        print(json.dumps([line, found]))
    """)
    assert found == []
    assert lines > 50


# ------------------------------------------------------------------------------------------- what the helper is given


def test_of_the_environment_it_has_what_it_needs(run: Run) -> None:
    ours = {
        "HOME": "/h", "USER": "u", "LANG": "C.UTF-8", "LC_TIME": "C", "TZ": "UTC", "TMPDIR": "/t", "TEMP": "/t",
        "TMP": "/t", "XDG_RUNTIME_DIR": "/run/u", "LD_LIBRARY_PATH": "/l", "GPUMON_NAME": "é\udcff", "PATH": "/usr/bin",
        "XDG_STATE_HOME": "/s",
    }  # fmt: skip
    theirs = {"LD_PRELOAD": "/nowhere.so", "PYTHONPATH": "/p", "PYTHONHOME": "/p", "LD_AUDIT": "/a", "WANDB_KEY": "s"}
    found = run(f"""
        pid = start(environment={ours | theirs!r})
        ready()
        print(json.dumps(os.fsdecode(Path(f"/proc/{{pid}}/environ").read_bytes())))
    """)
    assert dict(each.split("=", 1) for each in found.rstrip("\0").split("\0")) == ours


def test_nothing_of_the_script_runs_in_it(run: Run, tmp_path: Path) -> None:
    """A sitecustomize on PYTHONPATH, a module in the working directory."""
    (tmp_path / "sitecustomize.py").write_text("import os; open(os.environ['GPUMON_NAME'], 'a').write('site ')")
    (tmp_path / "json.py").write_text("import os; open(os.environ['GPUMON_NAME'], 'a').write('json ')")
    seen = tmp_path / "seen"
    environment = {**os.environ, "GPUMON_NAME": str(seen)}
    run(
        f"""
        os.chdir({str(tmp_path)!r})
        os.environ["PYTHONPATH"] = {str(tmp_path)!r}
        start("import json, os; os.pwrite(3, b'ready', 0)")
        ready()
        print("null")
        """,
        env=environment,
    )
    assert not seen.exists()


def test_signals_are_as_after_boot(run: Run) -> None:
    """Blocked ones are delivered, ignored ones end it. Python itself ignores SIGPIPE and SIGXFSZ."""
    blocked, ignored, handled, pending = run("""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD])
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        pid = start()
        ready()
        print(json.dumps([int(each, 16) for each in status(pid, "SigBlk", "SigIgn", "SigCgt", "ShdPnd")]))
    """)
    assert (blocked, pending) == (0, 0)
    assert ignored & 0x7FFFFFFF == 1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1
    assert handled == 1 << signal.SIGINT - 1


@pytest.mark.parametrize("number", [0, 2, 3, 4, 5, 700])
def test_one_descriptor_whatever_its_number(run: Run, number: int) -> None:
    found = run(f"""
        read, write = os.pipe()
        for each in (50, 51, 900):
            os.dup2(write, each, inheritable=True)
        ours = fcntl.fcntl(memory, fcntl.F_DUPFD_CLOEXEC, 1000)
        os.dup2(ours, {number}, inheritable=False)
        memory = ours
        pid = start(descriptor={number})
        ready()
        found = {{each.name: str(each.readlink()) for each in Path(f"/proc/{{pid}}/fd").iterdir()}}
        sys.stdout = open("/proc/self/fd/1" if {number} != 1 else "/dev/null", "w")
        print(json.dumps(found))
    """)
    null = "/dev/null"
    assert found == {"0": null, "1": null, "2": null, "3": "/memfd:ours (deleted)"}


@pytest.mark.parametrize(
    "wrong",
    ["''", "None", "'/nowhere/python3'", "'/usr/bin/env'", "'/usr/lib/python3'", "'/etc/passwd'"],
)
def test_another_sys_executable(run: Run, wrong: str) -> None:
    """Empty where Python is embedded; the application where it is frozen, which must not be run again."""
    real, found = run(f"""
        sys.executable = sys._base_executable = {wrong}
        pid = start()
        ready()
        print(json.dumps([str(Path(f"/proc/{{each}}/exe").readlink()) for each in ("self", pid)]))
    """)
    assert found == real


def test_the_running_program_cannot_be_read(run: Run) -> None:
    """As by another user where / or the program's folder is closed; then `sys.executable` is enough."""
    real, found = run("""
        def closed(path):
            raise PermissionError(13, "Permission denied", str(path))

        readlink, Path.readlink = Path.readlink, closed
        pid = start()
        Path.readlink = readlink
        ready()
        print(json.dumps([str(Path(f"/proc/{each}/exe").readlink()) for each in ("self", pid)]))
    """)
    assert found == real


def test_an_application_that_embeds_python(run: Run, tmp_path: Path) -> None:
    """It is no Python itself. The one of its prefix is taken, and where there is none, none is started."""
    application = tmp_path / "application"
    shutil.copy(os.path.realpath(sys.executable), application)
    environment = {**os.environ, "PYTHONHOME": sys.base_prefix, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found, why = run(
        """
        sys.executable = sys._base_executable = sys.argv[0]
        pid = start()
        ready()
        found = str(Path(f"/proc/{pid}/exe").readlink())
        sys.exec_prefix = sys.base_exec_prefix = "/nowhere"
        try:
            start()
        except spawn.CannotStart as error:
            print(json.dumps([found, str(error)]))
        """,
        python=str(application),
        env=environment,
    )
    assert Path(found).name.startswith("python")
    assert why == "no Python interpreter was found to run the helper"


# ------------------------------------------------------------------------------------------------ where it cannot be


def test_no_free_descriptor(run: Run) -> None:
    """It takes none of the script's."""
    assert run("""
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                os.dup(0)
        except OSError as error:
            full = error.errno
        start()
        ready()
        print(json.dumps([full, wait()]))
    """) == [24, "no child"]


@pytest.mark.parametrize("free", [0, 1])
def test_no_free_process(run: Run, free: int) -> None:
    """Neither for the process between, nor for the helper after it."""
    if os.getuid() != 0:
        pytest.skip("another user's processes count: needs root to be one who has none")
    assert run(f"""
        import tempfile
        folder = tempfile.TemporaryDirectory()
        os.chmod(folder.name, 0o755)
        sys.executable = folder.name + "/python3"  # which another user reaches; it does not come to run it
        os.symlink("/bin/true", sys.executable)
        another = 1_000_000 + os.getpid()
        os.setresuid(another, another, 0)
        resource.setrlimit(resource.RLIMIT_NPROC, ({free} + 1, {free} + 1))
        try:
            spawn.start(SLEEPS, memory)
        except spawn.CannotStart as error:
            print(json.dumps([str(error), wait(), buried()]))
        os.seteuid(0)
    """) == [
        "the helper could not be started: [Errno 11] Resource temporarily unavailable",
        "no child",
        "no child",
    ]


def test_address_space_runs_out(run: Run) -> None:
    """Wherever it does: no helper and the reason, or a helper; training goes on."""
    outcomes, left = run("""
        size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        outcomes, unlimited = [], (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        for more in range(0, 2 << 20, 32 << 10):
            resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))
            why = None
            try:
                spawn.start("pass", memory)
            except spawn.CannotStart as error:
                why = error
            finally:
                resource.setrlimit(resource.RLIMIT_AS, unlimited)  # before anything here needs memory
            outcomes.append("started" if why is None else str(why))
        print(json.dumps([outcomes, [wait(), buried()]]))
    """)
    assert outcomes[0] != "started"
    assert outcomes[-1] == "started"
    assert {each for each in outcomes if each != "started"} <= {
        "the helper could not be started: [Errno 12] Cannot allocate memory",
        "the helper could not be started: out of memory",
    }
    assert left == ["no child", "no child"]


def test_a_context_with_its_stack_takes_64_kib(run: Run) -> None:
    """One page of the largest kind (aarch64): less would take as much. As process 1, each helper keeps some of them."""
    each = run("""
        contexts = spawn._Contexts(libc, None, None)
        def size():
            return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        contexts.take()
        before = size()
        for _ in range(1000):
            contexts.take()
        print((size() - before) // 1000)
    """)
    assert 64 << 10 <= each < 66 << 10


@X86_64
@pytest.mark.parametrize("calls", [(56, 435), (59,), (33,), (112,)], ids=["clone", "execve", "dup2", "setsid"])
def test_the_system_refuses(run: Run, calls: tuple[int, ...]) -> None:
    """As a container's seccomp filter may."""
    assert run(f"""
        refuse(*{calls}, errno=1)
        try:
            spawn.start(SLEEPS, memory)
        except spawn.CannotStart as error:
            print(json.dumps([str(error), wait(), buried(), children()]))
    """) == ["the helper could not be started: [Errno 1] Operation not permitted", "no child", "no child", [""]]


def test_a_descriptor_that_is_none(run: Run) -> None:
    assert run("""
        try:
            start(descriptor=999)
        except spawn.CannotStart as error:
            print(json.dumps([str(error), wait(), buried()]))
    """) == ["the helper could not be started: [Errno 9] Bad file descriptor", "no child", "no child"]


@X86_64
def test_another_machine(run: Run) -> None:
    """Of which the layout of contexts is not known."""
    if shutil.which("setarch") is None:
        pytest.skip("no setarch here")
    assert (
        run(
            """
        try:
            start()
        except spawn.CannotStart as error:
            print(json.dumps(str(error)))
        """,
            "setarch",
            "i686",
        )
        == "the helper needs the GNU C library on x86-64 or aarch64"
    )
