"""`gpumon snapshot`: what a memory snapshot of torch.cuda.memory._dump_snapshot shows, or how two differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpumon.cli import exits, screen
from gpumon.cli.attach import looks, need_a_terminal, options
from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.snapshots.differences import Change, DeviceChange, MomentChange
    from gpumon.snapshots.model import Snapshot
    from gpumon.snapshots.summary import Alike, DeviceSummary, Part
    from gpumon.tui.themed_app import Options

SHOWN = 8
NAME, FIGURE, COUNT = 58, 12, 10
DELTA_NAME = 36


@click.command("snapshot")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.argument("other", type=click.Path(path_type=Path), metavar="[B]", required=False)
@click.option("--device-index", "index", type=click.IntRange(0), help="Only this device of the file.")
@click.option("--replay", is_flag=True, help="Replay its events with each allocator setting that may need less.")
@click.option(
    "--setting", "settings", multiple=True, metavar="KEY:VALUE", help="Replay with this one. May be repeated."
)
@click.option("--device", metavar="NAME|SIZE", help="Replay on such a device: does it fit? One of `gpumon dryrun`'s.")
@click.option("--screen", "on_screen", is_flag=True, help="On a screen, with a cursor that moves through the events.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@looks
def command(
    file: Path, other: Path | None, index: int | None, replay: bool, settings: tuple[str, ...], device: str | None,
    on_screen: bool, as_json: bool, light: bool, ansi: bool, plain: bool,
) -> None:  # fmt: skip
    """Show what a memory snapshot of PyTorch holds: the peak, what made it, what is left, and what pins memory.

    \b
    gpumon snapshot snapshot.pickle
    gpumon snapshot before.pickle after.pickle     # what grew, what is new, what is gone
    gpumon snapshot snapshot.pickle --replay       # which allocator settings would need less
    gpumon snapshot snapshot.pickle --setting expandable_segments:True --device 24GiB

    FILE is written by torch.cuda.memory._dump_snapshot, or by gpumon (the key s of its screen, or an out-of-memory). To
    have the peak, record events first: torch.cuda.memory._record_memory_history(). Nothing in the file is executed.
    Exit code 1: it cannot be read. A replay has those of `gpumon dryrun`: 0 it fits, 1 it does not, 3 unknown.
    """
    from gpumon.snapshots.differences import compare

    if replay or settings or device is not None:
        if other is not None:
            raise click.UsageError("a replay is of one file")
        _replay(file, index, settings, device, as_json)
    if on_screen and (other is not None or as_json):
        raise click.UsageError("--screen is for one file, and without --json")
    if on_screen:
        need_a_terminal("--screen needs a terminal; without it the same is printed")
    snapshot, devices = _read(file, index)
    if on_screen:
        _show(file, snapshot, devices, options(light, ansi, plain))
    if other is None:
        if as_json:
            say_json(_stated(file, snapshot, devices))
            return
        say("\n\n".join("\n".join(_lines(each, len(devices) > 1)) for each in devices))
        if snapshot.taken is not None:
            step, phase = snapshot.taken
            say(f"\nTaken by gpumon in step {step:,}{f', {phase}' if phase else ''}")
        if said := snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF"):
            say(f"\nAllocator settings: {said}")
        return
    _, others = _read(other, index)
    changes = compare(devices, others)
    if not changes:
        raise click.ClickException(f"{file} and {other} have no device in common")
    if as_json:
        say_json(_stated_changes(file, other, changes))
    else:
        say("\n\n".join("\n".join(_changed_lines(each, len(changes) > 1)) for each in changes))


def _replay(file: Path, index: int | None, settings: Sequence[str], device: str | None, as_json: bool) -> NoReturn:
    """Exits with the replay's code."""
    from gpumon.cli.snapshot_replay import show_replay

    snapshot, chosen = _read(file, index)
    numbers = {each.index for each in chosen}
    traces = [each.trace for each in snapshot.devices if each.index in numbers and each.trace is not None]
    if not traces:
        raise exits.CannotTell(f"{file} has no events to replay: record them with _record_memory_history()")
    if len(traces) > 1:
        raise click.UsageError(f"{file} has events of {len(traces)} devices: choose one with --device-index")
    sys.exit(show_replay(traces[0], settings, device, as_json))


def _show(file: Path, snapshot: Snapshot, devices: Sequence[DeviceSummary], look: Options) -> NoReturn:
    if not any(each.events for each in devices):
        raise click.ClickException(
            f"{file} has no events to move through: record them with _record_memory_history(); "
            "without --screen its blocks at the end are printed"
        )
    screen.import_asyncio()
    from gpumon.tui.snapshot_app import SnapshotApp

    sys.exit(SnapshotApp(file, snapshot, [each for each in devices if each.events], look).run())


def _read(file: Path, index: int | None) -> tuple[Snapshot, Sequence[DeviceSummary]]:
    from gpumon.snapshots.reading import Unreadable, read
    from gpumon.snapshots.summary import summarize

    with working(f"reading {file}"):
        try:
            snapshot = read(file)
        except Unreadable as error:
            raise click.ClickException(str(error)) from None
        devices = summarize(snapshot)
    if index is None:
        return snapshot, devices
    chosen = [each for each in devices if each.index == index]
    if not chosen:
        there = ", ".join(str(each.index) for each in devices)
        raise click.ClickException(f"{file} has nothing of device {index}; it has {there}")
    return snapshot, chosen


# ---------------------------------------------------------------------------------------------------------- one file


def _lines(device: DeviceSummary, named: bool) -> Iterator[str]:
    from gpumon.analysis.units import count, percent, size
    from gpumon.snapshots.summary import NO_LINE

    if named:
        yield f"Device {device.index}"
    yield device.answer
    if device.peak is None:
        yield "The file has no events: record them with torch.cuda.memory._record_memory_history()."
    for failed in device.failed[:SHOWN]:
        yield f"Out of memory at event {count(failed.event)}: {size(failed.bytes)} could not be allocated."
    if device.lost:
        yield f"Events and blocks disagree: {size(device.lost)} are in use by the events, and in no block."
    if device.peak is not None:
        yield from _table("Peak, by source line", device.peak.by_line)
        yield from _table("Peak, by size of the block", device.peak.by_size)
        yield from _table("Peak, by mark", device.peak.by_mark)
        if device.peak.reserved is not None:
            gap = device.peak.reserved - device.peak.requested
            share = percent(gap / device.peak.reserved) if device.peak.reserved else "0 %"
            yield ""
            yield f"Reserved − requested at the peak: {size(gap)} ({share}), free blocks and rounding"
    if {each.name for each in device.end.by_line} != {NO_LINE}:
        yield from _table("In use at the end, by source line", device.end.by_line)
    if device.peak is None:
        yield from _table("In use at the end, by size of the block", device.end.by_size)
    yield from _uses(device)
    yield from _free(device)


def _uses(device: DeviceSummary) -> Iterator[str]:
    from gpumon.analysis.units import count, size

    def rows(title: str, found: Sequence[Alike]) -> Iterator[str]:
        if found:
            yield ""
            yield f"{title:<{NAME - COUNT}}{'blocks':>{COUNT}}{'of bytes':>{FIGURE}}{'event':>{COUNT}}"
        for each in found[:SHOWN]:
            event = "before" if each.event is None and device.events else count(each.event)
            name = _fitted(each.line, NAME - COUNT - 3)
            yield f"  {name:<{NAME - COUNT - 2}}{each.blocks:>{COUNT},}{size(each.bytes):>{FIGURE}}{event:>{COUNT}}"
        yield from _more(len(found))

    yield from rows("Largest blocks at the end", device.largest)
    yield from rows("Oldest recorded blocks at the end", device.oldest)


def _free(device: DeviceSummary) -> Iterator[str]:
    from gpumon.analysis.units import percent, size

    totals = device.totals
    kinds = (
        (totals.allocated, "allocated"),
        (totals.waiting, "waiting for a stream"),
        (totals.inactive_split, "free beside other blocks"),
        (totals.unused, "in unused segments"),
    )
    yield ""
    yield f"Reserved at the end: {size(totals.reserved)} in {_segments(totals.segments)}"
    yield from (f"  {size(number):>{FIGURE}} {kind}" for number, kind in kinds)
    yield f"  fragmentation {percent(totals.fragmentation)}, largest free block {size(totals.largest_free)}"
    if device.pinned:
        free = sum(each.free for each in device.pinned)
        yield ""
        yield f"Pinned: {size(free)} are free in {_segments(len(device.pinned))}, more than half free, that blocks keep"
        yield f"  {'largest block from':<{NAME - 14}}{'blocks':>{COUNT}}{'they hold':>{FIGURE}}{'free':>{FIGURE}}"
        for each in device.pinned[:SHOWN]:
            name = _fitted(each.line, NAME - 15)
            yield f"  {name:<{NAME - 14}}{each.blocks:>{COUNT},}{size(each.held):>{FIGURE}}{size(each.free):>{FIGURE}}"
        yield from _more(len(device.pinned))


def _segments(number: int) -> str:
    return f"{number:,} segment{'' if number == 1 else 's'}"


def _table(title: str, parts: Sequence[Part]) -> Iterator[str]:
    from gpumon.analysis.units import size

    if not parts:
        return
    yield ""
    yield f"{title:<{NAME}}{'bytes':>{FIGURE}}{'blocks':>{COUNT}}"
    for each in parts[:SHOWN]:
        yield f"  {_fitted(each.name, NAME - 3):<{NAME - 2}}{size(each.bytes):>{FIGURE}}{each.blocks:>{COUNT},}"
    yield from _more(len(parts))


def _more(number: int) -> Iterator[str]:
    if number > SHOWN:
        yield f"  and {number - SHOWN:,} more"


def _fitted(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def _stated(file: Path, snapshot: Snapshot, devices: Sequence[DeviceSummary]) -> dict[str, Any]:
    import msgspec

    return {
        "type": "snapshot",
        "file": str(file),
        "settings": dict(snapshot.settings),
        "taken": None if snapshot.taken is None else dict(zip(("step", "phase"), snapshot.taken, strict=True)),
        "devices": [_stated_device(msgspec.to_builtins(each)) for each in devices],
    }


def _stated_device(each: dict[str, Any]) -> dict[str, Any]:
    """The structs as they are, without the single blocks."""
    del each["end"]["uses"]
    if each["peak"] is not None:
        del each["peak"]["uses"]
        each["peak"]["event"] = each["peak_event"]
    del each["peak_event"]
    del each["totals"]["kinds"]
    return each


# --------------------------------------------------------------------------------------------------------- two files


def _changed_lines(device: DeviceChange, named: bool) -> Iterator[str]:
    if named:
        yield f"Device {device.index}"
    yield device.answer
    if device.peak is None:
        yield "At least one of the files has no events: what was in use at the end is compared."
    for title, moment in (("peak", device.peak), ("end", device.end)):
        if moment is not None:
            yield from _moment_lines(title, moment)


def _moment_lines(title: str, moment: MomentChange) -> Iterator[str]:
    from gpumon.analysis.units import size

    yield ""
    figures = [f"requested {size(moment.requested[0])} → {size(moment.requested[1])}"]
    if None not in moment.reserved:
        figures.append(f"reserved {size(moment.reserved[0])} → {size(moment.reserved[1])}")
    yield f"At the {title}: {', '.join(figures)}"
    if not moment.changes:
        yield "  nothing differs"
    for kind, head in (("line", "by source line"), ("size", "by size of the block"), ("mark", "by mark")):
        found = [each for each in moment.changes if each.kind == kind]
        if found:
            yield f"  {head:<{DELTA_NAME}}{'':>7}{'A':>{FIGURE}}{'B − A':>{FIGURE}}{'blocks':>{COUNT}}"
            yield from (_change(each) for each in found[:SHOWN])
            yield from _more(len(found))


def _change(each: Change) -> str:
    from gpumon.analysis.units import MINUS, size

    blocks = f"{each.blocks:+,}".replace("-", MINUS) if each.blocks else "0"
    name = _fitted(each.name, DELTA_NAME - 3)
    figures = f"{size(each.before[0]):>{FIGURE}}{size(each.bytes, sign=True):>{FIGURE}}{blocks:>{COUNT}}"
    return f"    {name:<{DELTA_NAME - 2}}{each.what:>7}{figures}"


def _stated_changes(file: Path, other: Path, changes: Sequence[DeviceChange]) -> dict[str, Any]:
    def moment(found: MomentChange | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "requested": list(found.requested),
            "reserved": list(found.reserved),
            "changes": [
                {
                    "kind": each.kind,
                    "name": each.name,
                    "what": each.what,
                    "before": {"bytes": each.before[0], "blocks": each.before[1]},
                    "after": {"bytes": each.after[0], "blocks": each.after[1]},
                    "bytes": each.bytes,
                    "blocks": each.blocks,
                }
                for each in found.changes
            ],
        }

    return {
        "type": "snapshot_comparison",
        "files": [str(file), str(other)],
        "devices": [
            {"index": each.index, "answer": each.answer, "peak": moment(each.peak), "end": moment(each.end)}
            for each in changes
        ],
    }
