"""Protocol of the child process of drivers.py, as its parent speaks it: one JSON line for each request line."""

from __future__ import annotations

import msgspec

from gpumon_agent import wire

ASK = b"read\n"


class DriverReading(msgspec.Struct, frozen=True):
    """All devices as the driver sees them now. `why`: a sentence if there are none, or one is missing."""

    driver: str | None = None
    devices: tuple[wire.DeviceReading, ...] = ()
    why: str | None = None


decoder = msgspec.json.Decoder(DriverReading)
