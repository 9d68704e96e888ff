"""Known families: parameters and buffers as transformers' own classes have them, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers_configs import MODELS, VARIANTS, bert

from gpumon.analysis.estimate import families
from gpumon.analysis.estimate.model import NotAModel

EVERY = {name: config for name, (config, _, _) in MODELS.items()} | VARIANTS


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_is_the_one_transformers_makes(name: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = EVERY[name]
    with torch.device("meta"):
        theirs = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    ours = families.describe(families.parse(config))
    assert {t.name: t.shape for t in ours.own} == {n: tuple(p.shape) for n, p in theirs.named_parameters()}
    assert ours.count == sum(parameter.numel() for parameter in theirs.parameters())
    assert ours.buffer_bytes == sum(buffer.nbytes for buffer in theirs.buffers())


def tabformer(vocabulary: int) -> dict[str, Any]:
    """The credit-card model of IBM's TabFormer: 13 fields a row, each 64 wide."""
    return {**bert("MaskedLM", 832, 12, 13, 3072), "ncols": 13, "field_hidden_size": 64, "flatten": False,
            "vocab_size": vocabulary}  # fmt: skip


@pytest.mark.parametrize(("vocabulary", "parameters"), [(2_912, 98_510_560), (867_813, 874_326_757)])
def test_tabformer_costs_897_parameters_an_entry_of_its_vocabulary(vocabulary: int, parameters: int) -> None:
    model = families.describe(families.parse(tabformer(vocabulary)))
    assert model.count == parameters
    assert model.count - 897 * vocabulary == 95_898_496
    table = next(t for t in model.own if t.name == "tb_model.bert.embeddings.word_embeddings.weight")
    assert table.shape == (vocabulary, 832)


def test_layers_are_folded() -> None:
    model = families.describe(families.parse(MODELS["bert-large"][0]))
    folded = dict(model.layers())
    assert folded["bert.encoder.layer.*24.intermediate.dense"] == 24 * (1024 * 4096 + 4096)
    assert sum(folded.values()) == model.count


def test_an_unknown_family_is_told_with_what_to_do() -> None:
    with pytest.raises(NotAModel, match=r"'mamba' is not known: known are bert, .*--model .*--parameters"):
        families.parse({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not JSON"),
        ("[1]", "holds no object"),
        ("{}", "has no model_type"),
        (json.dumps({"model_type": "llama", "hidden_size": "wide"}), "hidden_size is 'wide'"),
        (json.dumps({"model_type": "bert", "hidden_act": "swoosh"}), "'swoosh' is missing, or not a value known"),
    ],
)
def test_a_config_that_is_none_is_told(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NotAModel, match=said):
        families.describe(families.load(tmp_path))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match="cannot be read: No such file"):
        families.load(tmp_path / "config.json")
