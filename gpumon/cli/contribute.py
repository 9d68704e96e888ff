"""`gpumon contribute`: writes what this machine can add to the comparison with physical GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from gpumon.cli.printing import say
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.snapshots.contribution import Contribution, MeasuredDevice
    from gpumon.snapshots.model import Snapshot

OUTPUT = "contribution.json"
PATIENCE_S = 300
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from gpumon.host.context_probe import main; main()"
"""The child uses this process's sys.path, not the current directory."""


@click.command("contribute")
@click.argument("snapshots", nargs=-1, type=click.Path(path_type=Path), metavar="[SNAPSHOT]…")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=OUTPUT, show_default=True, help="A new file.")
@click.option("--yes", is_flag=True, help="Write without asking.")
def command(snapshots: tuple[Path, ...], output: Path, yes: bool) -> None:
    """Write what this machine can add to docs/physical.md: its GPUs, what a context costs, recorded requests.

    \b
    gpumon contribute                               # versions, devices, and the size of a context on each
    gpumon contribute snapshot.pickle               # also the requests of a memory snapshot

    The file has sizes, counts, versions and the devices' names; no code, no names of yours, no paths. It is described
    before it is written, and sent nowhere: attach it to an issue of the project. SNAPSHOT is written by
    torch.cuda.memory._dump_snapshot after _record_memory_history().
    """
    from gpumon.snapshots.contribution import contribution

    if output.exists():
        raise click.ClickException(f"{output} exists; name another file with -o.")
    read = [_read(path) for path in snapshots]
    made = contribution(_devices(), read)
    if snapshots and not made.traces:
        raise click.ClickException("no snapshot has events: record them with _record_memory_history()")
    encoded = msgspec.json.encode(made)
    say("\n".join(_described(made, output, len(encoded))))
    if not yes:
        click.confirm("Write it?", abort=True)
    try:
        with output.open("xb") as file:
            file.write(encoded)
    except OSError as error:
        raise click.ClickException(f"{output} cannot be written: {error.strerror}.") from None
    say(f"{output}: {len(encoded) / 1024:,.0f} KiB")


def _read(path: Path) -> Snapshot:
    from gpumon.snapshots.reading import Unreadable, read

    with working(f"reading {path}"):
        try:
            return read(path)
        except Unreadable as error:
            raise click.ClickException(str(error)) from None


def _devices() -> Sequence[MeasuredDevice]:
    """Measured in a process that ends at once: the context is not kept."""
    from gpumon.snapshots.contribution import MeasuredDevice

    with working("measuring what a context costs"):
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", _CHILD, *sys.path],
                capture_output=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise click.ClickException(f"a process that takes the device did not end within {PATIENCE_S} s") from None
    if done.returncode:
        why = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        say(f"Note: no device was measured: {why}", err=True)
        return ()
    return msgspec.json.decode(done.stdout, type=list[MeasuredDevice])


def _described(made: Contribution, output: Path, nbytes: int) -> Iterator[str]:
    from gpumon.analysis.units import count, size

    yield f"{output} will have {count(nbytes)} bytes of JSON:"
    yield f"  gpumon {made.gpumon}, torch {made.torch or 'none'}, Python {made.python}"
    for device in made.devices:
        context = "not told" if device.context_bytes is None else size(device.context_bytes)
        after = device.context_after_product_bytes
        later = f", {size(after)} after a matrix product" if after is not None else ""
        yield (
            f"  {device.name} ({device.capability}), {size(device.total_bytes)}, driver {device.driver}:"
            f" a context takes {context}{later}"
        )
    if not made.devices:
        yield "  no CUDA device"
    for trace in made.traces:
        peak = f"{size(trace.requested_peak)} requested, {size(trace.reserved_peak)} reserved at most"
        number = f"{count(len(trace.events))} events after {count(len(trace.start))} blocks"
        yield f"  device {trace.device} of a snapshot: sizes, order and streams of {number}; {peak}"
    yield "No code, no names of yours, no paths, no values."
