"""Style sheets are parsed once for each theme."""

from __future__ import annotations

from gpumon.tui.app import MonitorApp
from gpumon.tui.modes import MODES
from gpumon.tui.stylesheet import StylesheetParsedOnce
from gpumon.tui.themed_app import Options
from gpumon.tui.themes import NAMES


def test_the_same_colours_need_no_parsing() -> None:
    sheet = StylesheetParsedOnce({"ours": "#010203"})
    sheet.add_source("A { color: $ours; }", ("a", ""))
    before = sheet.rules
    sheet.set_variables({"ours": "#010203"})
    sheet.reparse()
    assert sheet.rules is before
    sheet.add_source("B { color: $ours; }", ("b", ""))
    sheet.reparse()
    assert [rule.selector_names for rule in sheet.rules] == [{"A"}, {"B"}]
    assert sheet.rules[0] is before[0]
    sheet.set_variables({"ours": "#040506"})
    sheet.reparse()
    assert [rule.styles.color.hex for rule in sheet.rules] == ["#040506", "#040506"]


async def test_a_new_screen_does_not_parse_all_again_but_another_theme_does() -> None:
    app = MonitorApp()
    async with app.run_test() as pilot:
        at_start = list(app.stylesheet.rules)
        assert at_start
        for mode in MODES:
            if mode != "home":
                await app.switch_mode(mode)
                await pilot.pause()
        now = {id(rule) for rule in app.stylesheet.rules}
        assert len(now) > len(at_start)
        anew = sum(id(rule) not in now for rule in at_start)
        assert anew < len(at_start) / 10  # those of a widget that another one turns out to inherit from
        background = app.screen.styles.background
        app.theme = "gpumon-light"
        await pilot.pause()
        now = {id(rule) for rule in app.stylesheet.rules}
        assert not any(id(rule) in now for rule in at_start)
        assert app.screen.styles.background != background


async def test_the_theme_that_is_asked_for_is_there_from_the_start() -> None:
    backgrounds = set()
    for name in NAMES:
        app = MonitorApp(options=Options(theme=name))
        async with app.run_test():
            assert app.theme == name
            assert app.has_class(f"-theme-{name}")
            assert app.has_class("-dark-mode") == app.current_theme.dark != app.has_class("-light-mode")
            backgrounds.add(app.screen.styles.background.hex)
    assert len(backgrounds) == len(NAMES)
