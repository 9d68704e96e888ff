"""Estimates a Hugging Face config.json: transformers builds the model on the meta device.

Model. The class named in the config's `architectures`, built as by `AutoModel….from_config`. Without a name: a decoder
with its head, for other types the base model. It is traced (estimate.traced) with the inputs of its `forward`: tokens
or images, and labels in training. With a KV cache, the prompt runs as in `generate()`. No weights are read, nothing is
downloaded, and code that a config points to is not run.

Cost. Importing transformers, 2 to 4 s; building the model, 0.1 s; then a trace for each workload.

Known limitations. Models of speech, video or several kinds of inputs are refused: give their code with `--model`.
Attention masks are not passed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from gpumon.analysis.estimate.from_module import FromModule, on_meta, traceable
from gpumon.analysis.estimate.model import NotAModel
from gpumon.analysis.estimate.plan import Played
from gpumon.analysis.estimate.reading import OutOfBounds, check_config, read_object
from gpumon.analysis.estimate.simulator import OutOfMemory
from gpumon.analysis.estimate.workload import HALF, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gpumon.analysis.estimate.plan import Subject

VOCABULARY = 32_000
"""The reduced vocabulary of the remedy, if the model's is larger: that of Llama 2's tokenizer."""

_OTHERWISE = "give its code (--model pkg.module:factory --input …) or its size (--parameters COUNT)"


def load(path: Path | str) -> FromConfig:
    """From a config.json or its folder. Raises NotAModel if transformers cannot build it."""
    place = Path(path)
    if place.is_dir():
        place /= "config.json"
    content = read_object(place)
    check_config(content, place)
    return of(content, str(place))


def of(content: Mapping[str, Any], where: str = "config.json") -> FromConfig:
    """Raises NotAModel if transformers cannot build it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config can ask for weights of its backbone
    import transformers

    transformers.logging.set_verbosity_error()
    kind = content.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise NotAModel(f"{where} has no model_type: {_OTHERWISE}")
    if kind not in transformers.CONFIG_MAPPING:
        raise NotAModel(
            f"model_type {kind!r} is not one that transformers {transformers.__version__} knows: {_OTHERWISE}"
        )
    named = content.get("architectures") or [""]
    name = named[0] if isinstance(named, list) else ""
    made = getattr(transformers, str(name), None) if name else None
    if name and not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        raise NotAModel(f"transformers {transformers.__version__} has no model {name!r}: {_OTHERWISE}")
    settings = {key: value for key, value in content.items() if key not in ("model_type", "auto_map")}

    def build(attention: str = "sdpa") -> nn.Module:
        config = transformers.AutoConfig.for_model(kind, **settings)
        config.dtype = None  # set by --precision
        builder = made._from_config if made is not None else _unnamed(type(config)).from_config
        module: nn.Module = builder(config, attn_implementation=attention)
        return module

    try:
        module = on_meta(build)
    except Exception as reason:  # noqa: BLE001 - transformers may raise anything for an invalid value
        reason_text = " ".join(str(reason).split())[:200]
        if "overflow" in reason_text:
            raise OutOfBounds(f"{where}: a tensor would have more than 8 EiB; correct the sizes in the file") from None
        raise NotAModel(
            f"{where}: transformers cannot build this model: {type(reason).__name__}: {reason_text}"
        ) from None
    return FromConfig(module, build, content=content, where=where)


def _unnamed(kind: type) -> Any:
    """The class to train if the config names none: a decoder with its head, else the base model."""
    import transformers

    encoder = kind in transformers.MODEL_FOR_MASKED_LM_MAPPING
    both = getattr(kind(), "is_encoder_decoder", False)  # Whisper: its decoder is not trained alone
    decoder = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not encoder and not both
    return transformers.AutoModelForCausalLM if decoder else transformers.AutoModel


class FromConfig(FromModule, kw_only=True):
    content: Mapping[str, Any]
    where: str
    _kept: dict[Workload, int] = msgspec.field(default_factory=dict)  # bytes of keys and values

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def longest(self) -> int | None:
        if self._takes != "input_ids":
            return None
        most = getattr(self.config, "max_position_embeddings", None)
        if not isinstance(most, int) or most < 1:  # no limit of positions, as in T5
            return None
        return most

    @property
    def vocabulary(self) -> int | None:
        size = getattr(self.config, "vocab_size", None)
        return size if isinstance(size, int) else None

    @property
    def heads(self) -> int | None:
        heads = getattr(self.config, "num_attention_heads", None)
        return heads if isinstance(heads, int) else None

    @property
    def has_forward(self) -> bool:
        return True

    @property
    def _takes(self) -> str:
        return str(self.module.main_input_name)

    def instance(self, work: Workload) -> nn.Module:
        module = self.factory(work.attention)  # type: ignore[call-arg]
        if work.embedding_on_cpu:
            module.set_input_embeddings(_embedding_on_host(self._table, _numbers(work)))
        if work.kv_cache:
            module.register_forward_hook(lambda _, __, output: self._kept.update({work: _bytes_kept(output)}))
        return module

    @property
    def _table(self) -> nn.Embedding | None:
        """The embedding of the inputs, unless the head shares its weights."""
        from torch import nn

        table = self.module.get_input_embeddings()
        if not isinstance(table, nn.Embedding):
            return None
        uses = sum(each is table.weight for _, each in self.module.named_parameters(remove_duplicate=False))
        return table if uses == 1 else None

    def given(self, work: Workload) -> dict[str, Any]:
        import torch

        parameters = inspect.signature(self.module.forward).parameters
        name, config = type(self.module).__name__, self.config
        tokens = (work.batch, work.kv_cache or work.sequence)
        given: dict[str, Any] = {}

        def numbers(*shape: int) -> Any:
            return torch.zeros(shape, dtype=torch.int64, device="meta")

        if self._takes == "input_ids":
            given["input_ids"] = numbers(*tokens)
        elif self._takes == "pixel_values":
            sides = config.image_size if isinstance(config.image_size, (list, tuple)) else [config.image_size] * 2
            shape = work.batch, config.num_channels, *sides
            given["pixel_values"] = torch.empty(shape, dtype=_numbers(work), device="meta")
        else:
            raise NotAModel(f"{name} takes {self._takes}, not tokens or images: {_OTHERWISE}")
        one = "SequenceClassification" in name or "ImageClassification" in name
        if "labels" in parameters and not work.inference:
            given["labels"] = numbers(work.batch) if one else numbers(*tokens)
            if one and config.num_labels == 1:
                given["labels"] = given["labels"].float()
        elif config.is_encoder_decoder:
            given["decoder_input_ids"] = numbers(*tokens)
        if not work.inference:
            return given | {
                key: numbers(work.batch) for key in ("start_positions", "end_positions") if key in parameters
            }
        if "use_cache" in parameters:
            given["use_cache"] = work.kv_cache > 0
        if work.kv_cache and "logits_to_keep" in parameters:
            given["logits_to_keep"] = 1  # as in generate()'s pass over the prompt
        return given

    def play(self, work: Workload) -> Played:
        """Raises NotAModel if its forward does not run with these inputs."""
        try:
            played = super().play(work)
        except (NotAModel, OutOfMemory):
            raise
        except Exception as reason:  # noqa: BLE001 - the forward may raise anything if it needs other inputs
            reason_text = " ".join(str(reason).split())[:200]
            raise NotAModel(
                f"{self.name} does not run so ({type(reason).__name__}: {reason_text}): {_OTHERWISE}"
            ) from None
        return replace(
            played,
            has_tokens=self._takes == "input_ids",
            tables=self._table is not None,
            layers=bool(self.module.supports_gradient_checkpointing),
            kv_cache=self._kept.get(traceable(work), 0),
        )

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        vocabulary = self.vocabulary
        if vocabulary is not None and vocabulary > VOCABULARY:
            title = f"a vocabulary of {VOCABULARY:,} instead of {vocabulary:,}"
            yield "vocabulary", title, self._having(vocab_size=VOCABULARY, pad_token_id=None)  # it may be too large
        if getattr(self.config, "tie_word_embeddings", None) is False:
            tied = self._having(tie_word_embeddings=True)
            if tied.model.count < self.model.count:
                yield "tied-embedding", "the head tied to the embedding", tied

    def _having(self, **changes: Any) -> FromConfig:
        other = of({**self.content, **changes}, self.where)
        other.shapes, other.began = self.shapes, self.began
        return other


def _numbers(work: Workload) -> torch.dtype:
    import torch

    if work.precision.weights != HALF:
        return torch.float32
    return torch.bfloat16 if work.precision.name.startswith("bf16") else torch.float16


def _bytes_kept(output: Any) -> int:
    cache = getattr(output, "past_key_values", None)
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in (parts if any(parts) else [cache]) for layer in getattr(part, "layers", ())]
    return sum(each.nbytes for layer in layers for each in (layer.keys, layer.values) if each is not None)


def _embedding_on_host(table: nn.Embedding | None, numbers: torch.dtype) -> nn.Module:
    """Rows are copied from the host, and their gradient back: the device has neither table nor state."""
    import torch
    from torch import nn

    class Copied(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, table: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
            return torch.empty(*indices.shape, width, dtype=numbers, device=indices.device)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
            return None, None, None

    class Host(nn.Module):  # type: ignore[misc]
        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            assert table is not None
            on_host = torch.empty((), device="cpu", requires_grad=True)
            return Copied.apply(on_host, indices, table.embedding_dim)

    return Host()
