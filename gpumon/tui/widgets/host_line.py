"""The host: the process, its workers, the GPU according to the driver, and other processes on it."""

from __future__ import annotations

import msgspec

from gpumon.analysis.units import NOT_KNOWN, size
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, fit, flow
from gpumon.tui.view import View, age, reading_of
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire


class HostFacts(msgspec.Struct, frozen=True):
    """The line's data, already formatted."""

    rss: str
    pinned: str | None
    cpu: str
    workers: str
    gpu: str | None
    others: str | None
    why: str | None
    past: str = ""  # of a past step: how old its figures are


PAST_S = 3.0
"""A past step's readings are this old without a word."""

KEPT = "no reading of the driver is kept for this step"


def host_facts(view: View) -> HostFacts | None:
    rank = view.rank
    if rank is None:
        return None
    host, past = rank.host, _past(view)
    process = next((p for p in host.processes if p.pid == rank.hello.pid), None) if host else None
    beat = rank.heartbeat.rss if rank.heartbeat else None
    rss = process.rss if process and process.rss is not None else beat
    pinned = size(rank.heartbeat.pinned) if rank.heartbeat and rank.heartbeat.pinned else None
    cpu = f"{process.cpu_percent:.0f} %" if process and process.cpu_percent is not None else NOT_KNOWN
    children = process.children if process else ()
    workers = "no workers"
    if process is None:
        workers = f"workers {NOT_KNOWN}"
    elif children:
        held = sum(c.rss or 0 for c in children)
        workers = f"{len(children)} worker{'s' if len(children) > 1 else ''} {size(held)}"
    if rank.hello.backend == "cpu":
        return HostFacts(size(rss), pinned, cpu, workers, None, None, None, past)
    reading = reading_of(view)
    if reading is None and view.now is not None and host is None:
        return HostFacts(size(rss), pinned, cpu, workers, None, None, KEPT, past)
    if reading is None:
        why = (host.why if host else "no reading of this machine yet") or "the driver knows no device of this UUID"
        return HostFacts(size(rss), pinned, cpu, workers, None, None, why, past)
    return HostFacts(size(rss), pinned, cpu, workers, _gpu(reading), _others(reading, rank.hello.pid), None, past)


def _past(view: View) -> str:
    """The age of the oldest figure at a past step."""
    rank = view.rank
    if view.now is None or rank is None:
        return ""
    read = [rank.unix_ns(rank.heartbeat.t_ns)] if rank.heartbeat is not None else []
    read += [rank.host_unix_ns] if rank.host_unix_ns is not None else []
    old = (view.frame.unix_ns - min(read)) / 1e9 if read else 0.0
    return f"read {age(old)} before this step" if old > PAST_S else "at this step"


_SENSORS = ("utilization_percent", "temperature_c", "power_mw")


def _gpu(reading: wire.DeviceReading) -> str:
    if all(getattr(reading, field) is None for field in _SENSORS):
        return f"{NOT_KNOWN} ({reading.why.get(_SENSORS[0], 'the driver does not tell')})"
    parts = [_figure(reading, "utilization_percent", "{} %", "utilization")]
    parts.append(_figure(reading, "temperature_c", "{} °C", "temperature"))
    if reading.power_mw is not None:
        limit = f"/{reading.power_limit_mw / 1000:.0f}" if reading.power_limit_mw else ""
        parts.append(f"{reading.power_mw / 1000:.0f}{limit} W")
    else:
        parts.append(_figure(reading, "power_mw", "{}", "power"))
    return " ".join(parts)


def _figure(reading: wire.DeviceReading, field: str, form: str, name: str) -> str:
    value = getattr(reading, field)
    if value is not None:
        return form.format(value)
    return f"{name} {NOT_KNOWN}"


def _others(reading: wire.DeviceReading, pid: int) -> str:
    if reading.processes is None:
        return f"other processes {NOT_KNOWN} ({reading.why.get('processes', 'the driver does not tell')})"
    rest = [p for p in reading.processes if p.pid != pid]
    if not rest:
        return "no other process"
    rest.sort(key=lambda p: -(p.bytes or 0))
    named = ", ".join(f"{p.name or 'pid'} {p.pid} {size(p.bytes)}" for p in rest[:3])
    return f"other processes: {named}" + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")


class HostLine(Panel):
    NAME = "Host"
    TERMS = ("RSS", "pinned", "CPU", "workers", "GPU", "other processes")

    def pick(self, view: View) -> HostFacts | None:
        return host_facts(view)

    def draw(self, slice_: HostFacts | None, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return host_lines(slice_, width, height, self.title_role)


def host_lines(h: HostFacts | None, room: int, height: int, title: str) -> list[Line]:
    if h is None:
        return []
    text = "dim" if h.past else "text"
    items: list[Line] = [
        ((" Host", title), *([(f" {h.past}", "dim")] if h.past else [])),
        (("RSS ", "dim"), (h.rss, text)),
        *([(("pinned ", "dim"), (h.pinned, text))] if h.pinned else []),
        (("CPU ", "dim"), (h.cpu, text)),
        ((h.workers, "dim"),),
    ]
    if h.gpu:
        items.append((("GPU ", "dim"), (h.gpu, text)))
    if h.others:
        items.append(((h.others, "dim"),))
    if h.why:
        items.append(((f"GPU {NOT_KNOWN}: {h.why}", "dim"),))
    lines = flow(items, room, gap=3)
    if len(lines) > height:
        flat: list[Span] = []
        for item in items:
            flat += [*item, ("  ", "")]
        return [fit(flat, room)]
    return lines
