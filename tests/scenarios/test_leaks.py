"""Leak scripts as users write them: each is named right (code, holder, line), and its clean twin warns of nothing.

A process each, forked from one that has torch imported. `--junitxml=FILE -o junit_family=xunit1` tells of each at which
step it was raised, and named.
"""

from __future__ import annotations

import pytest
from scenarios.leaks._catalogue import LEAKS
from told import findings, looks, told


def tells(virtual_gpu, folder, leak, *more, times=1):
    return told(virtual_gpu(), folder, leak.path, *leak.arguments, *more, LEAK_STEPS=str(leak.steps * times))


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_a_leak_is_named_right(virtual_gpu, tmp_path, leak, record_property):
    newest, ever, first = (), {}, {}
    for times in (1, 4):  # a slice is a time: a slow machine needs more of them
        ever, first = {}, {}
        for step, newest in looks(tells(virtual_gpu, tmp_path, leak, times=times)):
            ever.update({each.code: each for each in newest})
            for each in newest:
                if each.severity != "info":
                    first.setdefault("raised", step)
                if each.code == leak.code and any(name in (each.holder or "") for name in leak.holder):
                    first.setdefault("named", step)
        if "named" in first or leak.holder == ("-",):
            break
    for what, step in first.items():
        record_property(what, step)
    theirs = [each for each in newest if each.code == leak.code and each.state == "open"]
    assert theirs, (newest, ever)
    if leak.holder == ("-",):
        assert theirs[0].holder is None, theirs
        assert "gc.collect()" in theirs[0].remedy
    else:
        assert any(name in (theirs[0].holder or "") for name in leak.holder), theirs
    file, _, line = (theirs[0].where or "").rpartition(":")
    assert file == leak.path.name or (file == "_toy.py" and not leak.lines), theirs
    assert not leak.lines or "made at" not in theirs[0].title or int(line) in leak.lines, theirs
    warned = {code for code, each in ever.items() if each.severity != "info"}
    assert warned <= {"tensor-leak", "retained-graph", leak.code}, ever


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.name)
def test_its_clean_twin_warns_of_nothing(virtual_gpu, tmp_path, leak):
    ever = findings(tells(virtual_gpu, tmp_path, leak, "--clean"))[1]
    assert all(each.severity == "info" for each in ever.values()), ever


def test_there_are_enough_of_them_and_each_has_a_name_of_its_own():
    assert len(LEAKS) >= 30
    assert len({leak.name for leak in LEAKS}) == len(LEAKS)
