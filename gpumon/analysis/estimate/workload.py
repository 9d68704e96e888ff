"""The workload of a model (batch, length, precision, optimizer, ranks), and its parser for user input."""

from __future__ import annotations

import difflib

import msgspec

from gpumon.analysis.estimate.kernels import Hardware
from gpumon_agent import wire

HALF, FLOAT = 2, 4  # bytes


class Precision(msgspec.Struct, frozen=True):
    """Bytes per parameter by purpose, and the precision of products."""

    name: str
    weights: int
    gradients: int
    master: int  # an fp32 copy that the optimizer updates instead
    state: int  # bytes an element of optimizer state
    autocast: bool = False
    says: str = ""


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", FLOAT, FLOAT, 0, FLOAT, says="everything in fp32"),
        Precision("bf16-autocast", FLOAT, FLOAT, 0, FLOAT, True, "fp32 weights, products in bf16 on casts of them"),
        Precision("fp16-autocast", FLOAT, FLOAT, 0, FLOAT, True, "fp32 weights, products in fp16 on casts of them"),
        Precision("bf16", HALF, HALF, 0, HALF, says="everything in bf16, the optimizer's state too"),
        Precision("fp16", HALF, HALF, 0, HALF, says="everything in fp16, the optimizer's state too"),
        Precision("bf16-master", HALF, HALF, FLOAT, FLOAT, says="bf16 weights and gradients, fp32 master and state"),
        Precision("fp16-master", HALF, HALF, FLOAT, FLOAT, says="fp16 weights and gradients, fp32 master and state"),
    )
}
"""Keyed by `--precision`. "master" is as in DeepSpeed and Megatron: 2 + 2 + 12 bytes per parameter with Adam (ZeRO,
arXiv 1910.02054, section 3.1); autocast is 4 + 2 (the casts) + 4 + 8 = 18."""

_CLASSES = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "Rprop", "RMSprop", "Muon",
    "SparseAdam", "Adafactor", "LBFGS",
)  # fmt: skip
OPTIMIZERS = {kind.lower(): kind for kind in _CLASSES}
EIGHT_BIT = {"adam8bit": "Adam", "adamw8bit": "AdamW"}
NONE = "none"
FORMS = ("foreach", "fused", "loop")
FUSED = ("sgd", "adam", "adamw", "adagrad")
NO_FOREACH = ("muon", "sparseadam", "lbfgs")


class Unknown(ValueError):
    """An unknown name; the text lists the known ones."""


_COUNTS = ("history_size", "max_iter", "max_eval")
_WORDS = ("adjust_lr_fn", "line_search_fn")
_SETTINGS = (
    *_COUNTS, *_WORDS, "alpha", "amsgrad", "beta2_decay", "capturable", "centered", "d", "dampening",
    "decoupled_weight_decay", "differentiable", "eps", "initial_accumulator_value", "lambd", "lr", "lr_decay",
    "maximize", "momentum", "momentum_decay", "nesterov", "ns_steps", "rho", "t0", "tolerance_change",
    "tolerance_grad", "weight_decay",
)  # fmt: skip
"""Settings of torch.optim's classes with single values; `foreach` and `fused` are forms."""


def _setting(key: str, value: str) -> tuple[str, str]:
    """Raises Unknown: a misspelt setting would otherwise be ignored silently."""
    if key not in _SETTINGS:
        near = difflib.get_close_matches(key, _SETTINGS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(_SETTINGS))}"
        raise Unknown(f"no optimizer has a setting {key!r}: {hint}")
    if key in _COUNTS and not (value.isdecimal() and int(value)):
        raise Unknown(f"{key} is a whole number above 0, not {value!r}")
    if key not in _WORDS and value.lower() not in ("true", "false", "none"):
        try:
            float(value)
        except ValueError:
            raise Unknown(f"{key} is a number, or true or false, not {value!r}") from None
    return key, value


class OptimizerChoice(msgspec.Struct, frozen=True):
    """An optimizer by torch's name in lower case. `form`: foreach (torch's default on a GPU), fused or loop."""

    name: str = "adamw"
    form: str = "foreach"
    settings: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> OptimizerChoice:
        """From "adamw", "adamw:fused", "sgd,momentum=0.9", "adamw8bit", "none". Raises Unknown."""
        head, *settings = text.strip().split(",")
        name, _, form = head.partition(":")
        name = name.strip().lower()
        if name not in (*OPTIMIZERS, *EIGHT_BIT, NONE):
            near = difflib.get_close_matches(name, (*OPTIMIZERS, *EIGHT_BIT), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join((*OPTIMIZERS, *EIGHT_BIT, NONE))}"
            raise Unknown(f"no optimizer is called {name!r}: {hint}")
        default = "loop" if name in (*NO_FOREACH, *EIGHT_BIT) else "foreach"
        form = form.strip().lower() or default
        if form not in FORMS:
            raise Unknown(f"{form!r} is no way an optimizer steps: write {name}:foreach, {name}:fused or {name}:loop")
        if form == "fused" and name not in FUSED:
            raise Unknown(f"torch has no fused {name}: fused are {', '.join(FUSED)}")
        if form == "foreach" and default == "loop":
            raise Unknown(f"{name} has no foreach form: write {name}")
        pairs = []
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals or not key.strip() or not value.strip():
                raise Unknown(f"{setting!r} is not a setting: write {name},momentum=0.9")
            pairs.append(_setting(key.strip(), value.strip()))
        return cls(name, form, tuple(pairs))

    @property
    def says(self) -> str:
        return self.name if self.form == "loop" or self.name == NONE else f"{self.name} ({self.form})"

    @property
    def eight_bit(self) -> bool:
        return self.name in EIGHT_BIT

    def described(self, count: int, size: int) -> wire.Optimizer:
        """As an agent describes it, for `count` parameters of `size` bytes."""
        kind = OPTIMIZERS.get(self.name) or EIGHT_BIT[self.name]
        defaults = {"weight_decay": "0.01"} if kind == "AdamW" else {}
        settings = {**defaults, **dict(self.settings)}
        foreach, fused = self.form == "foreach", self.form == "fused"
        return wire.Optimizer(kind, count, size, None, foreach, fused, settings)


class Workload(msgspec.Struct, frozen=True):
    """What one rank does in an iteration.

    `batch`: samples of one forward; `accumulation`: forwards per optimizer step. `zero`: 0 is DDP (or one rank), 1 to 3
    are ZeRO's stages; 3 is FSDP. `flat`: FSDP1, with a unit's parameters in one tensor. `kv_cache`: tokens whose keys
    and values are kept.
    """

    batch: int = 1
    sequence: int = 512
    precision: Precision = msgspec.field(default_factory=lambda: PRECISIONS["fp32"])
    optimizer: OptimizerChoice = msgspec.field(default_factory=OptimizerChoice)
    world_size: int = 1
    zero: int = 0
    accumulation: int = 1
    checkpointing: bool = False
    bucket_views: bool = False
    set_to_none: bool = True
    inference: bool = False
    kv_cache: int = 0
    attention: str = "sdpa"
    embedding_on_cpu: bool = False
    hardware: Hardware = msgspec.field(default_factory=Hardware)
    flat: bool = False

    @property
    def shards(self) -> int:
        return self.world_size if self.zero else 1
