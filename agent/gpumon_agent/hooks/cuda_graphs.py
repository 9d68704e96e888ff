"""CUDA graphs: hooks do not run inside a replay, so each replay is one window with its own label; a notice says so."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import graphs

from gpumon_agent.guard import Guard
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.patching import Patches

MAKES_GRAPHS = inspect.unwrap(graphs.make_graphed_callables).__code__
"""It runs a model to warm it up and to capture it; that is not training."""
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_REPLAYED = (
    "a CUDA graph is replayed: phases inside it are not visible, and the allocator counts their memory as reserved, "
    "not as allocated"
)


class Graphs:
    """Follows captures and replays. During a capture hooks and allocator counters work as in any other step."""

    def __init__(self, fires: Callable[[], bool], phases: Phases, guard: Guard, notice: Callable[[str], None]) -> None:
        self._fires = fires
        self._phases = phases
        self._guard = guard
        self._notice = notice
        self._captured: weakref.ref[Any] | None = None  # the graph being captured, or captured last
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs with an optimizer's step in them
        self._replayed = False
        self._open = False  # the running replay has its own window

    def install(self, patches: Patches) -> list[Any]:
        """Registers torch's graph hooks and returns their handles; older torch: wraps two methods of CUDAGraph."""
        captures = self._guard.protect("graph capture", self._capture_begins)
        begins = self._guard.protect("graph replay", self._replay_begins)
        ends = self._guard.protect("graph replay", self._replay_ends)
        if hasattr(graphs, "register_graph_capture_start_hook") and hasattr(graphs, "register_graph_replay_start_hook"):
            return [
                graphs.register_graph_capture_start_hook(captures),
                graphs.register_graph_replay_start_hook(begins),
                graphs.register_graph_replay_end_hook(ends),
            ]

        def capture_begins(graph: Any, *_: Any, **__: Any) -> None:
            captures(graph)

        def replay_begins(graph: Any) -> Any:
            begins(graph)
            return graph

        patches.observe(graphs.CUDAGraph, "capture_begin", capture_begins, lambda *_: None)
        patches.observe(graphs.CUDAGraph, "replay", replay_begins, lambda graph, *_: ends(graph))
        return []

    def optimizer_stepped(self) -> None:
        """Called after each optimizer step that is not idle: a captured one will run again in each replay."""
        if self._captured is None:
            return
        graph = self._captured()
        if graph is not None and torch.cuda.is_current_stream_capturing():
            self._stepping.add(graph)
        else:
            self._captured = None

    def _capture_begins(self, graph: Any) -> None:
        self._captured = weakref.ref(graph)
        self._phases.stir()

    def _replay_begins(self, _: Any) -> None:
        self._open = False
        if not self._fires():
            return
        if not self._replayed:
            self._replayed = True
            self._notice(_REPLAYED)
        self._open = _graph_task() == -1 and self._phases.replay_begins()

    def _replay_ends(self, graph: Any) -> None:
        if self._open:
            self._open = False
            self._phases.replay_ends(steps=graph in self._stepping)
