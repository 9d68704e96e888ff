"""A process that records made-up steps into the shared memory, driven by lines on its standard input.

Each line is a command with numbers; when it is done, one line of JSON goes to standard output. It imports no torch.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
import time
from collections.abc import Iterator

from gpumon_agent import endpoint, thread_clock, wire
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.quiet_mark import QuietMark
from gpumon_agent.transport import messages
from gpumon_agent.transport.memory import CALLED
from gpumon_agent.transport.trainer import Transport

GIB = 1 << 30


class Trains:
    def __init__(self, modules: int = 3) -> None:
        self.recorder = Recorder()
        self.modules = modules
        self.step = 0
        self.taken: list[str] = []
        self.phase = "forward"
        self.now_ns = time.monotonic_ns
        self.descriptor = endpoint.describe("train.py", unix_ns=time.time_ns())
        self.transport = Transport(
            self.recorder.drain,
            self.picture,
            lambda: messages.State((0,)),
            self.descriptor,
            now=lambda: (self.step, self.phase, self.now_ns()),
            counters=lambda: (1, 0, False, None),
            take=lambda request: self.taken.append(request.what),
            mark=QuietMark(),
        )

    def picture(self) -> list[wire.Event]:
        d = self.descriptor
        clock = wire.Clock(time.monotonic_ns(), time.time_ns())
        protocol = (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR)
        hello = wire.Hello(protocol, "0", d.nonce, d.name, d.host, d.pid, d.start_time, d.boot_id, d.argv, "3", clock)
        model = wire.Model(0, 0, "model", "Net", 100, 100, 400, 400, 0, self.modules)
        return [hello, model, *(wire.Module(0, 0, f"m.{i}", "Linear", 10, 40, 40, 0) for i in range(self.modules))]

    def start(self) -> bool:
        self.transport.start()
        return self.transport.wait_ready(60)

    def steps(self, count: int) -> int:
        for _ in range(count):
            now = time.monotonic_ns()
            for index in range(3):
                self.recorder.append(
                    wire.Phase(self.step, "forward", index, 0, now, 10**6, 8 * GIB, 9 * GIB, 10 * GIB, 10 * GIB)
                )
                self.transport.flush()
            self.recorder.append(wire.Step(self.step, now, 10**7, phases=3))
            self.transport.flush()
            self.step += 1
        return self.step

    def opens(self, ms: int) -> int:
        """A phase ends and another one opens that long after the last flush; the time of that."""
        flushed = self.transport._flushed_ns
        self.phase, self.now_ns = f"phase {ms}", lambda: flushed + 1_000_000 * ms
        self.recorder.append(wire.Phase(self.step, "short", ms, 0, self.now_ns(), 1, GIB))
        self.transport.tell()
        return flushed

    def until_restarted(self) -> int:
        """Trains on until another helper answers; its pid, or 0 where there will be none."""
        before = self.transport._helper
        until = time.monotonic() + 60
        while self.transport._helper == before and self.transport.running and time.monotonic() < until:
            self.steps(1)
            time.sleep(0.05)
        while self.transport.running and not self.transport._answer.ready:
            self.transport.flush()
            time.sleep(0.01)
        return self.transport._helper if self.transport.running else 0

    def helper(self) -> int:
        return self.transport._helper

    def called(self) -> bool:
        """Whether the helper says that it has a request."""
        assert self.transport._memory is not None
        return bool(self.transport._memory.words[CALLED] != self.transport._called)

    def requests(self) -> list[str]:
        self.transport.flush()
        return self.taken

    def many_modules(self, count: int) -> bool:
        self.modules = count
        self.transport.say(self.picture())
        until = time.monotonic() + 60
        while (self.transport._waiting or self.transport._long.waiting_bytes) and time.monotonic() < until:
            self.transport.flush()
            time.sleep(0.001)
        return not self.transport._waiting

    def described_in(self, *apart_ms: int) -> list[int]:
        """Microseconds of an endless description that each boundary takes, so long after the one before."""
        clock = at = time.monotonic_ns()
        slices = 0

        def endless() -> Iterator[None]:
            nonlocal clock, slices
            while True:
                slices += 1
                clock += 10_000
                yield None

        self.steps(3)
        thread_clock.thread_time_ns = thread_clock.monotonic_ns = lambda: clock
        self.now_ns = lambda: at
        self.transport.flush()
        self.transport.say(endless())
        took = []
        for each in apart_ms:
            at += each * 1_000_000
            before = slices
            self.transport.flush()
            took.append((slices - before) * 10)
        return took

    def waits(self) -> list[int]:
        """After all that can be said: what waits in this process for a helper."""
        for _ in range(100):
            self.transport.say(self.picture())
            self.transport.write_file([b"piece"], self.step, 0)
            self.transport.announce()
            self.steps(1)
        return [len(self.transport._waiting), len(self.recorder.drain())]

    def fork(self) -> int:
        """A child that trains on and ends as Python does. Its exit code."""
        pid = os.fork()
        if pid == 0:
            self.steps(10)
            self.transport.close(exits=True)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def closes_all(self) -> int:
        os.closerange(3, 256)
        return self.steps(1)

    def takes_all_descriptors(self) -> str:
        low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, high))
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            self.transport.start()
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))
        return "running" if self.transport.running else "unwatched"

    def leaves(self, code: int) -> None:
        def close() -> None:
            self.recorder.append(wire.Goodbye("finished", time.monotonic_ns(), self.step))
            self.transport.close(exits=True)

        atexit.register(close)
        sys.exit(code)

    def dies(self, code: int) -> None:
        os._exit(code)

    def execs(self) -> None:
        os.execv("/bin/sleep", ["sleep", "60"])

    def stops(self) -> float:
        began = time.monotonic()
        self.recorder.append(wire.Goodbye("stopped", time.monotonic_ns(), self.step))
        self.transport.close(exits=False)
        return time.monotonic() - began


def main() -> None:
    trains = Trains()
    print(json.dumps("begins"), flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        print(json.dumps(getattr(trains, verb)(*map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
