"""Recorded traces of physical GPUs, replayed: `python benchmarks/physical_traces.py [--write docs/physical.md]`.

Each trace in tests/data/traces is replayed through the installed torch's allocator on the virtual GPU, and compared
with what the physical device had. Then once for each order in which the blocks alive at its beginning may have been
allocated, and for each setting that may need less memory. The run of eight of them is made again, and its requests
are compared one by one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
from common import options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "_shared"))
import traces

from gpumon import virtual_gpu
from gpumon.analysis.units import MIB, MINUS, in_unit, size
from gpumon.snapshots.reading import read
from gpumon.snapshots.replay import AT_ONCE, Replayed, advise, replay, saved_bytes, unknown_cache_bytes
from gpumon.snapshots.trace import Figures, Trace

Blocks = tuple[tuple[int, int], ...]
ADDRESS = "by address"
ORDERS: Mapping[str, Callable[[Blocks], Blocks]] = {
    ADDRESS: lambda start: start,
    "by address, the highest first": lambda start: start[::-1],
    "the largest first": lambda start: tuple(sorted(start, key=lambda block: -block[1])),
    "the smallest first": lambda start: tuple(sorted(start, key=lambda block: block[1])),
}
MORE = """## More machines

`gpumon contribute SNAPSHOT` writes a JSON file in the format of these traces: sizes, order and streams of the requests,
the device's figures, versions, and what a context costs on your GPU (assumed to be 450 MiB until it is measured). It
has no code, no names and no paths, is described before it is written, and is sent nowhere: attach it to an issue.
"""
PROFILE = "l40s"
TRANSFORMER = Path(__file__).parents[1] / "tests" / "physical" / "transformer.py"
TRAINED = [file for file in traces.FILES if file.name.startswith("Wedsonlin")]
AUTOCAST = {("512", "training"), ("512", "inference"), ("1024", "training")}
WHY_RESERVED = "not known: the requests that built the cache, before the recorded step, were not recorded"
LIMITS = """## What a trace cannot tell

- In which order the cache that it began with was built, and what was in it beyond the blocks that were alive. The
  replay allocates those blocks by address and begins with no other cache. If the device had a larger cache than the
  trace needs, from a larger step before, the replay says what the trace needs.
- Whether segments were freed by the program (`empty_cache`), or by the allocator before a second attempt. Both are
  replayed as `empty_cache`. In these traces only the first events free segments.
- What a training would have done after an out-of-memory. The failed request is made again, and freed at once.
- Which pool a block was in: those of CUDA graphs are replayed in the default pool.
- The driver's part: context, kernels, libraries. The tables have the allocator's figures only.
- Another version of torch may request other sizes (workspaces). The replay makes the recorded requests, through the
  allocator of the installed torch. With torch 2.4.1 and 2.8.0 the same tests pass (`tests/physical`).
- All devices here ran with the default settings, on one stream: other settings, several streams and retries are
  compared with no physical device.
"""


class Compared(NamedTuple):
    file: Path
    trace: Trace
    had: Figures
    reserved_peak: int
    """The device's: traces.reserved_peak."""
    by_order: Mapping[str, Replayed]

    @property
    def replayed(self) -> Replayed:
        return self.by_order[ADDRESS]

    def difference(self, order: str = ADDRESS) -> int:
        """Of the reserved peak, in bytes: replayed − recorded."""
        return self.by_order[order].figures.reserved_peak - self.reserved_peak

    def share(self, order: str = ADDRESS) -> float:
        return self.difference(order) / self.reserved_peak


def compared(file: Path, orders: Mapping[str, Callable[[Blocks], Blocks]] = ORDERS) -> Compared:
    trace = traces.load(file)
    assert trace.recorded is not None
    by_order = {
        name: replay(msgspec.structs.replace(trace, start=ordered(trace.start))) for name, ordered in orders.items()
    }
    return Compared(file, trace, trace.recorded, traces.reserved_peak(trace), by_order)


class Repeated(NamedTuple):
    """A published run, and the same on the virtual GPU."""

    file: Path
    published: Trace
    repeated: Trace

    def same_events(self) -> int:
        """Events until the first that differs."""
        pairs = zip(traces.told(self.published), traces.told(self.repeated), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def identical(self) -> bool:
        sizes = [sorted(size for _, size in trace.start) for trace in (self.published, self.repeated)]
        return traces.told(self.published) == traces.told(self.repeated) and sizes[0] == sizes[1]


def repeated(file: Path) -> Repeated:
    """Trains the model of a trace of Wedsonlin's on the virtual GPU, as tests/physical/transformer.py does."""
    match = re.search(r"medium_(\d+)_(training|inference)", file.name)
    assert match is not None
    length, mode = match.groups()
    autocast = ["--autocast"] if (length, mode) in AUTOCAST else []
    environment = virtual_gpu.environment(profile=PROFILE)
    try:
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "snapshot.pickle"
            subprocess.run(
                [sys.executable, TRANSFORMER, length, mode, written, *autocast],
                env={**environment, "TORCH_CUBLAS_WORKSPACE_CACHE": "1"},
                check=True,
            )
            (device,) = read(written).devices
    finally:
        virtual_gpu.remove_session(environment["VGPU_SESSION"])
    assert device.trace is not None
    return Repeated(file, traces.load(file), device.trace)


def main() -> None:
    args = options(__doc__, write=True).parse_args()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(compared, traces.FILES))
    advised = [advise(each.trace) for each in found]
    made = page(found, advised, [repeated(file) for file in TRAINED])
    print(made)
    if args.write:
        args.write.write_text(made)


def page(found: list[Compared], advised: list[list[Replayed]], trained: list[Repeated]) -> str:
    parts = (*compared_table(found), *orders_table(found), *repeated_table(trained), *settings_table(found, advised))
    return "\n".join((*answer(found, trained), *parts, LIMITS, MORE, *sources(found), ""))


def answer(found: list[Compared], trained: list[Repeated]) -> Iterator[str]:
    exact = sum(each.difference() == 0 for each in found)
    same = sum(each.replayed.figures.requested_peak == each.had.requested_peak for each in found)
    worst = 100 * max(abs(each.share()) for each in found)
    yield "# Replayed traces beside the GPUs they are from\n"
    known = [each for each in found if unknown_cache_bytes(each.trace, each.replayed) == 0]
    exact_known = sum(each.difference() == 0 for each in known)
    yield wrapped(
        f"What {len(found)} traces of physical GPUs requested was replayed through PyTorch's own allocator on the "
        f"virtual GPU. The peak of reserved bytes is the device's to the byte in {exact} of {len(found)}, and at most "
        f"{worst:.2f} % off in the others. Of the {len(known)} traces whose first cache is known, {exact_known} are "
        f"exact. The peak of requested bytes is the same to the byte in {same}; it follows from the requests alone."
    )
    identical = [each for each in trained if each.identical()]
    events = sum(len(each.published.codes) for each in identical)
    yield ""
    yield wrapped(
        f"Of {len(trained)} of these traces the training is public. Run on the virtual GPU, it makes the same requests "
        f"event by event in {len(identical)} of {len(trained)}: {events:,} events."
    )
    command = "python benchmarks/physical_traces.py --write docs/physical.md"
    yield f"\nWith torch {found[0].replayed.torch}, by `{command}`:\n"


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def compared_table(found: list[Compared]) -> Iterator[str]:
    yield "| trace | events | inferred | recorded | replayed | difference | | why |"
    yield "|---|--:|---|--:|--:|--:|--:|---|"
    yield from map(row, found)
    yield """
Reserved peaks in bytes. *Inferred*: the blocks alive at the beginning, allocated by address. The free cache that the
device had beside them is not described, and the replay does without it. Where the first events free cache, that is what
they left, and *recorded* is the peak after them.
"""


def row(each: Compared) -> str:
    unknown = unknown_cache_bytes(each.trace, each.replayed)
    inferred = f"{len(each.trace.start)} blocks, {size(sum(nbytes for _, nbytes in each.trace.start))}"
    inferred += f"; without {size(unknown)} of cache" if unknown else ""
    cells = (
        traces.name(each.file), f"{len(each.trace.codes):,}", inferred, f"{each.reserved_peak:,}",
        f"{each.replayed.figures.reserved_peak:,}", *difference_cells(each), why(each),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def difference_cells(each: Compared) -> tuple[str, str]:
    if not each.difference():
        return "0", "0"
    return _signed(each.difference()), f"{100 * each.share():+.3f} %".replace("-", MINUS)


def why(each: Compared) -> str:
    if not each.difference():
        return ""
    others = {each.difference(order) for order in ORDERS}
    if 0 in others:
        return "the order of those blocks: another one is exact (below)"
    rest = "the rest of the cache, which is not known"
    return rest if len(others) == 1 else f"the order of those blocks (below), and {rest}"


def orders_table(found: list[Compared]) -> Iterator[str]:
    yield "## Other orders of the first blocks\n"
    yield "| order | exact | largest difference |"
    yield "|---|--:|--:|"
    for order in ORDERS:
        exact = sum(each.difference(order) == 0 for each in found)
        worst = max(abs(each.share(order)) for each in found)
        yield f"| {order} | {exact} of {len(found)} | {100 * worst:.3f} % |"
    yield ""
    differing = [each for each in found if any(each.difference(order) for order in ORDERS)]
    yield f"| difference in MiB | {' | '.join(ORDERS)} |"
    yield f"|---|{'--:|' * len(ORDERS)}"
    for each in differing:
        cells = (in_unit(each.difference(order), MIB, sign=True) for order in ORDERS)
        yield f"| {traces.name(each.file)} | {' | '.join(cells)} |"
    yield ""


def repeated_table(trained: list[Repeated]) -> Iterator[str]:
    yield """## The same trainings on the virtual GPU

`tests/physical/transformer.py` trains the model of Wedsonlin's traces from its beginning: unlike a replay, it builds
the cache too, and finds out by itself what to request. The device was not sm_90 (its workspaces have 8,519,680 B); a
virtual L40S stands in. Inferred: bf16 autocast for 512 and for 1024 training, and that torch 2.15 keeps workspaces as
2.11 did (`TORCH_CUBLAS_WORKSPACE_CACHE=1`).
"""
    yield "| run | events | the same | requested peak | | reserved peak | | | why |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    yield from map(repeated_row, trained)
    yield "\nPeaks in bytes, and by how many those of the virtual GPU differ.\n"


def repeated_row(each: Repeated) -> str:
    had, has = each.published.recorded, each.repeated.recorded
    assert had is not None
    assert has is not None
    same = "all" if each.identical() else f"the first {each.same_events():,}"
    reserved = has.reserved_peak - had.reserved_peak
    share = 100 * reserved / had.reserved_peak
    cells = (
        traces.name(each.file), f"{len(each.published.codes):,}", same, f"{had.requested_peak:,}",
        _signed(has.requested_peak - had.requested_peak), f"{had.reserved_peak:,}", _signed(reserved),
        f"{share:+.3f} %".replace("-", MINUS) if reserved else "0", WHY_RESERVED if reserved else "",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _signed(count: int) -> str:
    return f"{count:+,}".replace("-", MINUS) if count else "0"


def settings_table(found: list[Compared], advised: list[list[Replayed]]) -> Iterator[str]:
    yield """## The same traces with other settings

Not measured on a device: the reserved peak that the replay has with each setting, less that without it. Negative is
better. In brackets: the value where it depends on the trace, the largest power of two MiB up to the largest request.
`garbage_collection_threshold` is left out: it begins at a share of the device's capacity, which these traces do not
tell.
"""
    names = list(dict.fromkeys(next(iter(each.settings)) for _, *others in advised for each in others))
    values = {name: {each.settings[name] for _, *others in advised for each in others if name in each.settings}
              for name in names}  # fmt: skip
    titles = [f"`{name}:{next(iter(values[name]))}`" if len(values[name]) == 1 else f"`{name}`" for name in names]
    yield f"| trace | reserved peak | {' | '.join(titles)} |"
    yield f"|---|--:|{'--:|' * len(names)}"
    for each, (recorded, *others) in zip(found, advised, strict=True):
        by_name = {next(iter(other.settings)): other for other in others}
        cells = (_cell(recorded, by_name.get(name), len(values[name]) > 1, name) for name in names)
        peak = size(recorded.figures.reserved_peak)
        yield f"| {traces.name(each.file)} | {peak} | {' | '.join(cells)} |"
    yield ""


def _cell(recorded: Replayed, other: Replayed | None, varying: bool, name: str) -> str:
    if other is None:
        return "not tried"
    saved = saved_bytes(recorded, other)
    text = "does not fit" if saved is None else size(-saved, sign=True) if saved else "0"
    return f"{text} ({other.settings[name]})" if varying else text


def sources(found: list[Compared]) -> Iterator[str]:
    yield """## Where they are from

Memory snapshots in public repositories, of which sizes, order and streams of requests were kept (`tests/data/traces`).
What is known of model, torch and machine:
"""
    known = [traces.raw(each.file) for each in found]
    for source, config in {(raw["source"], raw["config"]): None for raw in known}:
        yield wrapped(f"- {source}. {config}.", "  ")


if __name__ == "__main__":
    main()
