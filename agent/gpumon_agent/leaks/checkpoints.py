"""Reports loaded checkpoints that stay on a device: loaded, used, retained or freed, and their holders.

Tensors still alive without an owner two steps after `load_state_dict` are retained; the census's walk searches their
holders. Reports are sent on change only. A device without a watched model is `foreign`: nothing is trained there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns

import msgspec

from gpumon_agent import source_lines, wire
from gpumon_agent.governor import Governor
from gpumon_agent.leaks.loads import GIVEN, Load, Loads
from gpumon_agent.leaks.names import together
from gpumon_agent.storages import CPU

STEPS_AFTER = 2
_LOOKS_APART = 64  # steps between checks of unchanged loads


class Checkpoints:
    """Called in the training thread, under the guard; `picture` in any."""

    def __init__(
        self,
        loads: Loads,
        governor: Governor,
        *,
        devices: Callable[[], Iterable[tuple[str, int]]],
        say: Callable[[tuple[wire.Event, ...]], None],
        search: Callable[[], bool],
        searching: Callable[[], bool],
    ) -> None:
        self._loads = loads
        self._governor = governor
        self._devices = devices
        self._say = say
        self._search = search
        self._searching = searching
        self._sent: dict[tuple[int, int], wire.Checkpoint] = {}
        self._marks: dict[int, tuple[object, ...]] = {}  # by load: state at the last check, to detect changes

    def picture(self) -> list[wire.Event]:
        return list(self._sent.copy().values())

    def step_closed(self, step: int) -> None:
        loads = self._loads
        if not loads.settle():
            return
        devices = set(self._devices())
        if self._searching():  # its results are incomplete
            return
        indices = {index for kind, index in devices if kind != "cpu"}
        on_cpu = all(kind == "cpu" for kind, _ in devices)
        changed: list[wire.Event] = []
        for load in loads.loads.copy():
            used = load.used_step
            due = used is not None and step >= used + STEPS_AFTER
            ours = on_cpu or any(device in indices for device in load.loaded)
            if due and ours and (load.looked_step is None or load.looked_step <= (used or 0)):
                self._governor.ask_ledger()  # whether owners have taken the tensors over
                continue
            if any(load.holders.values()):
                load.twin = False  # a named holder merely keeps it
            mark = len(load.followed), used, sum(map(len, load.holders.values())), len(load.owned), load.twin, due
            if self._marks.get(load.number) == mark and step % _LOOKS_APART:
                continue
            self._marks[load.number] = mark
            for device in load.loaded:
                if (device == CPU) == on_cpu:
                    current = self._of(load, device, step, devices)
                    known = self._sent.get((load.number, current.device))
                    if known is None or _differs(known, current):
                        self._sent[load.number, current.device] = current
                        changed.append(current)
                    if current.alive and (due or current.foreign) and not load.searched:
                        load.searched = self._search()
            taken_over = due and load.source == GIVEN and load.looked_step is not None and not load.left
            if not load.followed or taken_over:
                loads.loads.remove(load)
        if changed:
            self._say(tuple(changed))

    def _of(self, load: Load, device: int, step: int, devices: set[tuple[str, int]]) -> wire.Checkpoint:
        alive = load.alive(device)
        return wire.Checkpoint(
            number=load.number,
            device=max(device, 0),
            step=load.step,
            t_ns=monotonic_ns(),
            source=load.source,
            file=load.file,
            where=None if load.where is None else str(load.where),
            loaded=load.loaded[device],
            tensors=len(alive),
            alive=sum(alive.values()),
            looked_step=step,
            used_step=None if load.twin else load.used_step,
            mapped=load.mapped,
            foreign=device != CPU and all(index != device for kind, index in devices if kind != "cpu"),
            holders=tuple(
                name.holder(count) for name, count in together(load.holders[device], 1).most_common(wire.HOLDERS_MAX)
            )
            if alive and device in load.holders
            else (),
            source_line=source_lines.text(load.where),
        )


def _differs(known: wire.Checkpoint, current: wire.Checkpoint) -> bool:
    return msgspec.structs.replace(current, t_ns=known.t_ns, looked_step=known.looked_step) != known or (
        current.alive > 0 and current.used_step is not None and known.looked_step < current.used_step + STEPS_AFTER
    )
