"""What one process can have on a device: by the driver and the allocator at one moment, and by the limits the user set.

Model. A process's own allocations do not change reserved + free, so that sum, taken once in a state both sides agree
on, stands until another process takes or returns something. A memory fraction limits what the allocator reserves, not
what the context takes. Cost: a walk over a few readings.
Known limitations. A driver that tells no free bytes leaves it unknown. What another process takes between two readings
is seen with the next one.
"""

from __future__ import annotations

from gpumon.analysis import ledger
from gpumon.session.frame import RankFrame

FRACTION = "memory_fraction:"
"""of Hello.settings, the device's index behind it"""


def limit(rank: RankFrame, device: int) -> int | None:
    """The most that the allocator may reserve, where the user set a fraction of the device."""
    described = ledger.device_of(rank, device)
    share = rank.hello.settings.get(f"{FRACTION}{device}")
    if share is None or described is None or described.total_bytes is None:
        return None
    try:
        return int(float(share) * described.total_bytes)
    except ValueError:
        return None


def most(rank: RankFrame, device: int) -> int | None:
    """What the process can have at most, without a reading of the driver: the whole device, or the share that the user
    has set. What other processes and CUDA's own context take is not known."""
    described = ledger.device_of(rank, device)
    total = described.total_bytes if described is not None and described.kind != "cpu" else None
    allowed = limit(rank, device)
    return total if allowed is None or total is None else min(total, allowed)


def available(rank: RankFrame, device: int) -> int | None:
    """Bytes the process can have, those it has reserved included; None where no reading can be placed.

    By a reading that fell into a steady state, else cautiously by the newest one: the least reserved around it.
    """
    return by(ledger.driver_lines(rank, device), rank, device)


def by(driver: ledger.DriverLines | None, rank: RankFrame, device: int) -> int | None:
    """The same, where the driver's lines were looked for already."""
    if rank.host is None:
        return None
    found: int | None = None
    if driver is not None and driver.free is not None:
        found = driver.reserved + driver.free
    else:
        described = ledger.device_of(rank, device)
        reading = ledger.reading_of(rank.host, described.uuid if described else None)
        if reading is not None and reading.free is not None:
            least = ledger.reserved_around(rank, device)
            found = None if least is None else least + reading.free
    allowed = limit(rank, device)
    return found if found is None or allowed is None else min(found, allowed)
