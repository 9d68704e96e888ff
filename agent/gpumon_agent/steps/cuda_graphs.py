"""CUDA graphs: nobody sees what runs inside a replay. Each gets a window of its own, labelled; it is said once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gpumon_agent.guard import Guard, leave_no_frame
from gpumon_agent.steps.phases import Phases

if TYPE_CHECKING:
    from gpumon_agent.steps.hooks import Hooks

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_is_compiling = torch.compiler.is_compiling
_REPLAYED = (
    "a CUDA graph is replayed: the phases inside it are not seen, and the allocator counts their memory as reserved, "
    "not as allocated"
)


class Graphs:
    """Sees captures and replays. A capture is a step like any other: its hooks run, and the allocator counts."""

    def __init__(self, hooks: Hooks, phases: Phases, guard: Guard, notice: Callable[[str], None]) -> None:
        self._hooks = hooks
        self._phases = phases
        self._guard = guard
        self._notice = notice
        self._captured: weakref.ref[Any] | None = None  # the graph that is being captured, or was last
        self._stepping: weakref.WeakSet[Any] = weakref.WeakSet()  # graphs with an optimizer's step in them
        self._replayed = False

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        """`replace` puts a wrapper in an attribute's place until the agent leaves."""
        graph = torch.cuda.CUDAGraph
        replace(graph, "capture_begin", self._around_capture(graph.capture_begin))
        replace(graph, "replay", self._around_replay(graph.replay))
        graphed = self._around_graphed(torch.cuda.make_graphed_callables)
        for module in (torch.cuda, torch.cuda.graphs):
            replace(module, "make_graphed_callables", graphed)

    def optimizer_stepped(self) -> None:
        """Called at the end of each: one that is captured will step at each replay."""
        if self._captured is None:
            return
        graph = self._captured()
        if graph is not None and torch.cuda.is_current_stream_capturing():
            self._stepping.add(graph)
        else:
            self._captured = None

    def _around_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._captured = weakref.ref(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return capture_begin

    def _around_replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begins = self._guard.protect("graph replay", self._replay_begins)
        ends = self._guard.protect("graph replay", self._replay_ends)

        @functools.wraps(original)
        def replay(graph: Any) -> Any:
            own = self._hooks.fires and not _is_compiling() and begins()
            try:
                return original(graph)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if own:
                    ends(graph)

        return replay

    def _replay_begins(self) -> bool:
        if not self._replayed:
            self._replayed = True
            self._notice(_REPLAYED)
        return _graph_task() == -1 and self._phases.replay_begins()

    def _replay_ends(self, graph: Any) -> None:
        self._phases.replay_ends(steps=graph in self._stepping)

    def _around_graphed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """It refuses modules with hooks, and runs them to warm up and to capture, which is no training."""
        step_aside = self._guard.protect("graphed callables", self._hooks.step_aside)

        @functools.wraps(original)
        def make_graphed_callables(*args: Any, **kwargs: Any) -> Any:
            come_back = step_aside()
            try:
                return original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                if come_back is not None:
                    come_back()

        return make_graphed_callables
