"""Findings on memory that grows from step to step: tensor-leak, retained-graph, host-leak.

The evidence is a growth confirmed by gpumon.analysis.growth. The newest census that can explain it gives the tensors
and their holders (gpumon.analysis.suspects). Without one, a tensor-leak without a holder is reported after
`alone_steps` of growth.
"""

from __future__ import annotations

from gpumon.analysis import units
from gpumon.analysis.findings.look import Evidence, Look
from gpumon.analysis.growth_series import PINNED
from gpumon.analysis.leak_identity import Leak
from gpumon.analysis.rules import HOST_LEAK, TENSOR_LEAK
from gpumon.analysis.suspects import Suspect, explaining
from gpumon.analysis.types import Growth

NAMED_MAX = 4
WHOLE = 0.995  # a suspect with this share of the growth is reported as all of it
SAME_SHARE = 1.25  # times the device's rate: pages and Python's own objects come on top
_HOST_DEVICE = -1
SOMEBODY = "something keeps tensors: losses (.item()), outputs (.detach()), a cache, a hook; a census finds it"
NOBODY = "a reference cycle that gc has not collected (gc.collect() frees it; is gc disabled?), or C++ code holds them"

HOW_HELD = {
    "bounded": "a deque with maxlen",
    "trimmed": "its own code shortens it at a length that it has not reached",
    "global": "a global",
    "local": "a local variable",
    "attribute": "an attribute",
    "class": "a class attribute",
    "closure": "a closure's variable",
    "default": "a default argument",
    "cache": "a function's cache",
    "generator": "a suspended generator",
    "traceback": "an exception's traceback",
    "hook": "a hook",
    "module": "a module",
    "cycle": "it waits for the garbage collector",
}

INSTEAD = {
    "bounded": "it stops growing when it is full: check that it fits then",
    "trimmed": "it stops growing when its own code shortens it: check that it fits until then",
    "cache": "a cache keeps every argument and every result: bound it (maxsize), or cache no tensors",
    "traceback": "an exception keeps the variables of every function it passed through: keep str(error) instead",
    "generator": "a suspended generator keeps its variables: close() it, or let it end",
    "hook": "the hook keeps its arguments: overwrite instead of append, or remove it with handle.remove()",
    "default": "a mutable default argument lives as long as its function: use None and make it inside",
}


def tensor_leak(look: Look) -> tuple[Evidence, ...]:
    return _leaks(look, with_graph=False)


def retained_graph(look: Look) -> tuple[Evidence, ...]:
    return _leaks(look, with_graph=True)


def _leaks(look: Look, *, with_graph: bool) -> tuple[Evidence, ...]:
    leak = look.leak
    if leak is None:
        return ()
    if leak.found:
        whole = sum(suspect.held for suspect, _ in leak.found) or 1
        return tuple(
            _named(look, leak, suspect, census.step - leak.since + 1, suspect.held / whole)
            for suspect, census in leak.found[:NAMED_MAX]
            if suspect.has_graph == with_graph
        )
    waited = look.record.step - leak.since >= TENSOR_LEAK.alone_steps or look.rank.status == "ended"
    return (_alone(look, leak.main, round(leak.per_step)),) if waited and not with_graph else ()


def _named(look: Look, leak: Leak, suspect: Suspect, steps: int, share: float) -> Evidence:
    """`share`: the part of the growth that this suspect holds."""
    main = leak.main
    per_step = round(leak.per_step * share)
    where, source_line = suspect.line
    made = f", made at {suspect.where}" + (f" ({suspect.phase})" if suspect.phase else "") if suspect.where else ""
    keeps = f", with graphs of {units.size(suspect.graph_bytes)}" if suspect.graph_bytes else ""
    graph = keeps or (", each with its graph" if suspect.has_graph else "")
    severity = _urgency(look)
    if severity is None and suspect.holder is not None and suspect.holder.kind in ("bounded", "trimmed"):
        severity = "info"
    if share < TENSOR_LEAK.least_share_of_growth:
        severity = "info"  # something else fills the device
    so_far = round(share * (main.so_far or 0)) if main.figure != "blocks" else 0
    if suspect.cyclic:
        title = f"tensors such as {suspect.example} stay in reference cycles{look.where}"
        counted = f" since step {units.count(main.since)}"
    else:
        title = f"{suspect.tensors}{graph}{look.where}, {_pace(suspect, steps, per_step)}"
        counted = (
            f" since step {units.count(main.since)} (counted at step {units.count((main.since or 0) + steps - 1)})"
        )
    return Evidence(
        f"{title}{counted}{made}, {_held_by(suspect)}{_evidence(main, share)}",
        max(suspect.held, so_far) if suspect.cyclic else suspect.held,
        _remedy(suspect),
        bytes_per_step=per_step,
        holder=_holder(suspect),
        where=where,
        source_line=source_line,
        by=suspect.by,
        so_far=round(share * leak.held.at(look.record.step)) if leak.held is not None and suspect.by else so_far,
        subject=suspect.by.variable if suspect.by is not None else f"{suspect.where or ''}{list(suspect.kinds)[:1]}",
        since=main.since,
        severity=severity,
    )


def _alone(look: Look, main: Growth, per_step: int) -> Evidence:
    severity = _urgency(look)
    what = "memory without a known owner" if main.figure == "unexplained" else "allocated at the end of the step"
    blocks = next((g for g in look.growth if g.figure == "blocks" and g.growing), None)
    if main.figure == "blocks":
        title = f"live blocks grow by {main.per_step:.2g} a step"
    else:
        title = f"{what} grows by {units.size(per_step)}{_interval(main)} a step"
    more = f" in {units.count(blocks.so_far)} blocks" if blocks and main.figure != "blocks" else ""
    so_far = main.so_far or 0
    said = f", {units.size(so_far)}{more} so far" if main.figure != "blocks" else f", {units.count(so_far)} so far"
    where, source_line, made = _made_at(look, main)
    searched = any(census.step >= (main.since or 0) and not census.cut for census in look.censuses)
    waiting = look.censuses[-1].waiting if look.censuses else None
    if searched:
        said += ", and no variable leads to it"
    return Evidence(
        f"{title}{look.where} since step {units.count(main.since)}{said}{made}",
        so_far if main.figure != "blocks" else 512 * so_far,
        _collector_off(waiting) if waiting is not None else NOBODY if searched else SOMEBODY,
        bytes_per_step=per_step,
        where=where,
        source_line=source_line,
        since=main.since,
        severity=severity,
        so_far=so_far if main.figure != "blocks" else 512 * so_far,
    )


def _collector_off(waiting: int) -> str:
    return (
        f"Python's collector is off or rarely runs, and {units.count(waiting)} new objects are not collected: "
        "gc.collect() now and then frees tensors in reference cycles, such as an exception kept by its own frame"
    )


def _made_at(look: Look, main: Growth) -> tuple[str | None, str | None, str]:
    """The line that made most of the tensors without a known holder, its text, and what the title says of it."""
    for census in reversed(look.censuses):
        made = [each for each in census.unclaimed if each.device == look.device]
        if made and census.step >= (main.since or 0):
            most = max(made, key=lambda each: each.bytes)
            return most.where, most.source_line, f"; most of it is made at {most.where}"
    return None, None, ""


def _urgency(look: Look) -> str | None:
    """Critical if the newest forecast says that memory is full soon, else the rule's severity."""
    left = look.forecast.steps_to_oom if look.forecast is not None else None
    return "critical" if left is not None and left <= TENSOR_LEAK.critical_steps_to_oom else None


def _evidence(main: Growth, share: float) -> str:
    if share < WHOLE:  # other suspects grow too
        return f"; {units.percent(share)} of the growth"
    if main.figure == "blocks":
        return f"; live blocks grow by {main.per_step:.2g} ({main.low or 0:.2g}–{main.high or 0:.2g}) a step"
    return (
        f"; {main.figure} grows by "
        f"{units.size(round(main.per_step or 0))}{_interval(main)} a step, {units.size(main.so_far or 0)} so far"
    )


def _pace(suspect: Suspect, steps: int, per_step: int) -> str:
    """ "one a step", "3 a step", "one every 5 steps"; "growing" for one tensor that gets longer.

    Limited by the byte rate `per_step`: some of the counted tensors may be older than the growth.
    """
    if _gets_longer(suspect):
        return "growing"
    rate = min(suspect.count / max(1, steps), per_step * suspect.count / max(1, suspect.held))
    if rate >= 0.67:
        return f"{units.count(round(rate))} a step" if round(rate) > 1 else "one a step"
    return f"one every {units.count(round(1 / rate))} steps"


def _gets_longer(suspect: Suspect) -> bool:
    """One tensor that is replaced by a longer one each step, or one such tensor in each of several layers."""
    return suspect.count == 1 or suspect.several_places


def _interval(main: Growth) -> str:
    return units.between(round(main.low or 0), round(main.high or 0))


def _holder(suspect: Suspect) -> str | None:
    holder = suspect.holder
    if holder is None:
        return "a reference cycle" if 2 * suspect.cyclic > suspect.count else None
    return suspect.by.text if suspect.by is not None else None


def _held_by(suspect: Suspect) -> str:
    holder = suspect.holder
    if holder is None:
        if 2 * suspect.cyclic > suspect.count:
            return "held only by a reference cycle that the garbage collector has not freed"
        return "no holder was found"
    kind = HOW_HELD.get(holder.kind, holder.kind)
    where = f", {holder.where}" if holder.where else ""
    return f"held by `{_holder(suspect)}` ({kind}{where})"


def _remedy(suspect: Suspect) -> str:
    holder = suspect.holder
    name = _in_ticks(suspect)
    if 2 * suspect.cyclic > suspect.count:
        return "break the cycle (a weakref, or del of one side), or let gc run: gc.collect() now and then frees it"
    if suspect.has_graph:
        if suspect.scalar:
            return f"keep numbers: store loss.item() in {name}; if it must stay a tensor, loss.detach()"
        return f"store .detach() (and .cpu(), if it is for later) in {name}: each tensor keeps its whole graph alive"
    if holder is not None and holder.kind in INSTEAD:
        return INSTEAD[holder.kind]
    if _gets_longer(suspect):
        return f"{name} is one tensor that gets longer: write chunks to the host (.cpu()), or restart it each epoch"
    if suspect.scalar:
        return f"store numbers in {name}, value.item(): each tensor takes a block of 512 bytes"
    return f"bound {name} (clear it each epoch, deque(maxlen=…)), or keep on the host what you need: .cpu()"


def _in_ticks(suspect: Suspect) -> str:
    return f"`{suspect.holder.container}`" if suspect.holder else "the list"


# --------------------------------------------------------------------------------------------------------- the host


def host_leak(look: Look) -> tuple[Evidence, ...]:
    found = [each for each in look.host_growth if each.growing and each.figure != PINNED]
    return tuple([_host(look, each) for each in found if (each.so_far or 0) >= HOST_LEAK.least_bytes])


def _on_the_host(look: Look, growth: Growth) -> Suspect | None:
    """Tensors in host memory (pinned batches, results that were moved there) that can explain its growth."""
    device = 0 if look.rank.hello.backend == "cpu" else _HOST_DEVICE
    for census in reversed(look.censuses):
        found = explaining(
            census, device, since=growth.since or 0, blocks_per_step=None, bytes_per_step=growth.per_step
        )
        named = [suspect for suspect in found if suspect.holder is not None]
        if named:
            return named[0]
    return None


def _host(look: Look, growth: Growth) -> Evidence:
    per_step = round(growth.per_step or 0)
    whose, pid = growth.figure, ""
    if growth.figure == "rss":
        whose = "this process's resident memory"
        remedy = (
            "something keeps host memory: a growing list or cache, decoded samples, logs; tracemalloc shows the line"
        )
    else:
        pid = growth.figure.removeprefix("worker ")
        whose = f"the resident memory of child process {pid}"
        remedy = (
            "a DataLoader worker keeps what its Dataset caches, and copies every page of Python objects it touches: "
            "use arrays instead of lists, and no cache in __getitem__"
        )
    held = _on_the_host(look, growth) if growth.figure == "rss" else None
    if held is not None and held.holder is not None:
        remedy = f"bound {_in_ticks(held)} (clear it each epoch, deque(maxlen=…)): its tensors are in host memory"
    free = look.rank.host.memory_available if look.rank.host is not None else None
    steps = round(free / growth.per_step) if free and growth.per_step else None
    near = steps is not None and steps <= HOST_LEAK.critical_steps_to_oom
    ahead = "" if steps is None else f"; the machine has room for about {units.count(steps)} more steps"
    where, source_line = held.line if held is not None else (None, None)
    same = held is None and growth.figure == "rss" and _as_fast_on_the_device(look, growth)
    if same:
        ahead += "; allocated on the device grows as fast: if the device uses host memory, these are the same bytes"
    return Evidence(
        f"{whose} grows by {units.size(per_step)}{_interval(growth)} a step since step "
        f"{units.count(growth.since)}, {units.size(growth.so_far)} so far"
        f"{f': {held.tensors} on the host, {_held_by(held)}' if held is not None else ''}"
        f"{_pinned(look, growth)}{ahead}",
        growth.so_far,
        remedy,
        bytes_per_step=per_step,
        holder=_holder(held) if held is not None else None,
        by=held.by if held is not None else None,
        where=where,
        source_line=source_line,
        subject=growth.figure,
        since=growth.since,
        so_far=growth.so_far,
        severity="critical" if near else "info" if same else None,
    )


def _pinned(look: Look, growth: Growth) -> str:
    if growth.figure != "rss":
        return ""
    pinned = next((each for each in look.host_growth if each.figure == PINNED and each.growing), None)
    if pinned is None:
        return ""
    per_step = units.size(round(pinned.per_step or 0))
    return f"; torch's pinned memory grows with it by {per_step} a step, {units.size(pinned.so_far)} so far"


def _as_fast_on_the_device(look: Look, growth: Growth) -> bool:
    """Whether the host grows no faster than the device: one leak shows in both with unified memory or a virtual GPU."""
    allocated = next((each for each in look.growth if each.figure == "allocated" and each.growing), None)
    return (growth.per_step or 0.0) <= SAME_SHARE * ((allocated.per_step if allocated else None) or 0.0)
