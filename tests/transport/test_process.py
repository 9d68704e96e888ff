"""The helper is independent of what the trainer was given, and ends within two seconds of it, however it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumon_agent import endpoint
from gpumon_agent.transport.process import Trainer

WITHIN_S = 2.0
X86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are x86-64's")

REFUSE = """
import ctypes, struct
def refuse(*numbers, errno):
    "From now on the kernel answers these system calls with an error (seccomp(2))."
    steps = [struct.pack("HBBI", 0x20, 0, 0, 0)]
    for number in numbers:
        steps += [struct.pack("HBBI", 0x15, 0, 1, number), struct.pack("HBBI", 0x06, 0, 0, 0x50000 | errno)]
    steps.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))
    filters = ctypes.create_string_buffer(b"".join(steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(filters))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
"""

HELPER = """
import os, sys, time
sys.path[:0] = {path!r}
from gpumon_agent.transport import process
process.prepare()
trainer = process.Trainer({pid}, {start_time}, {program!r})
os.pwrite(3, b"ready", 0)
while not trainer.ended():
    time.sleep(0.1)
"""

TRAINER = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
from gpumon_agent.transport import spawn
from gpumon_agent import endpoint

memory = os.memfd_create("ours")

def start(helper={HELPER!r}):
    own = os.getpid()
    pid = spawn.start(
        helper.format(path=sys.path, pid=own, start_time=endpoint.start_time(own), program=endpoint.program(own)),
        memory,
    )
    print(pid, flush=True)
    return pid

def ready():
    while os.pread(memory, 5, 0) != b"ready":
        time.sleep(0.01)
"""


def _is_alive(pid: int) -> bool:
    return endpoint.start_time(pid) is not None


def _ends(pid: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not _is_alive(pid):
            return True
        time.sleep(0.02)
    return not _is_alive(pid)


Begin = Callable[..., "tuple[subprocess.Popen[str], int]"]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Runs a script until it has started a helper: the script's process and the helper's pid."""
    helpers = []

    def begin(script: str, *before: str) -> tuple[subprocess.Popen[str], int]:
        text = TRAINER + textwrap.dedent(script)
        trainer = subprocess.Popen(
            [*before, sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        helpers.append((trainer, int(trainer.stdout.readline())))
        return helpers[-1]

    yield begin
    for trainer, helper in helpers:
        trainer.kill()
        trainer.communicate()
        if _is_helper(helper) and not _ends(helper, 10):
            os.kill(helper, signal.SIGKILL)


def _is_helper(pid: int) -> bool:
    """What a process 1 says is a number of its own container: here it may be anybody's."""
    try:
        return b"process.prepare()" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(3)",
        "raise SystemError",
        "os._exit(0)",
        "os.abort()",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.execv('/bin/sleep', ['sleep', '60'])",
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)'])",
        "os.fork() or time.sleep(4)",
        "subprocess.Popen(['sleep', '4'])",
        "os.closerange(0, 4096)",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_it_ends_with_the_trainer(begin: Begin, end: str) -> None:
    """Also where the same process runs another program, or where a child of the trainer lives on."""
    trainer, helper = begin(f"start(); ready(); print(flush=True); sys.stdin.readline()\n{end}")
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    trainer.stdout.readline()
    time.sleep(0.5)
    assert _is_alive(helper)
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    if "exec" not in end:
        while endpoint.start_time(trainer.pid) is not None:  # its remains are enough: nobody has waited for it
            time.sleep(0.01)
    assert _ends(helper, WITHIN_S)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2])
def test_a_trainer_killed_while_the_helper_starts(begin: Begin, after_s: float) -> None:
    trainer, helper = begin("start(); time.sleep(60)")
    time.sleep(after_s)
    trainer.kill()
    assert _ends(helper, WITHIN_S)


def test_a_time_limit(begin: Begin) -> None:
    """`timeout` returns when the trainer ends, with its own exit code; the helper is gone two seconds later."""
    began = time.monotonic()
    trainer, helper = begin("start(); ready(); time.sleep(60)", "timeout", "2")
    assert trainer.wait(60) == 124
    assert time.monotonic() - began < 30
    assert _ends(helper, WITHIN_S)


def test_process_1_that_ends(begin: Begin, as_init: list[str]) -> None:
    """The kernel ends all that is in its container, and waits for nothing."""
    trainer, _ = begin("start(); ready(); print(os.getpid(), flush=True); sys.stdin.readline()", *as_init)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "1\n"
    trainer.communicate("\n", timeout=60)
    assert trainer.returncode == 0


def test_process_1_that_execs(begin: Begin, as_init: list[str]) -> None:
    """The old program's memory and the helper are gone within two seconds; the new one sees remains at most."""
    after = """if 1:
        import os, time
        time.sleep(2)
        for each in os.listdir("/proc"):
            if each.isdecimal() and each != "1":
                print(open(f"/proc/{each}/stat").read().rpartition(")")[2].split()[0], end=" ")
        print(flush=True)
    """
    trainer, _ = begin(f"start(); ready()\nos.execv(sys.executable, [sys.executable, '-c', {after!r}])", *as_init)
    out, _ = trainer.communicate(timeout=60)
    assert set(out.split()) <= {"Z"}


@X86_64
def test_without_pidfds(begin: Begin) -> None:
    """Linux before 5.3: the start times in /proc tell."""
    before, after = HELPER.split("process.prepare()\n")
    helper = f"{before}process.prepare()\n{REFUSE}\nrefuse(434, errno=38)\n{after}".replace(
        "os.pwrite", "assert trainer.fileno() is None\nos.pwrite"
    )
    braced = helper.replace(REFUSE, REFUSE.replace("{", "{{").replace("}", "}}"))
    trainer, pid = begin(f"start({braced!r}); ready(); print(flush=True); time.sleep(60)")
    assert trainer.stdout is not None
    trainer.stdout.readline()
    time.sleep(0.3)
    assert _is_alive(pid)
    trainer.kill()
    assert _ends(pid, WITHIN_S)


def test_the_end_can_be_waited_for() -> None:
    """A poll returns at the end, not at the next look."""
    import select

    sleeper = subprocess.Popen(["sleep", "60"])
    trainer = Trainer(sleeper.pid, endpoint.start_time(sleeper.pid) or 0)
    descriptor = trainer.fileno()
    if descriptor is None:
        pytest.skip("no pidfds here")
    assert select.select([descriptor], [], [], 0)[0] == []
    assert not trainer.ended()
    sleeper.kill()
    assert select.select([descriptor], [], [], 30)[0] == [descriptor]
    assert trainer.ended()
    sleeper.wait()
    assert trainer.ended()
    os.close(descriptor)


def test_of_a_trainer_that_wrote_only_the_end_is_looked_at() -> None:
    """A look into /proc costs as much as reading what it wrote. An exec is seen as soon as nothing more comes."""
    shell = subprocess.Popen(
        ["sh", "-c", "echo; read line; exec sleep 60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdout.readline()
    program = endpoint.program(shell.pid)
    watched = [Trainer(shell.pid, endpoint.start_time(shell.pid) or 0, program) for _ in range(2)]
    assert not any(trainer.ended() for trainer in watched)
    shell.stdin.close()
    until = time.monotonic() + 60
    while endpoint.program(shell.pid) in ("", program) and time.monotonic() < until:
        time.sleep(0.01)
    assert not watched[0].ended(wrote=True)
    assert watched[0].ended()
    shell.kill()
    shell.wait()
    shell.stdout.close()
    for trainer in watched:
        if (descriptor := trainer.fileno()) is not None:
            assert trainer.ended(wrote=True)
            os.close(descriptor)


def test_another_process_with_its_number() -> None:
    """The trainer had ended before the helper could look, and its pid was given away."""
    own = os.getpid()
    start_time = endpoint.start_time(own)
    assert start_time is not None
    for given, ended in ((start_time, False), (start_time - 1, True)):
        trainer = Trainer(own, given, endpoint.program(own))
        assert trainer.ended() is ended
        descriptor = trainer.fileno()
        if descriptor is not None:
            os.close(descriptor)
    ended_long_ago = subprocess.Popen(["true"])
    ended_long_ago.wait()
    trainer = Trainer(ended_long_ago.pid, 1)
    assert trainer.ended()
    assert trainer.fileno() is None


# --------------------------------------------------------------------------------------------------------- preparing


def _prepared(script: str, **options: Any) -> Any:
    """What a helper's process prints as JSON, in a session of its own."""
    text = "import json, os, sys\nfrom gpumon_agent.transport import process\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=60,
        **{"start_new_session": True, **options},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_prepare(tmp_path: Path) -> None:
    read, write = os.pipe()
    found = _prepared(
        """
        import resource
        os.umask(0)
        os.dup2(1, 3)
        os.dup2(1, 4)
        refused = process.prepare()
        name = open("/proc/self/comm").read()
        descriptors = [each for each in range(512) if os.path.exists(f"/proc/self/fd/{each}")]
        print(json.dumps([refused, os.getcwd(), os.umask(0), name, descriptors]))
        """,
        cwd=tmp_path,
        pass_fds=(write,),
    )
    os.close(read)
    os.close(write)
    assert found == [[], "/", 0o077, "gpumon\n", [0, 1, 2, 3]]


def test_limits() -> None:
    """Its own descriptors, CPU seconds and memory count; a crash leaves no core in `/`."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
        resource.setrlimit(resource.RLIMIT_CPU, (50, 5000))
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 31))
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)

    found = _prepared(
        """
        import resource
        process.prepare()
        print(json.dumps([resource.getrlimit(each) for each in (
            resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS
        )] + [resource.getrlimit(resource.RLIMIT_CORE)[0]]))
        """,
        preexec_fn=limit,
    )
    assert found == [[512, 512], [5000, 5000], [1 << 31, 1 << 31], 0]


def test_cpus_of_a_pinned_trainer() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one CPU only")
    found = _prepared(
        "before = len(os.sched_getaffinity(0)); process.prepare(); "
        "print(json.dumps([before, sorted(os.sched_getaffinity(0))]))",
        preexec_fn=lambda: os.sched_setaffinity(0, allowed[:1]),
    )
    before, after = found
    assert before == 1
    assert set(after) >= set(allowed)


def test_the_lowest_priority_that_still_runs() -> None:
    """Not SCHED_IDLE. Its autogroup, where there are any, as well."""
    refused, nice, policy, group = _prepared("""
        refused = process.lower_priority()
        group = "/proc/self/autogroup"
        group = open(group).read() if os.path.exists(group) else "nice 19"
        print(json.dumps([refused, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), group]))
    """)
    assert (refused, nice, policy) == ([], 19, os.SCHED_OTHER)
    assert group.split()[-2:] == ["nice", "19"]


def test_a_session_of_others_keeps_its_priority() -> None:
    """An autogroup is a session's: in another's, only the process itself steps back."""
    if not Path("/proc/self/autogroup").exists():
        pytest.skip("this kernel has no autogroups")
    before, after = _prepared(
        """
        import subprocess, sys
        before = open("/proc/self/autogroup").read()
        lower = "from gpumon_agent.transport import process; process.lower_priority()"
        subprocess.run([sys.executable, "-c", lower], check=True)
        print(json.dumps([before, open("/proc/self/autogroup").read()]))
        """
    )
    assert before == after


@X86_64
def test_what_the_system_refuses_is_said() -> None:
    found = _prepared(f"""
        {textwrap.indent(REFUSE, " " * 8).strip()}
        refuse(203, 141, errno=1)
        os.dup2(1, 3)
        print(json.dumps([process.prepare(), process.lower_priority()]))
    """)
    assert found == [["all CPUs: Operation not permitted"], ["nice 19: Operation not permitted"]]


def test_people_see_what_it_is(begin: Begin) -> None:
    """Its name in `ps`, and no word of the training's command line: `pkill -f train.py` is not for it."""
    _, helper = begin("start(); ready(); print(flush=True); sys.stdin.readline()")
    until = time.monotonic() + 30
    while Path(f"/proc/{helper}/comm").read_text() != "gpumon\n" and time.monotonic() < until:
        time.sleep(0.01)
    assert Path(f"/proc/{helper}/comm").read_text() == "gpumon\n"
    arguments = Path(f"/proc/{helper}/cmdline").read_bytes().split(b"\0")
    assert arguments[1:4] == [b"-I", b"-B", b"-S"]


def test_its_imports_are_few() -> None:
    """`prepare` runs before what takes time."""
    assert not _prepared(
        "print(json.dumps([each for each in ('msgspec', 'zmq', 'torch', 'ctypes') if each in sys.modules]))"
    )
