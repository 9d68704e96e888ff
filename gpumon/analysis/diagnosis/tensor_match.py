"""Whose size it is: the tensors of a model that a failed request can have been a copy of, and at which event.

Model. The request's size selects tensors; `already allocated` selects among the events of the optimizer's walk, of
loading, and of the first backward (gpumon.analysis.diagnosis.optimizer_step). An event *explains* the message if it has
at most `LEFT_MAX` bytes less allocated than the message says: inputs, workspaces and outputs may account for that much.
Gradients are allocated while activations live, so any difference is possible: they are named as possible only.
With batch and sequence, logits and attention scores are tried too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpumon.analysis.diagnosis.figures import Figure
from gpumon.analysis.diagnosis.message_parser import SEGMENT_STEP, Message
from gpumon.analysis.diagnosis.oom_report import Candidate
from gpumon.analysis.diagnosis.optimizer_events import Event
from gpumon.analysis.diagnosis.optimizer_step import FOREACH, LOOP, REACH, Recipe, gradients, loading, step
from gpumon.analysis.estimate.model import Tensor
from gpumon_agent import wire

LEFT_SHARE = 0.02
LEFT_LEAST = 96 << 20
"""What may stand beside the walk: inputs, outputs, workspaces; bytes, or a share of what is allocated."""

ACTIVATION = "activation"

SAME_SIZE_MAX = 4
"""Tensors of one size that are named before it says how many more there are."""


def explaining(
    message: Message,
    tensors: Sequence[Tensor],
    recipe: Recipe,
    way: str | None,
    phase: str | None = None,
    later: bool | None = None,
) -> list[Candidate]:
    """Events whose size and whose standing both agree with the message, best first.

    `later`: whether it was a step after the first; None: not known, and both are tried.
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


def _matching(message: Message, allocated: Figure, events: Iterable[Event], way: str | None) -> Iterator[Candidate]:
    most = max(LEFT_LEAST, round(LEFT_SHARE * allocated.middle))
    for event in events:
        if not message.may_be(event.bytes):
            continue
        left = Figure(allocated.low - event.stands, allocated.high - event.stands)
        if left.high >= -SEGMENT_STEP and left.low <= most:
            yield Candidate(
                event.tensor, event.what, event.phase, event.bytes, event.stands, left, way, True, event.later
            )


def same_size(message: Message, tensors: Sequence[Tensor]) -> list[Candidate]:
    """Tensors of the request's size: a copy of each would be as large, and its gradient is."""
    allocated = message.allocated
    backward = {event.tensor.name: event for event in gradients(tensors)}
    found = []
    for tensor in tensors:
        if not tensor.tied_to and message.may_be(tensor.bytes):
            event = backward.get(tensor.name)
            possible = event is not None and allocated is not None and event.stands <= allocated.high
            found.append(
                Candidate(
                    tensor,
                    "gradient" if possible else "a copy",
                    wire.BACKWARD if possible else None,
                    tensor.bytes,
                    event.stands if event else None,
                )
            )
    return found  # fmt: skip


def of_batch(
    message: Message, batch: int | None, sequence: int | None, vocabulary: int | None, heads: int | None
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
