"""What an estimate can be made of without torch: a config.json, a set of shapes, or a number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumon.analysis.estimate import families
from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.model import Model
from gpumon.analysis.estimate.plan import Subject
from gpumon.analysis.estimate.tape import Tape
from gpumon.analysis.estimate.workload import Workload

VOCABULARY = 32_000
"""What a smaller vocabulary is computed with, if the model's is more than this: that of Llama 2's tokenizer."""


@dataclass(frozen=True, slots=True)
class FromConfig:
    """A known transformer."""

    config: Config

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def longest(self) -> int | None:
        return families.longest(self.config)

    @property
    def vocabulary(self) -> int | None:
        value = self.config.get("vocab_size")
        return value if isinstance(value, int) else None

    def prepare(self, work: Workload) -> tuple[Model, Tape | None]:
        tape = families.record(self.config, work)
        return families.model_of(self.config, tape), tape

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        vocabulary = self.vocabulary
        if vocabulary is not None and vocabulary > VOCABULARY:
            title = f"a vocabulary of {VOCABULARY:,} instead of {vocabulary:,}"
            yield "vocabulary", title, FromConfig(self.config.having(vocab_size=VOCABULARY))
        tied = FromConfig(self.config.having(tie_word_embeddings=True))
        if families.describe(tied.config).count < families.describe(self.config).count:
            yield "tied-embedding", "the head tied to the embedding", tied


@dataclass(frozen=True, slots=True)
class FromTensors:
    """Tensors alone: no forward is known."""

    model: Model

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def longest(self) -> int | None:
        return None

    def prepare(self, work: Workload) -> tuple[Model, Tape | None]:
        return self.model.in_width(work.precision.weights), None

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        yield from ()
