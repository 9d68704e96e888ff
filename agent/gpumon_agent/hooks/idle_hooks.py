"""Times the hooks of a quiet step, which no durations show: every quiet step has them.

The same hooks are put on a model of our own, with a state machine of its own, and called between two steps of the
training: each time one of them, because one that runs right after another finds their common code in the caches, and
costs half. Their data are not those of the training's hooks, and what they evict from its caches is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as modules

from gpumon_agent.governor import Governor
from gpumon_agent.guard import Guard
from gpumon_agent.hooks.phases import Phases
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.hooks.torch_hooks import Hooks
from gpumon_agent.patching import around
from gpumon_agent.quiet_mark import IN_BACKWARD, QuietMark
from gpumon_agent.shape_model.outlook import Outlooks

_FAR = 1 << 62
_TORCH = str(Path(torch.__file__).parent) + os.sep


class _NoGraph:
    recomputes = False

    def forward_ends(self, output: object, model: object) -> None: ...

    def backward_begins(self, roots: Any) -> None: ...

    def backward_returns(self, gradients: Any) -> None: ...


class _OwnHooks(Hooks):
    """Hooks of a model that the training does not have: nothing of torch is replaced for them."""

    def _install(self) -> None: ...


class IdleHooks:
    def __init__(self, guard: Guard, outlooks: Outlooks, make_mark: Callable[[], QuietMark]) -> None:
        self._guard, self._outlooks, self._make_mark = guard, outlooks, make_mark
        self._made = False
        self._times: list[int] = []

    def _make(self) -> None:
        governor = Governor()
        phases = self._phases = Phases(
            Recorder(),
            governor,
            find_readers=tuple,
            read_ledger=lambda *_: None,
            step_closes=lambda _: None,
            step_closed=lambda *_: None,
            opened_ns=0,
            make_mark=self._make_mark,
        )
        hooks = _OwnHooks(
            phases,
            self._guard,
            governor,
            inputs=lambda *_: (0, ()),
            rooted=lambda _: None,
            entered=lambda _: None,
            graph=_NoGraph(),
            notice=lambda _: None,
            outlooks=self._outlooks,
        )
        self._bare, self._model, self._input = torch.nn.Identity(), torch.nn.Identity(), torch.empty(0, device="cpu")
        hooks.watch(self._model)
        root = hooks._roots[id(self._model)]
        root.entered = True
        root._pass_natively()
        mark = self._mark = phases.quiet_mark
        self._engine = around(lambda: None, self._not_idle, lambda *_: None, idle=mark.enters(IN_BACKWARD))
        self._begins, self._ends = hooks._step_hooks()
        phases.quiet = mark.idle = mark.evaluates = True
        mark.fit((self._input.shape,))
        mark.only = id(self._model)
        mark.left = mark.due_ns = _FAR

    def _not_idle(self, *_: object) -> None:
        raise RuntimeError("its hooks are not those of a quiet step")

    def timed(self) -> tuple[int, int] | None:
        """Times one part of them in each call. Every fourth call returns the ns of one forward with its backward, and
        of a step of the optimizer. None: not yet, or somebody would notice.
        """
        if modules._has_any_global_hook() or not all(
            map(_is_torchs, (Module.__init__, Module.__call__, Module._call_impl))
        ):
            return None
        if not self._made:
            self._make()
            self._made = True
        mark, model, times = self._mark, self._model, self._times
        mark.passed = 0  # a signal handler may have ended the last call
        mark.forget_times()
        part = len(times)
        began = monotonic_ns()
        if part == 0:
            self._bare(self._input)
        elif part == 1:
            model(self._input)
        elif part == 2:
            self._engine()
        else:
            self._begins(model, (), {})
            self._ends(model, (), {})
        took = monotonic_ns() - began
        if not mark.idle or mark.passed != (part == 1) or len(mark.times) != (part == 3):
            self._not_idle(model)
        times.append(took)
        if part < 3:
            return None
        bare, forward, engine, stepped = times
        times.clear()
        return forward - bare + engine, stepped


def _is_torchs(function: Any) -> bool:
    """Whether nobody but torch has replaced this method of Module: the first compiled function replaces `__init__`."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_TORCH)
