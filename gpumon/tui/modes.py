"""The screens by name. Only the Overview is imported at start; the others when they are opened."""

from __future__ import annotations

from collections.abc import Callable

from textual.screen import Screen

from gpumon.tui.screens.overview import OverviewScreen


def _ranks() -> Screen[None]:
    from gpumon.tui.screens.ranks import RanksScreen

    return RanksScreen()


def _layers() -> Screen[None]:
    from gpumon.tui.screens.layers import LayersScreen

    return LayersScreen()


def _estimate() -> Screen[None]:
    from gpumon.tui.screens.estimate import EstimateScreen

    return EstimateScreen()


def _leaks() -> Screen[None]:
    from gpumon.tui.screens.leaks import LeaksScreen

    return LeaksScreen()


def _blocks() -> Screen[None]:
    from gpumon.tui.screens.blocks import BlocksScreen

    return BlocksScreen()


def _home() -> Screen[None]:
    from gpumon.tui.screens.home import HomeScreen

    return HomeScreen()


def _log() -> Screen[None]:
    from gpumon.tui.screens.log import LogScreen

    return LogScreen()


MODES: dict[str, Callable[[], Screen[None]]] = {
    "overview": OverviewScreen,
    "ranks": _ranks,
    "layers": _layers,
    "leaks": _leaks,
    "estimate": _estimate,
    "blocks": _blocks,
    "log": _log,
    "home": _home,
}
