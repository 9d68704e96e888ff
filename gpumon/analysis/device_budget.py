"""The memory budget of one process on a device, in bytes: from driver and allocator readings, and from user limits.

Model. A process's own allocations do not change reserved + free. So the sum is valid until another process allocates or
frees. A memory fraction limits the bytes that the allocator reserves, not those of the CUDA context.
Cost. A pass over a few readings.
Known limitations. The budget is None if the driver reports no free bytes, or does not count what torch reserves.
Allocations of another process show with the next reading.
"""

from __future__ import annotations

from gpumon.analysis import ledger
from gpumon.session.frame import RankFrame

FRACTION = "memory_fraction:"
"""of Hello.settings, the device's index behind it"""


def limit(rank: RankFrame, device: int) -> int | None:
    """The most bytes that the allocator may reserve, if the user set a fraction of the device."""
    described = ledger.device_of(rank, device)
    share = rank.hello.settings.get(f"{FRACTION}{device}")
    if share is None or described is None or described.total_bytes is None:
        return None
    try:
        return int(float(share) * described.total_bytes)
    except ValueError:
        return None


def most(rank: RankFrame, device: int) -> int | None:
    """The most that the process can have, without a driver reading: the whole device, or the user's fraction. Memory of
    other processes and CUDA's own context is not known."""
    described = ledger.device_of(rank, device)
    total = described.total_bytes if described is not None and described.kind != "cpu" else None
    allowed = limit(rank, device)
    return total if allowed is None or total is None else min(total, allowed)


def available(rank: RankFrame, device: int) -> int | None:
    """Bytes the process can have, including those it has reserved; None if no reading can be placed.

    From a reading in a steady state, else conservatively from the newest one and the least reserved around it.
    """
    return by(ledger.driver_lines(rank, device), rank, device)


def by(driver: ledger.DriverLines | None, rank: RankFrame, device: int) -> int | None:
    """The same, with the driver's lines already looked up."""
    if rank.host is None:
        return None
    found: int | None = None
    total: int | None = None
    if driver is not None and driver.free is not None:
        found, total = driver.reserved + driver.free, driver.total
    else:
        described = ledger.device_of(rank, device)
        reading = ledger.reading_of(rank.host, described.uuid if described else None)
        if reading is not None and reading.free is not None:
            least = ledger.reserved_around(rank, device)
            found, total = None if least is None else least + reading.free, reading.total
    if found is not None and total is not None and found > total:
        return None  # the driver does not count what torch reserves: an APU's is the machine's memory
    allowed = limit(rank, device)
    return found if found is None or allowed is None else min(found, allowed)
