"""What is known of a process without an agent: by the driver, and by the system."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import psutil

from gpumon_agent.wire.masking import masked

CPU_FOR_S = 0.2


def lines(pid: int) -> Iterator[str]:
    """For people. Empty if the process has just ended."""
    from gpumon.analysis.units import duration, percent, size
    from gpumon.host import read_driver

    try:
        process = psutil.Process(pid)
        command, age_s = process.cmdline(), time.time() - process.create_time()
        resident, threads = process.memory_info().rss, process.num_threads()
        cpu = process.cpu_percent(CPU_FOR_S) / 100
        children = len(process.children(recursive=True))
    except psutil.Error:
        return
    yield f"Process {pid} has run for {duration(age_s)}: {' '.join(masked(command))}"
    yield f"  host   {size(resident)} resident, {percent(cpu)} of a CPU, {threads} threads, {children} child processes"
    read = asyncio.run(read_driver())
    for number, device in enumerate(read.devices):
        held = {each.pid: each.bytes or 0 for each in device.processes or ()}
        if device.processes is None:
            yield f"  GPU {number}  {device.why.get('processes', 'the driver does not list its processes')}"
        elif pid in held:
            others = [each for each in held if each != pid]
            line = f"  GPU {number}  {size(held[pid])} by this process"
            if others:
                line += f", {size(sum(held[each] for each in others))} by {len(others)} other{'s' * (len(others) > 1)}"
            yield line + f", of {size(device.total)}" if device.total is not None else line
    if read.devices and not any(pid == each.pid for device in read.devices for each in device.processes or ()):
        yield "  GPU    the driver lists no memory of this process"
    if not read.devices:
        yield f"  GPU    {read.why or 'none'}"
