"""Leak scripts as users write them: each is named right (code, holder, line), and its clean twin warns of nothing.

A process each, forked from one that has torch imported. By default a third of them, another one each day of the year;
GPUMON_ALL_LEAKS=1 runs all.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenarios.leaks._catalogue import FOLDER, LEAKS, Leak

from gpumon.analysis import Finding, Reporter
from gpumon.session.store import SessionStore
from gpumon_agent import wire

THIRDS = 3
CHOSEN = LEAKS if os.environ.get("GPUMON_ALL_LEAKS") == "1" else LEAKS[time.gmtime().tm_yday % THIRDS :: THIRDS]


def messages(path: Path) -> Iterator[wire.Received]:
    raw, at = path.read_bytes(), 0
    while at < len(raw):
        (length,) = struct.unpack_from("<I", raw, at)
        yield wire.decode_received(raw[at + 4 : at + 4 + length])
        at += 4 + length


def found(virtual_gpu, folder: Path, leak: Leak, *more: str) -> tuple[tuple[Finding, ...], dict[str, Finding]]:
    """What is found in the end, and by code what ever warned."""
    gpu = virtual_gpu()
    out = folder / "told"
    argv = [str(FOLDER / "_watched.py"), str(out), str(leak.path), *leak.arguments, *more]
    ended = gpu.forks.run(
        argv, {**gpu.environment, "GPUMON_GOVERNOR": "off", "LEAK_STEPS": str(leak.steps)}, folder, timeout=60
    )
    assert ended.codes == (0,), ended.err
    store, reporter = SessionStore(), Reporter()
    warned: dict[str, Finding] = {}
    newest: tuple[Finding, ...] = ()
    for received in messages(out):
        store.apply(received)
        rank = store.rank(received.source, 0)
        if rank is not None and isinstance(received.event, (wire.Step, wire.Census, wire.Checkpoint)):
            newest = reporter.rank(rank).findings
            warned.update({each.code: each for each in newest if each.severity != "info"})
    return newest, warned


@pytest.mark.parametrize("leak", CHOSEN, ids=lambda leak: leak.name)
def test_a_leak_is_named_right(virtual_gpu, tmp_path, leak):
    newest, warned = found(virtual_gpu, tmp_path, leak)
    theirs = [each for each in newest if each.code == leak.code and each.state == "open"]
    assert theirs, (newest, warned)
    assert any(name in (theirs[0].holder or "") for name in leak.holder), theirs
    file, _, line = (theirs[0].where or "").rpartition(":")
    assert file == leak.path.name, theirs
    assert not leak.lines or "made at" not in theirs[0].title or int(line) in leak.lines, theirs
    assert warned.keys() <= {"tensor-leak", "retained-graph"} | {leak.code}, warned


@pytest.mark.parametrize("leak", CHOSEN, ids=lambda leak: leak.name)
def test_its_clean_twin_warns_of_nothing(virtual_gpu, tmp_path, leak):
    assert not found(virtual_gpu, tmp_path, leak, "--clean")[1]


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own():
    assert len(LEAKS) >= 30
    assert len({leak.name for leak in LEAKS}) == len(LEAKS)
