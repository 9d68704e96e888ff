"""The process that replays one trace: the caching allocator reads its settings once, so each replay has its own."""

from __future__ import annotations

import ctypes
import sys
from array import array
from typing import NoReturn

import msgspec
import torch

from gpumon.snapshots.replay import RELEASES, UNKNOWN_SETTING, FailedRequest, Replayed, Request
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM, Figures


def main() -> None:
    """Reads a Request and its arrays from stdin; writes a Replayed to stdout."""
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    codes, *others = (_array(code, request.events) for code in "Bqqq")
    player = _Player()
    try:
        torch.cuda.init()  # reads the settings
        if torch.cuda.get_allocator_backend() != "native":
            _end("only the native backend has segments")
        player.begin(request.start)
        began = torch.cuda.memory_stats()
        if player.oom is None:
            player.play(codes, *others)
    except (RuntimeError, ValueError) as error:
        _end(str(error))
    stats = torch.cuda.memory_stats()
    player.end()
    figures = Figures(
        requested_peak=stats["requested_bytes.all.peak"],
        requested_end=stats["requested_bytes.all.current"],
        allocated_end=torch.cuda.memory_allocated(),
        reserved_start=began["reserved_bytes.all.current"],
        reserved_peak=stats["reserved_bytes.all.peak"],
        reserved_end=stats["reserved_bytes.all.current"],
        segments_end=stats["segment.all.current"],
    )
    retries = stats["num_alloc_retries"]
    version = str(torch.__version__)
    replayed = Replayed(request.settings, request.capacity_bytes, version, figures, retries, player.oom)
    sys.stdout.buffer.write(msgspec.json.encode(replayed))


class _Player:
    """Makes the requests, and remembers the first that failed."""

    def __init__(self) -> None:
        self.oom: FailedRequest | None = None
        self._allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self._delete = torch._C._cuda_cudaCachingAllocator_raw_delete
        self._blocks: dict[int, int] = {}  # its address, 0 for a block of 0 bytes
        self._requested: set[int] = set()  # to be freed, but perhaps used by another stream
        self._streams = {0: 0}

    def begin(self, start: tuple[tuple[int, int], ...]) -> None:
        for block, size in start:
            address = self._request(None, size, 0)
            if address is None:
                return
            self._blocks[block] = address

    def play(self, codes: array[int], ids: array[int], sizes: array[int], streams: array[int]) -> None:
        previous = -1
        for at, (code, block, size, stream) in enumerate(zip(codes, ids, sizes, streams, strict=True)):
            if code == ALLOC:
                address = self._request(at, size, self._stream(stream))
                if address is None:
                    return
                self._blocks[block] = address
            elif code == FREE_REQUESTED:
                self._requested.add(block)
            elif code == FREE_COMPLETED:
                self._requested.discard(block)
                self._delete(self._blocks.pop(block))
            elif code == OOM:
                address = self._request(at, size, self._stream(stream))
                if address is not None:
                    self._delete(address)
            elif code in RELEASES and previous not in RELEASES:
                torch.cuda.empty_cache()
            previous = code

    def end(self) -> None:
        """Frees what waits for another stream: allocated_bytes does not count it, requested_bytes does."""
        for block in self._requested:
            self._delete(self._blocks[block])

    def _request(self, at: int | None, size: int, stream: int) -> int | None:
        try:
            address: int = self._allocate(size, stream)
        except torch.cuda.OutOfMemoryError:
            self.oom = self.oom or FailedRequest(at, size)
            return None
        return address

    def _stream(self, recorded: int) -> int:
        """A stream of our own for each recorded one. torch.cuda.Stream would repeat itself after 32."""
        made = self._streams.get(recorded)
        if made is None:
            handle = ctypes.c_void_p()
            torch.cuda.check_error(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
            made = self._streams[recorded] = handle.value or 0
        return made


def _end(why: str) -> NoReturn:
    """Ends the process with the reason's first line on stderr."""
    line = next(iter(why.strip().splitlines()), "no reason given")
    sys.stderr.write(f"{line}\n")
    sys.exit(UNKNOWN_SETTING if "nrecognized" in line else 1)


def _array(typecode: str, count: int) -> array[int]:
    made = array(typecode)
    made.frombytes(sys.stdin.buffer.read(count * made.itemsize))
    return made
