"""Findings read in full, copied as Markdown, screens saved as pictures; the line of screens and keys."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from textual.binding import ActiveBinding, Binding

from gpumon.analysis.job_findings import job_findings
from gpumon.tui.app import MonitorApp
from gpumon.tui.screens.help import FindingScreen
from gpumon.tui.text_layout import width
from gpumon.tui.widgets.key_line import KeyLine, key_item, keys


def shown(app: MonitorApp) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def test_n_opens_the_most_important_finding_and_goes_on_to_the_others(app_of, new_run, settled) -> None:
    app = app_of(new_run().leaking().checkpoint())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        found = job_findings(app.view.frame, app.view.reports)
        assert len(found) > 1
        await pilot.press("n")
        await settled(pilot)
        assert found[0].finding.code in shown(app)
        assert f"1 of {len(found)}" in shown(app)
        await pilot.press("n")
        assert f"2 of {len(found)}" in shown(app)
        await pilot.press("N", "N")
        assert f"{len(found)} of {len(found)}" in shown(app)
        assert " ".join(found[-1].finding.title.split()[:4]) in " ".join(shown(app).split())
        await pilot.press("escape")
        assert not isinstance(app.screen, FindingScreen)


async def test_y_copies_the_answer_and_the_finding(app_of, new_run, settled) -> None:
    app = app_of(new_run().leaking())
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("y")
        copied = app.clipboard
        finding = job_findings(app.view.frame, app.view.reports)[0].finding
        assert copied.startswith(("LEAK: ", "OUT OF MEMORY: "))
        assert f"### {finding.code} ({finding.severity})\n\n{finding.title}" in copied
        assert f"- **What to do here**: {finding.remedy}" in copied
        await pilot.press("n", "y")
        assert app.clipboard.startswith(f"### {finding.code}")


async def test_s_saves_the_screen_as_a_picture_and_says_where(
    app_of, new_run, settled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("S")
        await settled(pilot)
        (file,) = tmp_path.iterdir()
        assert file.name == "gpumon-train-overview-12431.svg"
        assert ET.fromstring(file.read_text(encoding="utf-8")).tag.endswith("svg")
        assert app._said[-1].text == f"Saved {file}"
        (tmp_path / "there").write_text("a file")
        monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "there")
        await pilot.press("S")
        await settled(pilot)
        assert "cannot be saved" in app._said[-1].text


async def test_one_toast_at_a_time(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        for text in ("first", "second", "third"):
            app.toast(text)
            await pilot.pause(0.1)
        assert [each.message for each in app._notifications] == ["third"]


async def test_escape_leads_back_to_the_overview(app_of, new_run, settled) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("5")
        assert app.current_mode == "estimate"
        await pilot.press("escape")
        assert app.current_mode == "overview"


def test_all_screens_have_room_in_80_columns_before_the_key_to_all_jobs() -> None:
    names = ("overview", "layers", "leaks", "estimate", "blocks", "log")
    bindings = [Binding("J", "home", "Jobs", id="app.home"), Binding("n", "finding", "Finding", id="app.finding")]
    bindings += [Binding("q", "leave", "Quit", id="app.quit"), Binding("question_mark", "help", "Help", id="app.help")]
    bindings += [
        Binding(str(at), f"mode('{name}')", name.capitalize(), id=f"app.{name}")
        for at, name in zip((1, 3, 4, 5, 6, 7), names, strict=True)
    ]
    active = {each.key: ActiveBinding(None, each, True) for each in bindings}
    shown = keys(active, lambda each: "?" if each.key == "question_mark" else each.key, "overview")
    assert [each.what for each in shown][:9] == [
        "Quit", "Help", "Finding", "Overview", "Layers", "Leaks", "Estimate", "Blocks", "Log"
    ]  # fmt: skip
    assert sum(width(key_item(each)) for each in shown[:9]) <= 80


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_last_line_names_every_screen_and_marks_the_shown_one(app_of, new_run, settled, size) -> None:
    app = app_of(new_run().usual(20))
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        last = shown(app).splitlines()[-1]
        assert "[1 Overview]" in last
        for name in ("3 Layers", "4 Leaks", "5 Estimate", "6 Blocks", "7 Log"):
            assert name in last
        line = app.screen.query_one(KeyLine)
        at = 0
        for each in line._slice:
            if each.what == "Estimate":
                break
            at += width(key_item(each))
        await pilot.click(KeyLine, offset=(at + 2, 0))
        await settled(pilot)
        assert app.current_mode == "estimate"
        assert "[5 Estimate]" in shown(app).splitlines()[-1]
