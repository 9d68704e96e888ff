"""Finds the tensor behind a failed request, and the allocation event.

Model. The request's size selects tensors. `already allocated` selects among the events of the optimizer step and of
loading (gpumon.analysis.diagnosis.optimizer_step). An event *explains* the message if the message's figure exceeds the
computed one by at most `LEFT_LEAST` bytes or `LEFT_SHARE` of it: inputs, workspaces and outputs may take that much.
Gradients are allocated beside activations of unknown size, so they are only reported as possible. With batch and
sequence, logits and attention scores are tried too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpumon.analysis.diagnosis.figures import Figure
from gpumon.analysis.diagnosis.message_parser import OomMessage
from gpumon.analysis.diagnosis.oom_report import Candidate
from gpumon.analysis.diagnosis.optimizer_events import Event
from gpumon.analysis.diagnosis.optimizer_step import FOREACH, LOOP, REACH, Recipe, gradients, loading, step
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.estimate.simulator import ROUND_SEGMENT
from gpumon_agent import wire

LEFT_SHARE = 0.02
LEFT_LEAST = 96 << 20
"""Bytes, or a share of allocated, that may exist beside the computed ones: inputs, outputs, workspaces."""

ACTIVATION = "activation"

SAME_SIZE_MAX = 4
"""Tensors of one size that are listed by name; the rest are counted."""


def explaining(
    message: OomMessage,
    tensors: Sequence[Tensor],
    recipe: Recipe,
    way: str | None,
    phase: str | None = None,
    later: bool | None = None,
) -> list[Candidate]:
    """Events whose size and allocated bytes both match the message, best first.

    `later`: whether it was a step after the first; None: unknown, both are tried.
    """
    allocated = message.allocated
    if allocated is None or not tensors:
        return []
    found: list[Candidate] = []
    if phase in (None, wire.OPTIMIZER):
        for each in (way,) if way else recipe.ways:
            for after in (False, True) if later is None else (later,):
                found += _matching(message, allocated, step(tensors, recipe, each, later=after), each)
    if phase in (None, wire.LOAD):
        found += _matching(message, allocated, loading(tensors), None)
    found.sort(
        key=lambda s: (
            abs(s.left.middle) if s.left else 0,
            s.later,
            (REACH, LOOP, FOREACH).index(s.way) if s.way in (REACH, LOOP, FOREACH) else 3,
        )
    )
    return found


def _matching(message: OomMessage, allocated: Figure, events: Iterable[Event], way: str | None) -> Iterator[Candidate]:
    most = max(LEFT_LEAST, round(LEFT_SHARE * allocated.middle))
    for event in events:
        if not message.may_be(event.bytes):
            continue
        left = Figure(allocated.low - event.allocated_before, allocated.high - event.allocated_before)
        if left.high >= -ROUND_SEGMENT and left.low <= most:
            yield Candidate(
                event.tensor, event.what, event.phase, event.bytes, event.allocated_before, left, way, True, event.later
            )


def same_size(message: OomMessage, tensors: Sequence[Tensor]) -> list[Candidate]:
    """Tensors of the request's size: it may be a copy of one, or its gradient."""
    allocated = message.allocated
    backward = {event.tensor.name: event for event in gradients(tensors)}
    found = []
    for tensor in tensors:
        if not tensor.tied_to and message.may_be(tensor.bytes):
            event = backward.get(tensor.name)
            possible = event is not None and allocated is not None and event.allocated_before <= allocated.high
            found.append(
                Candidate(
                    tensor,
                    "gradient" if possible else "a copy",
                    wire.BACKWARD if possible else None,
                    tensor.bytes,
                    event.allocated_before if event else None,
                )
            )
    return found  # fmt: skip


def of_batch(
    message: OomMessage, batch: int | None, sequence: int | None, vocabulary: int | None, heads: int | None
) -> list[Candidate]:
    """Logits and attention scores of one batch, in fp32 and in 16 bits."""
    if batch is None or sequence is None:
        return []
    shapes: list[tuple[str, tuple[int, ...]]] = []
    if vocabulary is not None:
        shapes.append(("logits", (batch, sequence, vocabulary)))
        shapes.append(("logits without the last token", (batch, max(1, sequence - 1), vocabulary)))
    if heads is not None:
        shapes.append(("attention scores", (batch, heads, sequence, sequence)))
    found = []
    for name, shape in shapes:
        for width in (4, 2):
            tensor = Tensor(name, shape, width)
            if message.may_be(tensor.bytes):
                found.append(Candidate(tensor, ACTIVATION, None, tensor.bytes, explains=True))
    return found
