"""The agent's own model of coming batches, fed from a session: what it would have said, and why.

Model and sources: gpumon_agent.shape_model.model and gpumon_agent.shape_model.shape_regression.
Cost. `observe`: theirs, and a pass over a step's phases. A viewer needs the model only where somebody asks: it has
the steps' fragments learnt (`note`: a pass over the phases of the newest), and the model from the frame's steps when it
is asked (`catch_up`).
Known limitations. A step's shapes come without their micro-batches: they are shared out evenly over its forwards, which
is wrong where one step runs models with different numbers of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.session.frame import StepRecord
from gpumon_agent import wire
from gpumon_agent.shape_model.model import ShapeModel
from gpumon_agent.shape_model.outlook import judged
from gpumon_agent.shape_model.verdict import Fragments

Shape = tuple[int, ...]

SLACK_STEPS = 16
"""As many as `Fragments` keeps: what lay idle in older ones has no say."""


class Foreseen:
    """One device of one rank."""

    def __init__(self) -> None:
        self.shape_model = ShapeModel()
        self.fragments = Fragments(False)
        self._learnt: int | None = None  # the newest step that `catch_up` has seen
        self._retries: int | None = None  # of the newest step that was noted

    @property
    def changes(self) -> int:
        return self.shape_model.changed

    def observe(self, record: StepRecord, device: int) -> bool:
        """Learns a closed step; False where it cannot be read."""
        if record.closed is None or not record.whole:
            return False
        here = record.on(device)
        groups = shared_out(record.closed.input_shapes, here)
        if not groups or not self.shape_model.learn(record.step, here, groups):
            return False
        self.fragments.learn(here)
        return True

    def note(self, steps: Sequence[tuple[StepRecord, tuple[wire.Phase, ...]]], ran: Sequence[bool]) -> None:
        """Learns of closed steps, each with its phases on the device, only what the allocator could not use.

        `ran`: a forward did, with what stood before it known, as the model asks.
        """
        read = [
            here
            for (record, here), forward in zip(steps, ran, strict=True)
            if forward and record.closed is not None and record.whole and record.closed.input_shapes
        ]
        if not read:
            return
        known, self._retries = self._retries, read[-1][-1].retries
        if self._retries == known and not self.fragments.refused:  # else when the device refused counts too
            del read[:-SLACK_STEPS]
        for here in read:
            self.fragments.learn(here)

    def catch_up(self, steps: Sequence[StepRecord], device: int) -> Foreseen:
        """Has the model learn those of the steps, oldest first, that it has not seen."""
        known = self._learnt
        for record in steps:
            if (known is None or record.step > known) and record.closed is not None and record.whole:
                here = record.on(device)
                groups = shared_out(record.closed.input_shapes, here)
                if groups:
                    self.shape_model.learn(record.step, here, groups)
        if steps:
            self._learnt = steps[-1].step
        return self

    def outlook(self, record: StepRecord, device: int, room: int | None) -> wire.Outlook | None:
        """What would have been said as the step's first batch came."""
        closed = record.closed
        if closed is None:
            return None
        here = record.on(device)
        groups = shared_out(closed.input_shapes, here)
        stood: int | None = None
        so_far = 0
        for phase in here:
            if phase.phase == wire.FORWARD:
                break
            stood = phase.allocated
            if phase.phase != wire.LOAD:
                so_far = max(so_far, phase.allocated_peak or 0)
        if not groups or stood is None:
            return None
        t_ns = closed.t_ns - closed.duration_ns
        return judged(
            self.shape_model, closed.step, device, t_ns, groups[0], closed.input_bytes, stood, so_far, room,
            self.fragments,
        )  # fmt: skip


def shared_out(shapes: Sequence[Shape], phases: Sequence[wire.Phase]) -> list[Sequence[Shape]]:
    """The step's shapes, forward by forward."""
    forwards = sum(phase.phase == wire.FORWARD for phase in phases)
    if not forwards or not shapes:
        return []
    each, rest = divmod(len(shapes), forwards)
    if not each or rest:
        return [shapes] * forwards
    return [shapes[at * each : (at + 1) * each] for at in range(forwards)]
