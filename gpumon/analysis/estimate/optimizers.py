"""Bytes of an optimizer's state and temporaries, by closed form, for every optimizer of torch.optim.

Model. All figures are multiples of the bytes of the updated parameters: states have the parameters' type, and a foreach
step builds whole lists of temporaries. A step that goes parameter by parameter (foreach off) needs only `loop_tensors`
times the largest one; a fused step needs none.

Source. Derived from the step functions in torch/optim (2.15) and compared with the allocator's own figures for each
optimizer and setting (tests/analysis/test_optimizers.py, on the virtual GPU).
Cost. O(1).

Known limitations. Step counters on the device (`capturable`, `fused`, ASGD) take 512 B per tensor and are left out, as
the number of tensors is not described. ASGD's loop needs one tensor more once it averages. Adafactor's state (rows and
columns) depends on shapes and is measured. LBFGS's temporaries are in estimate.lbfgs. Sparse gradients are not
modelled.
"""

from __future__ import annotations

import msgspec

from gpumon_agent import wire

EIGHT_BIT_FROM, EIGHT_BIT_BLOCK = 4096, 256
"""bitsandbytes leaves smaller tensors in fp32, and keeps one fp32 scale per block of the others."""


class Needs(msgspec.Struct, frozen=True):
    """Multiples of parameter bytes. None: not known by closed form."""

    state: float | None
    foreach: float | None
    loop_tensors: float | None


class _Rule(msgspec.Struct, frozen=True):
    state: float | None
    foreach: float | None = None  # temporaries of a foreach step
    decay: float = 0  # more of them when weight decay is added to the gradients
    maximize: float = 0  # more of them when gradients are negated first
    loop: float | None = None  # temporaries of a loop, in tensors
    loop_decay: float = 0


_RULES = {
    "SGD": _Rule(0, 0, decay=1, maximize=1, loop=0, loop_decay=1),
    "Adam": _Rule(2, 1, loop=3, loop_decay=1),
    "AdamW": _Rule(2, 1, loop=3),
    "NAdam": _Rule(2, 1, decay=1, maximize=1, loop=3, loop_decay=1),
    "RAdam": _Rule(2, 1, loop=2, loop_decay=1),
    "Adamax": _Rule(2, 1, loop=1, loop_decay=1),
    "Adadelta": _Rule(2, 2, decay=1, maximize=1, loop=3, loop_decay=1),
    "Adagrad": _Rule(1, 2, loop=2, loop_decay=1),
    "ASGD": _Rule(1, 1, maximize=1, loop=1, loop_decay=1),
    "Rprop": _Rule(2, 1, loop=3),
    "RMSprop": _Rule(1, 1, decay=1, maximize=1, loop=2, loop_decay=1),
    "Muon": _Rule(1, loop=5.03),
    "SparseAdam": _Rule(2),
    "Adafactor": _Rule(None),
}


def needs(optimizer: wire.Optimizer) -> Needs:
    """The optimizer's state and temporaries, from its class and settings."""
    kind, settings = optimizer.kind, optimizer.settings
    if kind == "LBFGS":  # the flat gradient, the direction, and `history_size` of old directions and steps
        history = _number(settings.get("history_size"), 100)
        return Needs(2 + 2 * history, None, None)
    rule = _RULES.get(kind)
    if rule is None:
        return Needs(None, None, None)
    state = rule.state
    decayed = _on(settings, "weight_decay") and not _on(settings, "decoupled_weight_decay")
    if state is not None:
        if kind in ("Adam", "AdamW") and _on(settings, "amsgrad"):
            state += 1
        if kind == "RMSprop":
            state += _on(settings, "centered") + _on(settings, "momentum")
        if kind == "SGD" and _on(settings, "momentum"):
            state += 1
    foreach = rule.foreach
    if foreach is not None:
        foreach += max(rule.decay if decayed else 0, rule.maximize if _on(settings, "maximize") else 0)
    loop = rule.loop
    if loop is not None:
        loop += rule.loop_decay if decayed else 0
        loop += 1 if _on(settings, "maximize") else 0
        if kind == "SGD":  # the gradient is copied once, whatever changes it
            changed = decayed or _on(settings, "nesterov")
            loop = (2 if decayed and _on(settings, "nesterov") else 1) if changed else 0
            loop += 2 if _on(settings, "maximize") else 0
    return Needs(state, foreach, loop)


def eight_bit_states(count: int) -> tuple[int, ...]:
    """Bytes of bitsandbytes' Adam state for a parameter of `count` elements: both moments, then their scales."""
    if count < EIGHT_BIT_FROM:
        return 4 * count, 4 * count
    scales = 4 * -(-count // EIGHT_BIT_BLOCK)
    return count, count, scales, scales


def state_bytes(optimizer: wire.Optimizer) -> int | None:
    """Bytes of state after the first step; None without a formula for the class."""
    multiple = needs(optimizer).state
    return None if multiple is None else round(multiple * optimizer.parameter_bytes)


def temporary_bytes(optimizer: wire.Optimizer, largest_tensor: int | None = None) -> int | None:
    """Bytes of temporaries at a step's peak; None if unknown."""
    if optimizer.fused:
        return 0
    known = needs(optimizer)
    if optimizer.foreach:
        return None if known.foreach is None else round(known.foreach * optimizer.parameter_bytes)
    if optimizer.foreach is None or known.loop_tensors is None or largest_tensor is None:
        return None
    return round(known.loop_tensors * largest_tensor)


def _on(settings: dict[str, str], name: str) -> bool:
    """Whether a setting is neither false nor zero, in any of the parameter groups ("0 | 0.1")."""
    values = (value.strip().lower() for value in settings.get(name, "").split("|"))
    return any(value not in ("", "none", "false") and _number(value, 1) != 0 for value in values)


def _number(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        return float(text)
    except ValueError:
        return otherwise
