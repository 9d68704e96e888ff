"""A process with a real recorder and publisher and made-up events, driven by lines on its standard input.

Each line is a command with numbers; when it is done, one line of JSON goes to standard output.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_shared"))

from threaded import Threaded

from gpumon_agent import endpoint, wire
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.transport.control import Control

GIB = 1 << 30


class Talker:
    def __init__(self, options: dict[str, object]) -> None:
        self.recorder = Recorder(limit=100_000)
        self.step = 0
        self.modules = int(options.pop("modules", 3))
        self.protocol = tuple(options.pop("protocol", (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR)))
        self.module_name = str(options.pop("module", "layers.{}"))
        self.descriptor = endpoint.describe(str(options.pop("name", "talk.py")), unix_ns=time.time_ns(), **options)
        self.heard: list[wire.Request] = []
        self.flows = False  # a step each time that the publisher looks for new events
        self.publisher = Threaded(
            self, self.picture, self.heartbeat, self.descriptor,
            control=Control(self.descriptor.nonce, self.asked),
        )  # fmt: skip

    def drain(self) -> list[tuple[int, wire.NumberedEvent]]:
        if self.flows:
            self.emit(1, 0)
        return self.recorder.drain()

    def flow(self) -> None:
        self.flows = True

    def picture(self) -> list[wire.Event]:
        d = self.descriptor
        clock = wire.Clock(time.monotonic_ns(), time.time_ns())
        hello = wire.Hello(
            self.protocol, "0", d.nonce, d.name, d.host, d.pid, d.start_time, d.boot_id, d.argv, "3", clock, "cpu",
            rank=d.rank, world_size=d.world_size, run_id=d.run_id,
        )  # fmt: skip
        model = wire.Model(0, 0, "model", "Net", 100, 100, 400, 400, 0, self.modules)
        names = [self.module_name.format(i) for i in range(self.modules)]
        return [hello, model, *(wire.Module(0, 0, name, "Linear", 10, 40, 40, 0) for name in names)]

    def asked(self, request: wire.Request) -> wire.Reply | None:
        self.heard.append(request)
        return None if request.what == "fail" else wire.Reply(request.what != "refuse", request.what)

    def requests(self) -> list[list[object]]:
        heard, self.heard = self.heard, []
        return [[request.what, request.device, request.available] for request in heard]

    def heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(time.monotonic_ns(), self.step, "forward", 0, self.recorder.dropped)

    def steps(self, count: int, phases: int = 3) -> None:
        """So many iterations at once, and until the publisher has them."""
        self.emit(count, phases)
        end = time.monotonic() + 60
        while self.publisher.history.newest < self.recorder.last_seq and time.monotonic() < end:
            time.sleep(0.005)

    def spoil(self, count: int) -> None:
        """So many events that cannot be encoded, each followed by a step that can."""
        for _ in range(count):
            self.recorder.append(wire.Notice(1 << 80, "no integer of msgpack's"))
            self.emit(1)
        self.steps(0)

    def emit(self, count: int, phases: int = 3) -> None:
        for _ in range(count):
            now = time.monotonic_ns()
            for index in range(phases):
                self.recorder.append(
                    wire.Phase(self.step, "forward", index, 0, now, 10**6, 8 * GIB, 9 * GIB, 10 * GIB, 10 * GIB)
                )
            self.recorder.append(wire.Step(self.step, now, 10**7, phases=phases))
            self.step += 1

    def pace(self, per_second: int, seconds: int, phases: int = 5) -> None:
        for _ in range(per_second * seconds):
            end = time.monotonic() + 1 / per_second
            self.emit(1, phases)
            time.sleep(max(0.0, end - time.monotonic()))

    def background(self, per_second: int) -> None:
        threading.Thread(target=self.pace, args=(per_second, 3600), daemon=True).start()

    def goodbye(self) -> None:
        self.publisher.close(wire.Goodbye("finished", time.monotonic_ns(), self.step))

    def mute(self) -> None:
        self.publisher.close()

    def leave(self, count: int) -> None:
        self.emit(count)
        self.goodbye()

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def exit(self) -> None:
        self.publisher.close()
        sys.exit(0)

    def announce(self) -> None:
        self.modules += 1
        self.publisher.announce()

    def newest(self) -> int:
        return self.recorder.last_seq


def main() -> None:
    talker = Talker(json.loads(sys.argv[1]))
    talker.publisher.start()
    print(json.dumps({"endpoint": talker.publisher.descriptor.endpoint}), flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        result = getattr(talker, verb)(*map(int, numbers))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
