"""What an estimate can be made of without torch: a config.json, a set of shapes, or a number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpumon.analysis.estimate import families
from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.model import Model
from gpumon.analysis.estimate.plan import Played, Subject, tensors_only
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

    def play(self, work: Workload, room: int | None) -> Played:
        tape = families.record(self.config, work)
        model = families.model_of(self.config, tape)
        kept = sum(value.bytes for value in tape.kept_keys) if work.inference else 0
        phases = tensors_only(model, work, tape, room)
        return Played(model, phases, "closed form", tape.has_tokens, bool(tape.tables), kv_cache=kept)

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

    def play(self, work: Workload, room: int | None) -> Played:
        model = self.model.in_width(work.precision.weights)
        return Played(model, tensors_only(model, work, None, room), None)

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        yield from ()
