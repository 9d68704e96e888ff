"""A TabFormer BERT as {name: shape}: the model of the out-of-memory everyone should recognise.

The structure is the public one (hierarchical, 13 columns a row of a table, 64 a field, so 832 a row; 12 layers): the
vocabulary appears in a field embedding (64), in BERT's word embedding, tied to the decoder (832), and in the decoder's
bias (1): 897 parameters a row. BERT's own pooler is not there.

    python tests/_shared/tabformer.py      writes tests/data/tabformer-VOCABULARY.json for the two vocabularies
"""

from __future__ import annotations

import json
from pathlib import Path

SMALL, LARGE = 2_912, 867_813
"""Vocabularies: 98,510,560 and 874,326,757 parameters."""


def shapes(
    vocabulary: int, *, field: int = 64, columns: int = 13, layers: int = 12, inner: int = 3072, positions: int = 512
) -> dict[str, list[int]]:
    """In the order in which the model registers its parameters; tied ones once."""
    hidden = field * columns
    found: dict[str, list[int]] = {}

    def linear(path: str, rows: int, inputs: int) -> None:
        found[f"{path}.weight"] = [rows, inputs]
        found[f"{path}.bias"] = [rows]

    def norm(path: str, size: int) -> None:
        found[f"{path}.weight"] = [size]
        found[f"{path}.bias"] = [size]

    found["tab_embeddings.word_embeddings.weight"] = [vocabulary, field]
    within = "tab_embeddings.transformer_encoder.layers.0"
    found[f"{within}.self_attn.in_proj_weight"] = [3 * field, field]
    found[f"{within}.self_attn.in_proj_bias"] = [3 * field]
    linear(f"{within}.self_attn.out_proj", field, field)
    linear(f"{within}.linear1", field, field)
    linear(f"{within}.linear2", field, field)
    norm(f"{within}.norm1", field)
    norm(f"{within}.norm2", field)
    linear("tab_embeddings.lin_proj", hidden, hidden)
    embeddings = "tb_model.bert.embeddings"
    found[f"{embeddings}.word_embeddings.weight"] = [vocabulary, hidden]
    found[f"{embeddings}.position_embeddings.weight"] = [positions, hidden]
    found[f"{embeddings}.token_type_embeddings.weight"] = [2, hidden]
    norm(f"{embeddings}.LayerNorm", hidden)
    for index in range(layers):
        layer = f"tb_model.bert.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{name}", hidden, hidden)
        linear(f"{layer}.attention.output.dense", hidden, hidden)
        norm(f"{layer}.attention.output.LayerNorm", hidden)
        linear(f"{layer}.intermediate.dense", inner, hidden)
        linear(f"{layer}.output.dense", hidden, inner)
        norm(f"{layer}.output.LayerNorm", hidden)
    head = "tb_model.cls.predictions"
    found[f"{head}.bias"] = [vocabulary]
    linear(f"{head}.transform.dense", hidden, field)
    norm(f"{head}.transform.LayerNorm", hidden)
    return found


if __name__ == "__main__":
    for rows in (SMALL, LARGE):
        path = Path(__file__).parents[1] / "data" / f"tabformer-{rows}.json"
        lines = (f" {json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes(rows).items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
