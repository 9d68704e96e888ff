"""Known families of models: a Hugging Face config.json in, parameters and forward pass out, without torch.

Each family has a module that writes its forward down on a `Tape`, operation by operation, as transformers (5.x) runs
it. `known()` lists the model types; an unknown one raises NotAModel with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpumon.analysis.estimate.families import decoders, encoders, seq2seq, vision
from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.model import Model, NotAModel
from gpumon.analysis.estimate.reading import check_config, read_object
from gpumon.analysis.estimate.tape import Numbers, Tape
from gpumon.analysis.estimate.workload import Workload

_FAMILIES: dict[str, Callable[[Config, Tape], None]] = {
    "bert": encoders.bert,
    "roberta": encoders.roberta,
    "xlm-roberta": encoders.roberta,
    "camembert": encoders.roberta,
    "distilbert": encoders.distilbert,
    "tabformer": encoders.tabformer,
    "gpt2": decoders.gpt2,
    "gpt_neox": decoders.gpt_neox,
    "opt": decoders.opt,
    "llama": decoders.llama,
    "mistral": decoders.llama,
    "qwen2": decoders.llama,
    "qwen3": decoders.llama,
    "gemma": decoders.llama,
    "t5": seq2seq.t5,
    "vit": vision.vit,
}


def known() -> tuple[str, ...]:
    """Model types, as config.json writes them."""
    return tuple(_FAMILIES)


def load(path: Path | str) -> Config:
    """A config.json, or the folder it lies in. Raises NotAModel where it cannot be read or its family is not known."""
    place = Path(path)
    if place.is_dir():
        place /= "config.json"
    content = read_object(place)
    check_config(content, place)
    return parse(content, str(place))


def parse(content: Mapping[str, Any], where: str = "config.json") -> Config:
    """Raises NotAModel where the family is not known."""
    config = Config(content, where)
    kind = config.model_type
    if kind not in _FAMILIES:
        said = f"model_type {kind!r} is not known" if kind else f"{where} has no model_type"
        raise NotAModel(
            f"{said}: known are {', '.join(_FAMILIES)}; for any other model give its code (--model pkg.module:factory) "
            "or its size (--parameters COUNT)"
        )
    return config


def record(config: Config, work: Workload) -> Tape:
    """The forward pass of `work`. Raises NotAModel where the config leaves out or contradicts what is needed."""
    training = not work.inference
    cache = bool(config.get("use_cache", default=True)) if training else work.kv_cache > 0
    tape = Tape(
        batch=work.batch,
        sequence=work.kv_cache or work.sequence,
        numbers=work.precision.numbers,
        training=training,
        fused_attention=work.attention == "sdpa",
        workspace=work.hardware.cublas_workspace,
        cache=cache and not work.checkpointing,
    )
    try:
        _FAMILIES[config.model_type](config, tape)
    except KeyError as missing:
        raise NotAModel(f"{config.where}: {missing.args[0]!r} is missing, or not a value known here") from None
    except ZeroDivisionError:
        raise NotAModel(f"{config.where}: a size is 0") from None
    return tape


def describe(config: Config, width: int = 4) -> Model:
    """Its tensors, exact."""
    tape = Tape(batch=1, sequence=1, numbers=Numbers(width))
    try:
        _FAMILIES[config.model_type](config, tape)
    except KeyError as missing:
        raise NotAModel(f"{config.where}: {missing.args[0]!r} is missing, or not a value known here") from None
    return model_of(config, tape)


def longest(config: Config) -> int | None:
    """Tokens the model can be given; None where its positions do not end, or are an image's."""
    if config.model_type in ("t5", "vit"):
        return None
    return config.size("max_position_embeddings", "n_positions", default=_LONGEST.get(config.model_type, 512))


_LONGEST = {"gpt2": 1024, "gpt_neox": 2048, "opt": 2048, "llama": 2048, "mistral": 131072, "qwen2": 32768,
            "qwen3": 32768, "gemma": 8192}  # fmt: skip


def model_of(config: Config, tape: Tape) -> Model:
    """The tensors a tape declared."""
    return Model(config.name, tuple(tape.parameters.values()), tuple(tape.buffers.values()))
