"""What exists once per process: all mutable state of the agent's modules, and the only fork handler.

Other modules have constants only (tests/agent/test_registry.py). Types here are `Any` because the registry is imported
by every module that puts something into it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet


class Forked(Protocol):
    """What a forked child inherits but must not use."""

    def in_child(self) -> None: ...


class Registry:
    def __init__(self) -> None:
        self.agent: Any = None
        """agent.Agent, once there is one"""
        self.notebook: Any = None
        """notebook.Notebook, while IPython's extension is loaded"""
        self.loads: Any = None
        """leaks.loads.Loads: loaded checkpoints, followed from the start of a launched process"""
        self.listeners: list[Callable[[Any], object]] = []
        """functions passed to `on_outlook`, perhaps before the agent began"""
        self.followers: WeakSet[Any] = WeakSet()
        """objects whose `drained` is called with all events (number, event), in the training thread"""
        self.finders: list[Any] = []
        """hooks.model_discovery.Finder"""
        self.trackers: list[Any] = []
        """allocator.cpu.StorageTracker"""
        self.lingering: list[Any] = []
        """allocator.peaks.Peaks that have stopped but still report peaks to the user; one at most"""
        self.clone_contexts: list[Any] = []
        """transport.spawn: the stacks on which a thread of a middle process runs, in process 1"""
        self.ignored_variables: set[str] = set()
        """GPUMON_* variables already reported as ignored"""
        self.stored_lines: WeakKeyDictionary[CodeType, dict[str, int | None]] = WeakKeyDictionary()
        """naming: code → the line that first assigns each variable"""
        self.source_files: dict[str, Any] = {}
        """source_lines: path → the lines of a file that was read"""
        self.source_texts: dict[Any, str | None] = {}
        """source_lines: place → its line as it is sent"""
        self.loop: Any = None
        """loop.Loop of the user's own loop, once it calls `progress` or `figures`"""
        self.debug_figures: Any = None
        """logged.Logged behind the page of torch's debug server"""
        self.recorders: WeakSet[Any] = WeakSet()
        self.transports: WeakSet[Any] = WeakSet()

    def in_child(self) -> None:
        """In a forked child: stops recording, then disables hooks and wrappers, then sending."""
        once = [each for each in (self.agent, self.loads) if each is not None]
        forked: list[Forked] = [*self.recorders, *once, *self.transports, *self.trackers]
        for each in forked:
            each.in_child()
        self.transports.clear()


REGISTRY = Registry()
os.register_at_fork(after_in_child=REGISTRY.in_child)
