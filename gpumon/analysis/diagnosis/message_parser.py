"""Parses out-of-memory messages: every wording of PyTorch since 1.0, of its libraries, the driver and the host.

Messages are recognised by their wording, anywhere in a text: CUDA, ROCm (HIP), XPU and NPU allocators, old ("already
allocated") and new ("of the allocated memory"), cudaMallocAsync, MPS; libraries and the driver, which give no figures;
host memory (DefaultCPUAllocator, NumPy, Python), DataLoader workers, processes killed by the kernel.

Source. Messages from issues, and those of torch 2.4, 2.8 and 2.15 on the virtual GPU.
Known limitations. A truncated message is read as far as it goes. The PyTorch version is known only as before 2.1, or
since.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from gpumon.analysis.diagnosis.figures import SIZE, Figure, read
from gpumon.analysis.estimate.simulator import LARGE, ROUND_SEGMENT, SMALL
from gpumon_agent.wire.base import BYTES_MAX

TAIL_CHARS = 2500
"""No message is longer."""


class OomMessage(msgspec.Struct, frozen=True):
    """One parsed message. None: not in the message."""

    text: str  # its own words, on one line
    kind: str
    """allocator: PyTorch's, on a device; driver: a library or the driver, without figures; overflow: "more than 1EB";
    host: host memory; worker: a DataLoader worker; shared: the workers' shared memory; killed."""
    backend: str = "cuda"  # cuda | hip | xpu | npu | mps | cpu
    source: str = "PyTorch"  # who reports it
    sure: bool = True  # False: often, but not always, means out of memory
    device: int | None = None
    requested: Figure | None = None
    total: Figure | None = None
    free: Figure | None = None
    allocated: Figure | None = None
    reserved: Figure | None = None
    allowed: Figure | None = None  # set_per_process_memory_fraction
    unallocated: Figure | None = None  # reserved but unallocated, if the message gives it
    private: Figure | None = None  # in private pools: CUDA graphs
    process: Figure | None = None  # this process on the device, context included
    others: tuple[tuple[int, Figure], ...] = ()  # other processes on it: pid, bytes
    expandable: bool | None = None  # the message says that expandable segments are on
    segments: bool = True  # the request is the size of a segment, not of the tensor: see `asked`
    new: bool = False  # worded as since PyTorch 2.1
    where: tuple[int, int] = (0, 0)  # position in the text that was read

    @property
    def slack(self) -> Figure | None:
        """Reserved and not allocated."""
        if self.unallocated is not None:
            return self.unallocated
        return None if self.reserved is None or self.allocated is None else self.reserved - self.allocated

    @property
    def tensor_sizes(self) -> tuple[Figure, ...]:
        """Possible sizes of the tensor itself.

        The caching allocator reports the segment it requests from the driver: 2 MiB for a tensor of up to 1 MiB, 20 MiB
        below 10 MiB, else the next multiple of 2 MiB.
        """
        if self.requested is None:
            return ()
        first, last = -(-self.requested.low // ROUND_SEGMENT), self.requested.high // ROUND_SEGMENT
        if not self.segments or not 1 <= first <= last:  # not a multiple of 2 MiB: the tensor's own size
            return (self.requested,)
        ranges = []
        if first == 1:
            ranges.append(Figure(1, SMALL))
        if first <= 10 <= last:
            ranges.append(Figure(SMALL + 1, LARGE - 1))
        if last * ROUND_SEGMENT >= LARGE:
            ranges.append(Figure(max((first - 1) * ROUND_SEGMENT + 1, LARGE), last * ROUND_SEGMENT))
        return tuple(ranges)

    def may_be(self, count: int) -> bool:
        """Whether a tensor of `count` bytes can be the failed request."""
        return any(each.low <= count <= each.high for each in self.tensor_sizes)


def find_all(text: str) -> list[OomMessage]:
    """Every message in a text, in order. Of overlapping matches the one that starts first counts, then the longest."""
    found: list[OomMessage] = []
    for message in sorted((*_allocators(text), *_others(text)), key=lambda m: (m.where[0], -m.where[1])):
        if not found or message.where[0] >= found[-1].where[1]:
            found.append(message)
    return found


def find(text: str) -> OomMessage | None:
    """The last message in a text: training survived the earlier ones. Those with figures come first, then sure ones."""
    return newest(find_all(text))


def newest(messages: list[OomMessage]) -> OomMessage | None:
    """The one of `messages` that `find` returns."""
    figures = [m for m in messages if m.requested is not None]
    best = figures or [m for m in messages if m.sure] or messages
    return best[-1] if best else None


# ---------------------------------------------------------------------------------------- allocators, with figures

_NUMBER = f"(?P<size>{SIZE})"
_ASKED = re.compile(
    rf"(?:(?P<backend>\b[A-Z]{{2,5}}) out of memory\.? )?Tried to allocate (?:{_NUMBER}|(?P<overflow>more than 1EB))"
)
_MPS = re.compile(rf"MPS backend out of memory \(MPS allocated:? {_NUMBER}")
_ASYNC = re.compile(r"Allocation on device (?P<device>\d{0,9}) ?would exceed allowed memory\.?")
_REJECTED = re.compile(
    rf"preemptively rejected because it would exceed per_process_memory_fraction limit\.? Requested size: {_NUMBER}"
)
_FIELDS = {
    "total": re.compile(rf"{_NUMBER} total capacity|has a total capac?i?ty of (?P<again>{SIZE})"),
    "allocated": re.compile(rf"{_NUMBER} already allocated|allocated memory (?P<again>{SIZE}) is allocated by"),
    "free": re.compile(rf"{_NUMBER} free;|of which (?P<again>{SIZE}) is free"),
    "allowed": re.compile(rf"{_NUMBER} allowed;"),
    "private": re.compile(rf"with {_NUMBER} allocated in private pools"),
    "process": re.compile(rf"this process has {_NUMBER} memory in use"),
    "reserved": re.compile(rf"{_NUMBER} (?:reserved in total by \w+\)|cached\))"),
    "unallocated": re.compile(rf"{_NUMBER} is reserved by \w+ but unallocated\."),
}
_MPS_FIELDS = {
    "requested": re.compile(rf"Tried to allocate {_NUMBER}"),
    "context": re.compile(rf"other allocations:? {_NUMBER}"),
    "allowed": re.compile(rf"max allowed:? {_NUMBER}"),
}
_ASYNC_FIELDS = {
    "allocated": re.compile(rf"Currently allocated : {_NUMBER}"),
    "requested": re.compile(rf"Requested : {_NUMBER}"),
    "total": re.compile(rf"Device limit : {_NUMBER}"),
    "free": re.compile(rf"Free \(according to CUDA\): {_NUMBER}"),
    "allowed": re.compile(rf"memory fraction\) : {_NUMBER}"),
}
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU) {0,2}(\d{1,9})(?:;| has a total)")
_OTHER = re.compile(rf"Process (\d{{1,12}}) has ({SIZE}) memory in use")


_LIKELY = re.compile(r"Tried\s+to\b|MPS\s+backend|Allocation\s+on\s+device|preemptively\s+rejected")


def _allocators(text: str) -> Iterator[OomMessage]:
    """Parses only the text around likely words: logs are long."""
    begin = end = 0
    for likely in _LIKELY.finditer(text):
        if likely.start() >= end:
            if end:
                yield from _within(text[begin:end], begin)
            begin = max(end, text.rfind("\n", 0, max(0, likely.start() - TAIL_CHARS // 10)) + 1)
        end = likely.start() + 2 * TAIL_CHARS
    if end:
        yield from _within(text[begin:end], begin)


def _within(text: str, offset: int) -> Iterator[OomMessage]:
    flat, place = _flat(text)
    heads = sorted((m for p in (_ASKED, _MPS, _ASYNC, _REJECTED) for m in p.finditer(flat)), key=re.Match.start)
    inside = -1
    for at, head in enumerate(heads):
        if head.start() < inside:
            continue
        mps = head.re is _MPS
        following = [h for h in heads[at + 1 :] if not (mps and h.re is _ASKED)]
        until = min(head.start() + TAIL_CHARS, following[0].start() if following else len(flat))
        traceback = flat.find("Traceback (most recent call last)", head.end(), until)
        body = flat[head.start() : until if traceback < 0 else traceback]
        message, end = _read(head, body)
        end = max(end, head.end() - head.start())
        inside = head.start() + end
        where = (offset + place[head.start()], offset + place[inside - 1] + 1)
        yield replace(message, where=where, text=body[:end].strip())


def _read(head: re.Match[str], body: str) -> tuple[OomMessage, int]:
    if head.re is _REJECTED:
        return OomMessage("", "allocator", requested=read(head["size"]), segments=False, new=True), 0
    if head.re is _MPS:
        figures, end = _figures(body, _MPS_FIELDS)
        allocated = read(head["size"])
        context = figures.pop("context", None)
        message = OomMessage("", "allocator", "mps", "MPS", segments=False, allocated=allocated)
        return replace(message, process=None if context is None else allocated + context, **figures), end
    if head.re is _ASYNC:
        figures, end = _figures(body, _ASYNC_FIELDS)
        message = OomMessage("", "allocator", source="cudaMallocAsync", segments=False)
        return replace(message, device=int(head["device"]) if head["device"] else None, **figures), end
    figures, end = _figures(body, _FIELDS)
    if "unallocated" in figures and "allocated" in figures:
        figures["reserved"] = figures["allocated"] + figures["unallocated"]
    device = _DEVICE.search(body)
    message = OomMessage(
        "",
        "overflow" if head["overflow"] else "allocator",
        (head["backend"] or "cuda").lower(),
        device=int(device[1]) if device else None,
        requested=read(head["size"]) if head["size"] else None,
        others=tuple((int(pid), each) for pid, size in _OTHER.findall(body) if (each := read(size)).low < BYTES_MAX),
        expandable=True if "expandable_segments is enabled" in body else None,
        new="unallocated" in figures or " has a total capac" in body,
    )
    return replace(message, **figures), end


def _figures(body: str, fields: dict[str, re.Pattern[str]]) -> tuple[dict[str, Any], int]:
    """Each field's figure, and where the last one ends."""
    figures: dict[str, Any] = {}  # names of Message's fields
    end = 0
    for name, pattern in fields.items():
        found = pattern.search(body)
        if found is None:
            continue
        figure = read(next(group for group in found.groups() if group is not None))
        end = max(end, found.end())
        if figure.low < BYTES_MAX:  # "17179869184.00 GiB" wrapped around: unknown to the driver (Windows, WSL)
            figures[name] = figure
    return figures, end


_PREFIX = re.compile(
    r"[ \t]*(?:\[(?:rank|default)?\d+\]:?|\((?:\w{1,40} )?\w{0,40}pid=\d{1,12}(?:, ip=[\d.]+)?\)|[│|#>]+)"
    r"(?:[ \t]*(?:ERROR|WARNING|INFO)\b[^\n\]]{0,80}\])?[ \t]?"
)


def _flat(text: str) -> tuple[str, list[int]]:
    """The text without rank prefixes and with single spaces, and the original offset of each character."""
    flat: list[str] = []
    place: list[int] = []
    at = 0
    for line in text.splitlines(keepends=True):
        prefix = _PREFIX.match(line)
        start = prefix.end() if prefix else 0
        for offset in range(start, len(line)):
            char = line[offset]
            if char.isspace():
                if flat and flat[-1] == " ":
                    continue
                char = " "
            flat.append(char)
            place.append(at + offset)
        at += len(line)
    return "".join(flat), place


# ----------------------------------------------------------------------------- libraries, the driver, and the host


class _Sign(msgspec.Struct, frozen=True):
    kind: str
    source: str
    pattern: re.Pattern[str]
    sure: bool = True
    backend: str = "cuda"


def _sign(kind: str, source: str, pattern: str, *, sure: bool = True, backend: str = "cuda") -> _Sign:
    return _Sign(
        kind, source, re.compile(pattern, re.MULTILINE), sure, "cpu" if kind not in ("driver", "overflow") else backend
    )


_SIGNS = (
    _sign("driver", "cuBLAS", r"CUBLAS_STATUS_ALLOC_FAILED(?: when calling `[^`]{0,400}`)?"),
    _sign("driver", "cuDNN", r"CUDNN_STATUS_ALLOC_FAILED"),
    _sign("driver", "cuSPARSE", r"CUSPARSE_STATUS_(?:ALLOC_FAILED|INSUFFICIENT_RESOURCES)"),
    _sign("driver", "cuSOLVER", r"CUSOLVER_STATUS_ALLOC_FAILED"),
    _sign("driver", "cuFFT", r"CUFFT_ALLOC_FAILED"),
    _sign("driver", "NCCL", r"(?:Cuda failure (?:\d+ )?'out of memory'|ncclSystemError[^\n]{0,80}out of memory)"),
    _sign("driver", "CUDA's driver", r"CUDA(?: driver)? error: out of memory|cudaErrorMemoryAllocation"),
    _sign("driver", "CUDA's driver", r"CUDA_ERROR_OUT_OF_MEMORY"),
    _sign("driver", "HIP's driver", r"HIP error: out of memory|hipErrorOutOfMemory", backend="hip"),
    _sign("driver", "PyTorch", r"\b(?:CUDA|HIP|XPU) out of memory\b"),
    _sign("driver", "MPS", r"Invalid buffer size: [\d.]+ [KMG]i?B", backend="mps"),
    _sign("driver", "cuBLAS", r"CUBLAS_STATUS_NOT_INITIALIZED(?: when calling `[^`]{0,400}`)?", sure=False),
    _sign("driver", "cuDNN", r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)", sure=False),
    _sign("driver", "cuDNN", r"Unable to find a valid cuDNN algorithm to run convolution", sure=False),
    _sign("driver", "cuDNN", r"(?:FIND|GET) was unable to find an engine to execute this computation", sure=False),
    _sign("driver", "PyTorch", r"NVML_SUCCESS == r INTERNAL ASSERT FAILED", sure=False),
    _sign(
        "host", "DefaultCPUAllocator",
        rf"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate {_NUMBER}",
    ),
    _sign(
        "host", "NumPy",
        rf"Unable to allocate {_NUMBER} for an array with shape \([^)]{{0,200}}\)(?: and data type \w{{1,40}})?",
    ),
    _sign("host", "pinned memory", r"cudaHostAlloc[^\n]{0,60}out of memory"),
    _sign("shared", "DataLoader", r"(?:out of shared memory|unable to (?:open|mmap|allocate) shared memory[^\n]{0,80}|"
                                  r"No space left on device[^\n]{0,40}/dev/shm)"),
    _sign("worker", "DataLoader", r"DataLoader worker \(pid\(?s?\)? ?[\d, ]{1,400}\) (?:is killed by signal: Killed|"
                                  r"exited unexpectedly)", sure=False),
    _sign("host", "the operating system", r"\[Errno 12\] Cannot allocate memory"),
    _sign("host", "Python", r"^(?:\S{1,200}Error: )?MemoryError(?::|[ \t]*$)|\bMemoryError\b(?=[ \t]*$)"),
    _sign("killed", "the kernel", r"Out of memory: Kill(?:ed)? process \d{1,12}[^\n]{0,80}|oom-kill[^\n]{0,120}|"
                                  r"Detected \d{1,12} oom[_-]kill events?"),
    _sign("killed", "the kernel", r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|died with <Signals\.SIGKILL: 9>|"
                                  r"^[ \t]*Killed[ \t]*$", sure=False),
)  # fmt: skip


def _others(text: str) -> Iterator[OomMessage]:
    for sign in _SIGNS:
        for found in sign.pattern.finditer(text):
            size = found.groupdict().get("size")
            yield OomMessage(
                text=" ".join(found[0].split()),
                kind=sign.kind,
                backend=sign.backend,
                source=sign.source,
                sure=sign.sure,
                requested=read(size) if size else None,
                segments=False,
                where=found.span(),
            )
