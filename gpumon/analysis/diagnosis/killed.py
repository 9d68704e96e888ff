"""Text about a training that was killed. It sent no goodbye, so only its helper knows its last state."""

from __future__ import annotations

import textwrap
import time

from gpumon.analysis.pages import WIDTH
from gpumon.analysis.units import size
from gpumon_agent.oom.last_known import LastKnown


def text(known: LastKnown) -> str:
    """Lines of at most 80 columns."""
    seen = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(known.unix))
    rank = "" if known.rank is None else f" (rank {known.rank})"
    first = f"{known.name}{rank} was killed, or ended by os._exit()"
    if not known.ended:
        first = f"{known.name}{rank} was killed with its helper, or the machine went down"
    held = [] if known.resident is None else [f"{size(known.resident)} of the host's memory"]
    if known.device is not None and known.allocated is not None and known.reserved is not None:
        held.append(f"on device {known.device} {size(known.allocated)} allocated, {size(known.reserved)} reserved")
    lines = [
        f"{first}.",
        "",
        f"  process    {known.pid} on {known.host}",
        f"  last seen  {seen}, in step {known.step}, {known.phase_s:.1f} s into {known.phase}",
        *(f"  it held    {each}" for each in held),
        "",
        *textwrap.wrap(
            "No out-of-memory of the GPU came before it. If the host ran out of memory, the kernel logged it: "
            "dmesg | grep -i 'killed process'. In a container look at its exit code (137) and reason (OOMKilled); "
            "a scheduler may have ended the job at a time or memory limit.",
            WIDTH,
        ),
    ]
    return "\n".join(lines)
