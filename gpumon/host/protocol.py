"""What the child process that speaks to NVML tells the viewer: one JSON line for each line it is asked."""

from __future__ import annotations

import msgspec

from gpumon_agent import wire

ASK = b"read\n"


class DriverReading(msgspec.Struct, frozen=True):
    """All devices as the driver sees them now. `why`: a sentence where there are none, or where one is missing."""

    driver: str | None = None
    devices: tuple[wire.DeviceReading, ...] = ()
    why: str | None = None


decoder = msgspec.json.Decoder(DriverReading)
encoder = msgspec.json.Encoder()
