"""`gpumon snapshot --setting, --device`: what a recorded trace needs under other settings, or on another device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpumon.cli import exits
from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.snapshots.replay import Replayed
    from gpumon.snapshots.trace import Trace
    from gpumon.virtual_gpu.profiles import Profile

FIGURE = 13
RECORDED = "as recorded"


def show_replay(trace: Trace, settings: Sequence[str], device: str | None, as_json: bool) -> int:
    """Prints the trace replayed as recorded, and with `settings` ("K:V"); without any, with each that may help.

    `device`: a profile's name or a size; None: a device with plenty of memory. Returns the exit code: whether it fits,
    with the settings if there are any. Raises click's errors.
    """
    from gpumon.snapshots.replay import ReplayError, advise, parse_settings, replay
    from gpumon.virtual_gpu import BuildUnavailable, profiles

    try:
        profile = None if device is None else profiles.find(device)
        wanted = parse_settings(",".join(settings))
    except (ValueError, ReplayError) as error:
        raise click.UsageError(str(error)) from error
    capacity_bytes = None if profile is None else profile.capacity_bytes
    try:
        with working("replaying the trace through torch's allocator"):
            if wanted:
                recorded = replay(trace, capacity_bytes=capacity_bytes)
                others = [replay(trace, settings=wanted, capacity_bytes=capacity_bytes)]
            else:
                recorded, *others = advise(trace, capacity_bytes)
                others.sort(key=_order)
    except (ReplayError, BuildUnavailable) as error:
        raise exits.CannotTell(str(error)) from error
    if as_json:
        say_json(_stated(trace, recorded, others))
    else:
        say("\n".join(_lines(trace, recorded, others, profile)))
    return exits.of((others[0] if wanted else recorded).fits)


# ---------------------------------------------------------------------------------------------------------------- text


def _lines(trace: Trace, recorded: Replayed, others: Sequence[Replayed], profile: Profile | None) -> Iterator[str]:
    from gpumon.snapshots.replay import unknown_cache_bytes

    width = max(len(_name(each, recorded)) for each in (recorded, *others))
    yield _answer(recorded, others, profile)
    yield ""
    yield f"  {'':<{width}}{'requested':>{FIGURE}}{'reserved':>{FIGURE}}{'difference':>{FIGURE}}{'retries':>9}"
    yield from (
        f"  {_name(each, recorded):<{width}}{_figures(each, recorded, len(trace.codes))}"
        for each in (recorded, *others)
    )
    yield ""
    yield f"Peaks, from a replay through the allocator of torch {recorded.torch} on a virtual GPU."
    yield from _against_recorded(trace, recorded)
    unknown = unknown_cache_bytes(trace, recorded)
    if unknown:
        yield f"The device had {_size(unknown)} of free cache before. The trace does not describe it: not replayed."
    if profile is not None:
        yield f"{_size(profile.context_bytes)} of the device are the process's context, which is an assumption."


def _answer(recorded: Replayed, others: Sequence[Replayed], profile: Profile | None) -> str:
    best = next((each for each in others if _helps(each, recorded)), None)
    tried = "this setting" if len(others) == 1 else "any of these settings"
    if not recorded.fits:
        where = profile.name if profile else "a device of 1 TiB"
        hope = f"with {_name(best, recorded)} it does" if best else f"nor with {tried}"
        return f"It does not fit {where}; {hope}."
    need = f"{'It fits ' + profile.name + ': it' if profile else 'It'} needs {_size(recorded.figures.reserved_peak)}"
    if best is None:
        return f"{need}, and with {tried} no less."
    return f"{need}, with {_name(best, recorded)} {_size(best.figures.reserved_peak)}."


def _helps(each: Replayed, recorded: Replayed) -> bool:
    from gpumon.snapshots.replay import saved_bytes

    return each.fits and (not recorded.fits or (saved_bytes(recorded, each) or 0) > 0)


def _figures(each: Replayed, recorded: Replayed, events: int) -> str:
    from gpumon.analysis.units import count
    from gpumon.snapshots.replay import saved_bytes

    if each.oom is not None:
        event = "before the first event" if each.oom.event is None else f"at event {count(each.oom.event)}"
        return f"   does not fit: {_size(each.oom.requested_bytes)} fail {event} of {count(events)}"
    saved = saved_bytes(recorded, each)
    difference = "" if each is recorded or saved is None else _size(-saved, sign=True)
    peaks = f"{_size(each.figures.requested_peak):>{FIGURE}}{_size(each.figures.reserved_peak):>{FIGURE}}"
    return f"{peaks}{difference:>{FIGURE}}{each.retries:>9,}"


def _order(each: Replayed) -> tuple[bool, int]:
    """What needs least first; of those that do not fit, what comes furthest."""
    if each.oom is None:
        return False, each.figures.reserved_peak
    return True, -(each.oom.event or 0)


def _against_recorded(trace: Trace, recorded: Replayed) -> Iterator[str]:
    from gpumon.analysis.units import percent

    if trace.recorded is None or not recorded.fits or recorded.retries:
        return
    had, made = trace.recorded.reserved_peak, recorded.figures.reserved_peak
    if made == had:
        yield f"The device had reserved {_size(had)}: the same to the byte."
    else:
        share = percent(abs(made - had) / had) if had else "all"
        yield f"The device had reserved {_size(had)}: the replay has {_size(made - had, sign=True)} ({share})."


def _name(each: Replayed, recorded: Replayed) -> str:
    changed = [f"{key}:{value}" for key, value in each.settings.items() if recorded.settings.get(key) != value]
    return ",".join(changed) or RECORDED


def _size(count: int, *, sign: bool = False) -> str:
    from gpumon.analysis.units import size

    return size(count, sign=sign)


# ---------------------------------------------------------------------------------------------------------------- JSON


def _stated(trace: Trace, recorded: Replayed, others: Sequence[Replayed]) -> dict[str, Any]:
    import msgspec

    from gpumon.snapshots.replay import unknown_cache_bytes

    return {
        "type": "snapshot_replay",
        "torch": recorded.torch,
        "device_bytes": recorded.capacity_bytes,
        "events": len(trace.codes),
        "recorded": None if trace.recorded is None else msgspec.structs.asdict(trace.recorded),
        "unknown_cache": unknown_cache_bytes(trace, recorded),
        "replays": [_stated_run(each, recorded) for each in (recorded, *others)],
    }


def _stated_run(each: Replayed, recorded: Replayed) -> dict[str, Any]:
    import msgspec

    from gpumon.snapshots.replay import saved_bytes

    return {
        "settings": dict(each.settings),
        "fits": each.fits,
        "oom": None if each.oom is None else {"event": each.oom.event, "requested": each.oom.requested_bytes},
        "retries": each.retries,
        "saved": saved_bytes(recorded, each),
        **msgspec.structs.asdict(each.figures),
    }
