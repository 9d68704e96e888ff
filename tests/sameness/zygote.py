"""A process with torch imported that becomes a script in each of its forks, for the sameness suite.

Unlike tests/_shared/forks.py it runs the script in the real `__main__`, leaves every signal and timer alone, and takes
torch as `gpumon run` gives it. A job is a line of JSON: {"argv", "env", "cwd", "out", "err", "timeout", "worked"}; the
answer is {"code": the exit code, negative for a signal, None for one that hung}.

`worked` is a file that says what the agent of the process did, if it has one, written after the script and before its
atexit. A fork whose script returns ends as Python does, joining threads and calling atexit, but leaves out the second
in which Python takes torch's modules apart: that is for the scripts that run in a process of their own.
"""

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading


def serve():
    import torch
    import torch._dynamo

    assert not torch.cuda.is_initialized(), "a fork of this process could not use CUDA"
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(job)
            return
        print(json.dumps({"code": ended(pid, job["timeout"])}), flush=True)


def ended(pid, timeout):
    descriptor = os.pidfd_open(pid)
    hung = not select.select([descriptor], [], [], timeout)[0]
    os.close(descriptor)
    if hung:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has started and not ended
    return None if hung else code


def become(job):
    """Run the script as Python would, and end as it would; returns where the interpreter itself is to end."""
    os.setsid()
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        descriptor = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    path = job["argv"][0]
    sys.argv = list(job["argv"])
    sys.path[0] = os.path.dirname(path)
    sys.modules["__main__"].__dict__.clear()
    sys.modules["__main__"].__dict__.update(
        __name__="__main__", __builtins__=__builtins__, __file__=path, __spec__=None, __doc__=None
    )
    sys.job = job
    # prints what nobody caught, calls excepthook, and ends the interpreter at a SystemExit, all as Python itself does
    failed = ctypes.pythonapi.PyRun_SimpleString(b"__import__('zygote').run()")
    if job["whole"] and not failed:
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if failed and sys.last_type is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(1 if failed else 0)


def run():
    job = sys.job
    del sys.job
    path = job["argv"][0]
    with open(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    pid = os.getpid()
    try:
        exec(code, sys.modules["__main__"].__dict__)
    finally:
        if os.getpid() == pid:
            tell_what_worked(job["worked"])


def tell_what_worked(path):
    registry = sys.modules.get("gpumon_agent.registry")
    agent = registry.REGISTRY.agent if registry is not None else None
    worked = {} if agent is None else {"events": agent.recorder.last_seq + 1, "off": list(agent.guard.off)}
    with open(path, "w") as file:
        json.dump(worked, file)
