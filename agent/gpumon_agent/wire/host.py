"""What a viewer adds by itself: readings of machines (NVML, amdsmi, psutil), and its links to other machines."""

from typing import Annotated

import msgspec
from msgspec import Meta

from .base import TEXT_CHARS_MAX, Bytes, Index, Message, Named, Nanoseconds, Pid, Text, clean, clean_fields

Reading = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]  # percent, degrees, milliwatts
Percent = Annotated[float, Meta(ge=0, le=1e7)]  # not NaN, not infinite: of all cores together


class DeviceProcess(Message, frozen=True):
    pid: Pid
    bytes: Bytes | None  # None: the driver does not say (containers, WDDM)
    name: Text | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "name")


class DeviceReading(Message, frozen=True):
    """One physical device as its driver sees it. For fields that are None see `why`."""

    uuid: Text
    name: Text | None = None
    total: Bytes | None = None
    free: Bytes | None = None
    used: Bytes | None = None
    processes: Annotated[tuple[DeviceProcess, ...], Meta(max_length=4096)] | None = None
    utilization_percent: Reading | None = None
    temperature_c: Reading | None = None
    power_mw: Reading | None = None
    power_limit_mw: Reading | None = None
    why: Named = msgspec.field(default_factory=dict)  # field name → why it is None
    began_ns: Nanoseconds | None = None  # when memory and processes were read, by the machine's clock
    ended_ns: Nanoseconds | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "uuid", "name")
        msgspec.structs.force_setattr(self, "why", {clean(k): clean(v) for k, v in self.why.items()})


class ChildProcess(Message, frozen=True):
    pid: Pid
    name: Text
    rss: Bytes | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "name")


class ProcessReading(Message, frozen=True):
    """A watched process as the operating system sees it."""

    pid: Pid
    rss: Bytes | None = None
    cpu_percent: Percent | None = None
    threads: Index | None = None
    children: Annotated[tuple[ChildProcess, ...], Meta(max_length=4096)] = ()


class Host(Message, frozen=True, tag="host"):
    """The viewer's own readings: NVML, amdsmi and psutil. A message, so that recordings contain it too."""

    host: Text
    t_ns: Nanoseconds  # the viewer's monotonic clock
    driver: Text | None = None
    devices: Annotated[tuple[DeviceReading, ...], Meta(max_length=64)] = ()
    processes: Annotated[tuple[ProcessReading, ...], Meta(max_length=1024)] = ()
    memory_total: Bytes | None = None
    memory_available: Bytes | None = None
    why: Text | None = None  # why there are no devices: "NVML is not installed", "the driver does not answer"

    def __post_init__(self) -> None:
        clean_fields(self, "host", "driver")
        clean_fields(self, "why", limit=TEXT_CHARS_MAX)


class Link(Message, frozen=True, tag="link"):
    """The viewer's link to another machine (`gpumon attach HOST1,HOST2`). `lost`: why it is; None: it is up."""

    host: Text  # as in the Hello of the agents there
    lost: Text | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "host")
        clean_fields(self, "lost", limit=TEXT_CHARS_MAX)
