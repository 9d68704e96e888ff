"""The agent's model of coming batches against runs whose next peak is known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median

import pytest
from msgspec.structs import replace
from synthetic import GIB, MIB

from gpumon.analysis.forecast import Forecaster, Room
from gpumon.analysis.history import step_peaks
from gpumon.session.frame import StepRecord
from gpumon_agent import wire
from gpumon_agent.shape_model.max_affine import Plane, fitted, highest
from gpumon_agent.shape_model.model import ShapeModel
from gpumon_agent.shape_model.outlook import Outlooks, judged
from gpumon_agent.shape_model.periodicity import ABOVE_START, coming
from gpumon_agent.shape_model.residuals import LEAST_WIDTH, Residuals
from gpumon_agent.shape_model.shape_regression import AFTER, ShapeRegression
from gpumon_agent.shape_model.verdict import Fragments, verdict

WEIGHTS, STATE = 100 * MIB, 200 * MIB
SHAPES, BATCH, KIND = ((8, 64),), (512, 0, 8 * 64 * 64, 0, 0), (False, (2,))
Shape = tuple[int, ...]
Excess = Callable[[Shape], float]


def phases(step: int, start: int, forward: float, backward: float, **last: int) -> list[wire.Phase]:
    """One step of a model with AdamW: what stands, two peaks over it, and the optimizer's."""
    ends = (
        ("between", start, start),
        ("forward", start + round(forward), start + round(forward)),
        ("backward", start + WEIGHTS, start + round(backward)),
        ("optimizer", start + WEIGHTS, start + 2 * WEIGHTS),
        *((name, start, start + peak) for name, peak in last.items()),
    )
    return [
        wire.Phase(step, name, 0, 0, 0, 1, allocated, peak, 2 * GIB, 2 * GIB, allocated, 0, allocated, 9, 0, 0)
        for name, allocated, peak in ends
    ]


def errors(
    shapes: list[Shape], forward: Excess, backward: Excess, leak: int = 0, **last: int
) -> Iterator[tuple[float, bool]]:
    """Of each step: the share by which the outlook was off, and whether its interval held."""
    shape_model = ShapeModel()
    for step, shape in enumerate(shapes):
        start = WEIGHTS + (STATE if step else 0) + step * leak
        now = phases(step, start, forward(shape), backward(shape), **last)
        peak = max(phase.allocated_peak or 0 for phase in now)
        said = judged(shape_model, step, 0, 0, (shape,), 1, start, 0, None, Fragments(False))
        if said is not None:
            yield abs(said.next_peak / peak - 1), said.low <= peak <= said.high
        shape_model.learn(step, now, [(shape,)])


def linear(shape: Shape) -> float:
    return 2e5 * shape[0] * shape[1]


def squared(shape: Shape) -> float:
    """A weight for each pair of positions."""
    return 2e5 * shape[0] * shape[1] + 900.0 * shape[0] * shape[1] ** 2


def lengths(seed: int, steps: int = 200) -> list[Shape]:
    rng = random.Random(seed)
    return [(8, rng.randint(32, 900)) for _ in range(steps)]


def both(seed: int, steps: int = 200) -> list[Shape]:
    """As many words in each batch as fit a budget."""
    rng = random.Random(seed)
    return [(max(1, 8192 // length), length) for length in (rng.randint(32, 900) for _ in range(steps))]


@pytest.mark.parametrize("excess", [linear, squared])
@pytest.mark.parametrize("shapes", [lengths(1), lengths(2), both(3), both(4)])
def test_peaks_that_follow_the_shapes_are_known_to_two_percent_and_the_interval_holds(
    shapes: list[Shape], excess: Excess
) -> None:
    found = list(errors(shapes, excess, lambda shape: max(1.2 * excess(shape), WEIGHTS)))[20:]
    assert median(error for error, _ in found) < 0.005
    assert sorted(error for error, _ in found)[int(0.95 * len(found))] < 0.03
    assert sum(held for _, held in found) / len(found) >= 0.93


def test_a_batch_far_larger_than_any_before_is_foreseen_by_its_square() -> None:
    shapes = [*lengths(5, 60), (8, 3600)]
    *_, (error, _) = errors(shapes, squared, lambda shape: 1.2 * squared(shape))
    assert error < 0.1


def outlooks(lengths: list[int], *, short: int = 0) -> Iterator[wire.Outlook]:
    """What is said of each batch, whose peak is the forward's, where `short` bytes are missing for it."""
    shape_model = ShapeModel()
    for step, length in enumerate(lengths):
        start = WEIGHTS + (STATE if step else 0)
        needs = 8 * linear((8, length))
        room = start + round(needs) - short if short else None
        said = judged(shape_model, step, 0, 0, ((8, length),), 1, start, 0, room, Fragments(False))
        if said is not None:
            yield said
        shape_model.learn(step, phases(step, start, needs, needs / 2), [((8, length),)])


@pytest.mark.parametrize(
    "lengths",
    [
        [900, 900, 400, 1000, 500, 600, 700, 800, 850, 640, 333],
        [900, 900, 1000, 1100, 1200, 1300, 1400, 1500, 1600, 1700, 1800],
    ],
    ids=["new", "larger than any"],
)
def test_an_oom_is_ahead_for_sure_once_three_predictions_of_its_sort_came_true(lengths: list[int]) -> None:
    """The first may be wrong, and a user may stop a training for it. A batch that was seen before is known at once."""
    said = [each.verdict == wire.OOM_AHEAD for each in outlooks(lengths, short=8 * MIB)]
    assert said == [True, *[False] * 6, *[True] * 3]


@pytest.mark.parametrize(
    ("lengths", "inside", "outside"), [([900, 900, 910], 0.18, 0.3), (list(range(900, 1900, 100)), 0.04, 0.08)]
)
def test_of_a_batch_twice_as_large_the_half_beyond_is_a_tenth_uncertain_and_a_quarter_after_two_batches(
    lengths: list[int], inside: float, outside: float
) -> None:
    """The line may bend where no batch was: an interval that is too narrow would call what fits an OOM."""
    *_, said = outlooks([*lengths, 2 * lengths[-1]])
    needs = said.next_peak - WEIGHTS - STATE
    assert said.high - said.next_peak > inside * needs
    assert said.next_peak - said.low > inside * needs
    assert said.high - said.next_peak < outside * needs


def test_where_another_moment_makes_the_peak_the_line_bends_and_that_is_learnt() -> None:
    def bent(shape: Shape) -> float:
        return max(linear(shape), 600 * MIB + 0.3 * linear(shape))

    found = list(errors(lengths(9), bent, lambda shape: 1.2 * bent(shape)))[30:]
    assert sorted(error for error, _ in found)[int(0.9 * len(found))] < 0.004


@pytest.mark.parametrize("squares", [(0, 0, 0), (300, 300, 300), (0, 900, 400)])
def test_of_batches_with_two_lengths_the_higher_of_two_moments_is_foreseen_also_where_both_are_the_same(
    squares: tuple[int, int, int],
) -> None:
    """Also where attention keeps its weights: the encoder's, the decoder's, the one across."""

    def needs(source: int, target: int) -> float:
        kept = squares[0] * source * source + squares[1] * target * target + squares[2] * source * target
        return 8 * kept + max(16 * source + 40 * target, 4000 + 24 * source + 8 * target) * MIB / 16

    rng, shape_model, offs = random.Random(11), ShapeModel(), []
    for step in range(160):
        source = rng.randint(8, 512)
        target = source if step % 9 == 0 else round(source * rng.uniform(0.6, 1.4))
        shapes = ((8, source), (8, target))
        start = WEIGHTS + STATE
        now = phases(step, start, 0.6 * needs(source, target), needs(source, target))
        said = judged(shape_model, step, 0, 0, shapes, 1, start, 0, None, Fragments(False))
        if said is not None and step >= 30:
            offs.append(abs(said.next_peak / max(p.allocated_peak or 0 for p in now) - 1))
        shape_model.learn(step, now, [shapes])
    assert median(offs) < 0.002
    assert sorted(offs)[int(0.95 * len(offs))] < 0.1


@pytest.mark.parametrize(("plain", "square"), [(0, 3), (1, 4), (2, 5)])
def test_where_a_length_and_a_square_say_the_same_the_square_gets_an_eleventh(plain: int, square: int) -> None:
    """A few batches look like a square by chance, and a square is far off for the next, larger batch."""

    def only(*columns: int) -> Plane:
        a, b, c, d, e, f = (float(column in columns) for column in range(6))
        return a, b, c, d, e, f

    planes = fitted([(only(plain, square), 11e9)] * 12)
    assert highest(planes, only(square)) - highest(planes, only()) == pytest.approx(1e9, rel=0.01)


def test_what_peaks_after_the_inputs_were_given_back_does_not_follow_them() -> None:
    rng, shape_model, offs = random.Random(12), ShapeModel(), []
    for step in range(60):
        rows = rng.randint(100, 900)
        inputs, peak = -(-rows * 6144 // (2 * MIB)) * 2 * MIB, WEIGHTS + STATE + 900 * MIB
        now = phases(step, WEIGHTS + STATE + inputs, 50 * MIB, 60 * MIB)
        now[-1] = wire.Phase(step, "optimizer", 0, 0, 0, 1, WEIGHTS + STATE, peak, 2 * GIB, 2 * GIB, 0, 0, 0, 9, 0, 0)
        said = shape_model.peak((1536 * rows, 0, 0, 0, 0), (False, (2,)), WEIGHTS + STATE + inputs)
        offs += [] if said is None else [abs(said[0] - peak)]
        shape_model.learn(step, now, [((rows, 1536),)])
    assert max(offs[10:]) == 0


def test_a_peak_after_the_batches_that_mostly_is_the_same_is_expected_as_high_whatever_they_leave_behind() -> None:
    """Where an optimizer's temporaries peak, what its gradients were rounded by moves start and end, not the peak."""
    rng, shape_model, offs = random.Random(5), ShapeModel(), []
    for step in range(80):
        left = rng.randint(0, 8) * 3 * MIB
        start, peak = WEIGHTS + STATE + left, WEIGHTS + STATE + 900 * MIB + (left if step % 4 == 3 else 0)
        now = phases(step, start, 50 * MIB, 60 * MIB)
        now[-1] = wire.Phase(step, "optimizer", 0, 0, 0, 1, start, peak, 2 * GIB, 2 * GIB, 0, 0, 0, 9, 0, 0)
        said = shape_model.peak((512 * rng.randint(1, 99), 0, 0, 0, 0), (False, (2,)), start)
        offs += [] if said is None else [abs(said[0] - peak)]
        shape_model.learn(step, now, [((rng.randint(1, 99), 512),)])
    assert median(offs[10:]) == 0


def test_of_steps_read_at_their_end_only_the_outlook_knows_what_stands() -> None:
    """As the agent reads very short steps: one in 42 whole. What leaks meanwhile a batch finds all the same."""
    said: list[wire.Outlook] = []
    outlooks = Outlooks(lambda fields: said.append(wire.Outlook(*fields)), {})
    for step in range(210):
        start, whole = WEIGHTS + (STATE if step else 0) + step * MIB, step < 8 or step % 42 == 0
        now = phases(step, start, 300 * MIB, 360 * MIB)
        if not whole:
            now[:-1] = [replace(phase, allocated=None, allocated_peak=None) for phase in now[:-1]]
        outlooks.batch(step, 0, [(8, 512)], 1, [(0, start if whole else None, 0)])
        for event in (*now, wire.Step(step, 0, 1, 1, ((8, 512),), False, 4)):
            outlooks.follow(event)
        if step > 8:
            assert abs(said[-1].next_peak - (start + 360 * MIB)) <= MIB, step
            assert said[-1].step == step


@pytest.mark.parametrize("every", [2, 3, 10])
def test_where_few_steps_are_read_whole_a_batch_too_large_is_foreseen_and_the_interval_still_holds(every: int) -> None:
    """What a batch finds is then known but for the batch itself: predictions are off by that, and intervals say so."""
    said: list[wire.Outlook] = []
    outlooks, held, median_off = Outlooks(lambda fields: said.append(wire.Outlook(*fields)), {0: 16 * GIB}), [], []
    shapes = lengths(5, 300)
    for step, shape in enumerate(shapes):
        inputs = 16 * 1024 * shape[0] * shape[1]
        start, whole = WEIGHTS + (STATE if step else 0) + inputs, step < 8 or step % every == 0
        now = phases(step, start, squared(shape), squared(shape))
        peak = max(phase.allocated_peak or 0 for phase in now)
        now[-1] = replace(now[-1], allocated=now[-1].allocated - inputs)
        if not whole:
            now[:-1] = [replace(phase, allocated=None, allocated_peak=None) for phase in now[:-1]]
            now[-1] = replace(now[-1], allocated_peak=peak, flags=wire.BOUND)
        outlooks.batch(step, 0, [shape], 1, [(0, start if whole else None, 0)])
        if step > 20:
            held.append(said[-1].low <= peak <= said[-1].high)
            median_off.append(abs(said[-1].next_peak / peak - 1))
            assert said[-1].verdict != wire.OOM_AHEAD
        for event in (*now, wire.Step(step, 0, 1, 1, (shape,), False, 4)):
            outlooks.follow(event)
    assert sum(held) / len(held) > 0.93
    assert median(median_off) < 0.02
    outlooks.batch(len(shapes), 0, [(8, 3000)], 1, [(0, None, 0)])
    assert said[-1].verdict == wire.OOM_AHEAD


def test_when_everything_needs_twice_as_much_batches_of_any_length_are_soon_known_again() -> None:
    grown = [0]

    def excess(shape: Shape) -> float:
        grown[0] += 1
        return linear(shape) * (1 if grown[0] <= 100 else 2)

    shape_model, offs = ShapeModel(), []
    for step, shape in enumerate(lengths(10, 160)):
        needs = excess(shape)
        now = phases(step, WEIGHTS + STATE, needs, 1.2 * needs)
        said = judged(shape_model, step, 0, 0, (shape,), 1, WEIGHTS + STATE, 0, None, Fragments(False))
        if said is not None and step >= 125:
            offs.append(abs(said.next_peak / max(p.allocated_peak or 0 for p in now) - 1))
        shape_model.learn(step, now, [(shape,)])
    assert shape_model.changed == 1
    assert sorted(offs)[int(0.9 * len(offs))] < 0.01


@pytest.mark.parametrize("seed", range(5))
def test_the_first_batches_of_a_run_do_not_hide_that_a_layer_is_trained_later(seed: int) -> None:
    """The first forecasts are far off, with fewer batches than coefficients. The interval must not keep that."""
    shape_model, changed = ShapeModel(), None
    for step, shape in enumerate(lengths(seed, 60)):
        needs = 300 * MIB + linear(shape) * (1 if step < 50 else 1.4)
        shape_model.learn(step, phases(step, WEIGHTS + STATE, needs, 1.2 * needs), [(shape,)])
        if changed is None and shape_model.changed:
            changed = step
    assert changed in (51, 52, 53)


def test_a_new_batch_between_known_ones_is_known_to_the_byte_as_blocks_are_whole() -> None:
    def whole(shape: Shape) -> float:
        return 512 * (301 * shape[1] + 20_001)

    found = list(errors(lengths(12), whole, lambda shape: 3 * whole(shape)))[20:]
    assert sum(error == 0 for error, _ in found) > 0.9 * len(found)


def test_rounding_to_whole_blocks_is_no_square_of_an_image_s_edge() -> None:
    rng = random.Random(6)
    edges = [rng.randint(96, 128) for _ in range(60)]
    shapes: list[Shape] = [*((8, 3, edge, edge) for edge in edges), (8, 3, 1280, 1280)]

    def whole(shape: Shape) -> float:
        return -(-1000 * shape[0] * shape[1] * shape[2] * shape[3] // (4 * MIB)) * 4 * MIB

    *_, (error, _) = errors(shapes, whole, lambda shape: 1.2 * whole(shape))
    assert error < 0.05


def test_the_same_shapes_are_known_from_the_third_step_on_whatever_leaks() -> None:
    found = list(errors([(8, 512)] * 60, linear, lambda shape: 1.2 * linear(shape), leak=3 * MIB))
    assert max(error for error, _ in found[1:]) < 0.005
    assert all(held for _, held in found[1:])


def test_where_nearly_all_is_exact_the_interval_holds_the_rest_too_and_where_all_is_stays_as_narrow() -> None:
    rng, residuals, held = random.Random(2), Residuals(), []
    for step in range(2000):
        off = rng.uniform(-0.004, 0.004) if rng.random() < 0.06 else 0.0
        if off and step > 200:
            held.append(residuals.below <= off <= residuals.above)
        residuals.learn(off)
    assert len(held) > 80
    assert sum(held) / len(held) > 0.9
    assert residuals.above - residuals.below < 0.012
    exact = Residuals()
    for _ in range(200):
        exact.learn(0.0)
    exact.learn(0.3)  # an event, not how exact predictions are
    assert (exact.below, exact.above) == (-LEAST_WIDTH, LEAST_WIDTH)


def test_a_phase_that_comes_every_seventh_step_is_expected_then_and_only_then() -> None:
    shape_model, said = ShapeModel(), []
    for step in range(70):
        start = WEIGHTS + STATE
        more = {"checkpoint": 900 * MIB} if step % 7 == 3 else {}
        found = shape_model.peak((512, 0, 8 * 64 * 64, 0, 0), (False, (2,)), start)
        if step > 30 and found is not None:
            said.append((step, found[1] == "checkpoint"))
        shape_model.learn(step, phases(step, start, 50 * MIB, 60 * MIB, **more), [((8, 64),)])
    assert said
    assert all(expected == (step % 7 == 3) for step, expected in said)


def test_the_state_that_the_first_optimizer_step_made_is_not_expected_a_second_time() -> None:
    shape_model = ShapeModel()
    first = phases(0, WEIGHTS, 50 * MIB, 60 * MIB, state=WEIGHTS + STATE)
    shape_model.learn(0, first, [((8, 64),)])
    said = shape_model.peak((512, 0, 8 * 64 * 64, 0, 0), (False, (2,)), WEIGHTS + STATE)
    assert said is not None
    assert said[0] == WEIGHTS + STATE + 60 * MIB


def test_what_takes_turns_is_said_of_the_step_that_comes() -> None:
    shape_model, start = ShapeModel(), WEIGHTS + STATE
    for step in range(41):
        ends = {"second": (700 if step % 2 else 800) * MIB} | ({"saving": 900 * MIB} if step % 3 == 0 else {})
        said = shape_model.peak(BATCH, KIND, start)
        assert step < 12 or said == (start + max(ends.values()), "second" if step % 3 else "saving", AFTER)
        shape_model.learn(step, phases(step, start, 50 * MIB, 60 * MIB, **ends), [SHAPES])


@pytest.mark.parametrize(("every", "expected"), [(129, "checkpoint"), (130, "optimizer")])
def test_what_did_not_run_for_129_steps_is_not_expected_again(every: int, expected: str) -> None:
    """Names of phases may be ever new ones."""
    shape_model, start = ShapeModel(), WEIGHTS + STATE
    for step in range(3 * every + 9):
        more = {"checkpoint": 900 * MIB} if step % every == 9 else {}
        shape_model.learn(step, phases(step, start, 50 * MIB, 60 * MIB, **more), [SHAPES])
    said = shape_model.peak(BATCH, KIND, start)
    assert said is not None
    assert said[1] == expected


@pytest.mark.parametrize(("recent", "expected"), [((22, 24, 25, 27, 30), MIB), ((22, 25, 26, 30), None)])
def test_what_ran_in_half_of_the_newest_nine_steps_is_expected(recent: tuple[int, ...], expected: int | None) -> None:
    seen = deque((step, MIB, MIB, MIB) for step in (*range(22), *recent))
    assert coming(seen, 30, 31, ABOVE_START) == expected


def test_of_many_names_of_phases_32_are_known_and_of_many_kinds_of_batches_the_newest_16() -> None:
    shape_model, start = ShapeModel(), WEIGHTS + STATE
    named = {f"saved {at}": (900 + at) * MIB for at in range(40)}
    for step in range(3):
        shape_model.learn(step, phases(step, start, 50 * MIB, 60 * MIB, **named), [SHAPES])
    said = shape_model.peak(BATCH, KIND, start)
    assert said is not None
    assert said[1] == "saved 30"  # the optimizer is one of the 32
    for inputs in range(1, 18):
        shape_model.learn(2 + inputs, phases(2 + inputs, start, 50 * MIB, 60 * MIB), [SHAPES * inputs])
    known = [shape_model.peak(BATCH, (False, (2,) * inputs), start) for inputs in range(1, 18)]
    assert [each is not None for each in known] == [False] + [True] * 16


def test_another_regime_widens_the_interval_and_is_learnt_anew() -> None:
    shape_model = ShapeModel()
    widths, offs = [], []
    for step in range(100):
        start = WEIGHTS + STATE
        times = 1 if step < 50 else 3
        now = phases(step, start, times * 300 * MIB, times * 400 * MIB)
        said = judged(shape_model, step, 0, 0, ((8, 64),), 1, start, 0, None, Fragments(False))
        if said is not None:
            widths.append(said.high - said.low)
            offs.append(abs(said.next_peak / (start + times * 400 * MIB) - 1))
        shape_model.learn(step, now, [((8, 64),)])
    assert shape_model.changed == 1
    assert max(widths[49:54]) > 50 * widths[45]
    assert widths[-1] < 0.01 * (WEIGHTS + STATE + 1200 * MIB)
    assert max(offs[54:]) < 0.001


def test_nothing_is_warned_of_where_nobody_told_what_the_device_has_unless_no_device_has_it() -> None:
    assert verdict(9 * GIB, 8 * GIB, 10 * GIB, True, None, None, None) == (wire.FITS, None)
    assert verdict(9 * GIB, 8 * GIB, 10 * GIB, True, None, 7 * GIB, None) == (wire.OOM_AHEAD, -2 * GIB)
    assert verdict(9 * GIB, 6 * GIB, 10 * GIB, True, None, 7 * GIB, None) == (wire.FITS, None)
    assert verdict(9 * GIB, 6 * GIB, 10 * GIB, True, 8 * GIB, None, None)[0] == wire.OOM_AHEAD
    assert verdict(9 * GIB, 6 * GIB, 10 * GIB, False, 8 * GIB, None, None)[0] == wire.TIGHT  # too little is known
    fragments = Fragments(False)
    fragments.fitted = 9 * GIB
    assert verdict(9 * GIB, 8 * GIB + 1, 10 * GIB, True, 8 * GIB, None, fragments)[0] == wire.TIGHT  # as high as before


def test_what_the_allocator_cannot_use_is_what_it_held_beside_a_peak_after_it_gave_its_cache_back() -> None:
    def step(reserved: int, split: int, retries: int) -> list[wire.Phase]:
        return [
            wire.Phase(1, "backward", 0, 0, 0, 1, 474 * MIB, 517 * MIB, reserved, reserved, 0, split, 0, 9, retries, 0)
        ]

    fragments = Fragments(False)
    fragments.learn(step(552 * MIB, 12 * MIB, 0))
    assert fragments.bytes == 12 * MIB
    assert verdict(9 * GIB, 8 * GIB, 10 * GIB, True, None, None, fragments) == (wire.FITS, None)
    for _ in range(9):
        fragments.learn(step(552 * MIB, 12 * MIB, 1))
    assert fragments.bytes == 35 * MIB
    # nobody told how much there is, but it was all taken just now
    assert verdict(9 * GIB, 8 * GIB, 10 * GIB, True, None, None, fragments) == (wire.TIGHT, None)
    fragments.expandable = True
    assert fragments.bytes == 0


def test_memory_does_not_grow_with_the_run() -> None:
    """Containers hold no more after ten times the steps: many lengths, ever new names of phases, a leak."""
    outlooks, forecaster = Outlooks(lambda event: None, {}), Forecaster()
    rng, sizes = random.Random(7), {}
    for step in range(3001):
        start = WEIGHTS + step * 4096
        shape = (8, 40 * rng.randint(1, 200))
        outlooks.batch(step, 0, [shape], 1, [(0, start, 0)])
        now = phases(
            step, start, linear(shape), 1.2 * linear(shape), **({f"saved {step}": MIB} if step % 9 == 0 else {})
        )
        closed = wire.Step(step, 0, 1, 1, (shape,), False, len(now))
        for event in (*now, closed):
            outlooks.follow(event)
        record = StepRecord(step, closed, tuple(now))
        figures = step_peaks(record, 0)
        assert figures is not None
        forecaster.observe(figures._replace(reserved_peak=2 * GIB + step * 4 * MIB), record.phases)
        forecaster.forecast(Room(40 * GIB))
        if step in (300, 3000):
            sizes[step] = held(outlooks) + held(forecaster)
    assert sizes[3000] <= 1.15 * sizes[300]  # what is kept of the newest 200 steps is not full yet


def held(thing: object) -> int:
    """How many values its containers hold, and theirs."""
    if isinstance(thing, dict):
        return len(thing) + sum(held(each) for each in thing.values())
    if isinstance(thing, (list, tuple, deque)):
        return len(thing) + sum(held(each) for each in thing)
    names = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())} | set(vars_of(thing))
    return sum(held(getattr(thing, name)) for name in names if hasattr(thing, name)) if names else 0


def vars_of(thing: object) -> dict[str, object]:
    return getattr(thing, "__dict__", {}) if type(thing).__module__.startswith("gpumon") else {}


def test_between_two_batches_counts_what_those_need_now_whatever_was_dropped_before() -> None:
    needs, rng = ShapeRegression(), random.Random(3)
    for turn in range(3):
        for at in rng.sample(range(1, 101), 100):  # more than are kept
            needs.learn((100 * at, 0, 0, 0, 0), (turn + 1) * MIB * at)
    assert needs.at((4_050, 0, 0, 0, 0)) == pytest.approx(3 * 40.5 * MIB, rel=0.01)
    for _ in range(3):  # two of them need more from now on
        for at in (40, 41):
            needs.learn((100 * at, 0, 0, 0, 0), 200 * MIB)
    assert needs.at((4_050, 0, 0, 0, 0)) == pytest.approx(200 * MIB)

    two = ShapeRegression()  # as many elements of the first input, and others of the second
    for further, excess in ((100, MIB), (300, 3 * MIB)):
        two.learn((1_000, further, 0, 0, 0), excess)
    assert MIB <= two.at((1_000, 200, 0, 0, 0)) <= 3 * MIB
