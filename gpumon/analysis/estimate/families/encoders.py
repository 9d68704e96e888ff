"""Encoders: BERT and its relatives, DistilBERT, and the hierarchical BERT of TabFormer.

Source. transformers/models/{bert,roberta,distilbert}/modeling_*.py (5.x); github.com/IBM/TabFormer, models/ (2021).
"""

from __future__ import annotations

from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.tape import Tape, Value


def bert(config: Config, tape: Tape) -> None:
    """Word, position and token-type embeddings, layers with the norm behind, a head."""
    _bert(config, tape, "bert")


def roberta(config: Config, tape: Tape) -> None:
    """BERT with a language-model head and a classifier of its own."""
    _bert(config, tape, "roberta")


def _bert(config: Config, tape: Tape, prefix: str) -> None:
    root = "" if config.architecture.endswith("Model") else f"{prefix}."
    ids = tape.tokens()
    word = f"{root}embeddings.word_embeddings"
    x = tape.embedding(word, _vocabulary(config), _hidden(config), ids)
    x = _bert_encoder(config, tape, x, root)
    head = _HEADS.get(prefix, {}).get(_task(config))
    if head is not None:
        head(config, tape, x, f"{word}.weight", root)
    else:
        _pooler(config, tape, x, root)
        tape.held.append(x)
    if not config.is_for("MaskedLM", "PreTraining", "CausalLM"):
        tape.tables.append(f"{word}.weight")


def _bert_encoder(config: Config, tape: Tape, x: Value, root: str) -> Value:
    hidden, inner = _hidden(config), config.size("intermediate_size", default=3072)
    heads = config.size("num_attention_heads", default=12)
    positions = config.size("max_position_embeddings", default=512)
    drop = config.share("hidden_dropout_prob", default=0.1)
    attention_drop = config.share("attention_probs_dropout_prob", default=0.1)
    act = config.get("hidden_act", default="gelu")
    for name in ("position_ids", "token_type_ids"):
        tape.buffer(f"{root}embeddings.{name}", 1, positions)
    kinds = tape.embedding(f"{root}embeddings.token_type_embeddings", config.size("type_vocab_size", default=2), hidden,
                           tape.indices(x.rows))  # fmt: skip
    x = tape.add(x, kinds)
    places = tape.embedding(f"{root}embeddings.position_embeddings", positions, hidden, tape.indices(tape.sequence))
    x = tape.add(x, places)
    x = tape.dropout(tape.layer_norm(x, f"{root}embeddings.LayerNorm"), drop)
    for index in range(config.size("num_hidden_layers", default=12)):
        layer = f"{root}encoder.layer.{index}"
        with tape.layer():
            own = f"{layer}.attention"
            q, k, v = (tape.linear(x, f"{own}.self.{part}", hidden) for part in ("query", "key", "value"))
            mixed = tape.attention(q, k, v, heads=heads, dropout=attention_drop)
            mixed = tape.dropout(tape.linear(mixed, f"{own}.output.dense", hidden), drop)
            x = tape.layer_norm(tape.add(mixed, x), f"{own}.output.LayerNorm")
            wide = tape.activation(tape.linear(x, f"{layer}.intermediate.dense", inner), act)
            narrow = tape.dropout(tape.linear(wide, f"{layer}.output.dense", hidden), drop)
            x = tape.layer_norm(tape.add(narrow, x), f"{layer}.output.LayerNorm")
    return x


def _vocabulary(config: Config) -> int:
    return config.size("vocab_size", default=50265 if config.model_type == "roberta" else 30522)


def _hidden(config: Config) -> int:
    return config.size("hidden_size", default=768)


def _task(config: Config) -> str:
    for task in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
        if config.is_for(task):
            return task
    return ""


def _pooler(config: Config, tape: Tape, x: Value, root: str) -> Value:
    first = tape.pick(x, tape.batch)
    return tape.activation(tape.linear(first, f"{root}pooler.dense", _hidden(config)), "tanh")


def _lose(tape: Tape, logits: Value, targets: int) -> None:
    tape.held.append(logits)
    if tape.training:
        tape.cross_entropy(logits, tape.given(targets))


def _classify(tape: Tape, x: Value, name: str, labels: int, dropout: float) -> None:
    logits = tape.linear(tape.dropout(x, dropout), name, labels)
    _lose(tape, logits, logits.rows)


def _bert_mlm(config: Config, tape: Tape, x: Value, word: str, root: str) -> None:
    name = "cls.predictions"
    x = tape.linear(x, f"{name}.transform.dense", _hidden(config))
    x = tape.activation(x, config.get("hidden_act", default="gelu"))
    x = tape.layer_norm(x, f"{name}.transform.LayerNorm")
    _to_vocabulary(config, tape, x, f"{name}.decoder", word, bias_too=f"{name}.bias")


def _roberta_mlm(config: Config, tape: Tape, x: Value, word: str, root: str) -> None:
    x = tape.activation(tape.linear(x, "lm_head.dense", _hidden(config)), "gelu")
    x = tape.layer_norm(x, "lm_head.layer_norm")
    _to_vocabulary(config, tape, x, "lm_head.decoder", word, bias_too="lm_head.bias")


def _to_vocabulary(config: Config, tape: Tape, x: Value, name: str, word: str, bias_too: str = "") -> None:
    """The head, tied to the word embeddings unless the config says otherwise, and the loss."""
    tied = word if config.get("tie_word_embeddings", default=True) else None
    vocabulary = _vocabulary(config)
    if bias_too:
        tape.parameter(bias_too, vocabulary)
        if tied:
            tape.tie(f"{name}.bias", bias_too)
    logits = tape.linear(x, name, vocabulary, tied=tied)
    _lose(tape, logits, logits.rows)


def _bert_sequence(config: Config, tape: Tape, x: Value, word: str, root: str) -> None:
    pooled = _pooler(config, tape, x, root)
    _classify(tape, pooled, "classifier", config.labels, _classifier_dropout(config))


def _roberta_sequence(config: Config, tape: Tape, x: Value, word: str, root: str) -> None:
    drop = _classifier_dropout(config)
    first = tape.dropout(tape.pick(x, tape.batch), drop)
    bent = tape.activation(tape.linear(first, "classifier.dense", _hidden(config)), "tanh")
    _classify(tape, bent, "classifier.out_proj", config.labels, drop)


def _tokens(config: Config, tape: Tape, x: Value, word: str, root: str) -> None:
    _classify(tape, x, "classifier", config.labels, _classifier_dropout(config))


def _questions(config: Config, tape: Tape, x: Value, word: str, root: str) -> None:
    _classify(tape, x, "qa_outputs", 2, 0.0)


def _classifier_dropout(config: Config) -> float:
    return config.share("classifier_dropout", "hidden_dropout_prob", default=0.1)


_HEADS = {
    "bert": {
        "MaskedLM": _bert_mlm,
        "SequenceClassification": _bert_sequence,
        "TokenClassification": _tokens,
        "QuestionAnswering": _questions,
    },
    "roberta": {
        "MaskedLM": _roberta_mlm,
        "SequenceClassification": _roberta_sequence,
        "TokenClassification": _tokens,
        "QuestionAnswering": _questions,
    },
}


def distilbert(config: Config, tape: Tape) -> None:
    """Half of BERT's layers, no token types, no pooler."""
    root = "" if config.architecture.endswith("Model") else "distilbert."
    hidden, inner = config.size("dim", "hidden_size", default=768), config.size("hidden_dim", default=3072)
    heads = config.size("n_heads", "num_attention_heads", default=12)
    drop, attention_drop = config.share("dropout", default=0.1), config.share("attention_dropout", default=0.1)
    act = config.get("activation", default="gelu")
    positions = config.size("max_position_embeddings", default=512)
    word = f"{root}embeddings.word_embeddings"
    tape.buffer(f"{root}embeddings.position_ids", 1, positions)
    x = tape.embedding(word, _vocabulary(config), hidden, tape.tokens())
    places = tape.embedding(f"{root}embeddings.position_embeddings", positions, hidden, tape.indices(tape.sequence))
    x = tape.dropout(tape.layer_norm(tape.add(x, places), f"{root}embeddings.LayerNorm"), drop)
    for index in range(config.size("n_layers", "num_hidden_layers", default=6)):
        layer = f"{root}transformer.layer.{index}"
        with tape.layer():
            q, k, v = (tape.linear(x, f"{layer}.attention.{part}_lin", hidden) for part in "qkv")
            mixed = tape.attention(q, k, v, heads=heads, dropout=attention_drop)
            mixed = tape.linear(mixed, f"{layer}.attention.out_lin", hidden)
            x = tape.layer_norm(tape.add(mixed, x), f"{layer}.sa_layer_norm")
            wide = tape.activation(tape.linear(x, f"{layer}.ffn.lin1", inner), act)
            narrow = tape.dropout(tape.linear(wide, f"{layer}.ffn.lin2", hidden), drop)
            x = tape.layer_norm(tape.add(narrow, x), f"{layer}.output_layer_norm")
    if config.is_for("MaskedLM"):
        x = tape.layer_norm(tape.activation(tape.linear(x, "vocab_transform", hidden), act), "vocab_layer_norm")
        _to_vocabulary(config, tape, x, "vocab_projector", f"{word}.weight")
        return
    tape.tables.append(f"{word}.weight")
    if config.is_for("SequenceClassification"):
        first = tape.activation(tape.linear(tape.pick(x, tape.batch), "pre_classifier", hidden), "relu")
        _classify(tape, first, "classifier", config.labels, config.share("seq_classif_dropout", default=0.2))
    elif config.is_for("TokenClassification"):
        _classify(tape, x, "classifier", config.labels, drop)
    elif config.is_for("QuestionAnswering"):
        _classify(tape, x, "qa_outputs", 2, config.share("qa_dropout", default=0.1))
    else:
        tape.held.append(x)


def tabformer(config: Config, tape: Tape) -> None:
    """Rows of `ncols` fields: fields through a small transformer of their own, rows through BERT.

    `sequence` counts rows. The vocabulary stands in three parameters: the fields' embedding (64 by default), BERT's
    word embedding, which is tied to the head, and the head's bias: 64 + hidden + 1 parameters for every entry. Losses
    a field are taken for one over the whole vocabulary.
    """
    columns, field = config.size("ncols"), config.size("field_hidden_size", default=64)
    vocabulary, hidden = config.size("vocab_size"), _hidden(config)
    rows, fields = tape.batch * tape.sequence, tape.batch * tape.sequence * columns
    table = "tab_embeddings.word_embeddings"
    x = tape.embedding(table, vocabulary, field, tape.given(fields))
    tape.tables.append(f"{table}.weight")
    for index in range(config.size("num_layers", default=1)):
        layer = f"tab_embeddings.transformer_encoder.layers.{index}"
        three = tape.product(x, fields, 3 * field, (
            tape.parameter(f"{layer}.self_attn.in_proj_weight", 3 * field, field),
            tape.parameter(f"{layer}.self_attn.in_proj_bias", 3 * field),
        ))  # fmt: skip
        q, k, v = (tape.part(three, field) for _ in range(3))
        keys, heads = tape.sequence * columns, config.size("nhead", default=8)
        mixed = tape.attention(q, k, v, heads=heads, keys=keys, dropout=0.1)
        mixed = tape.dropout(tape.linear(mixed, f"{layer}.self_attn.out_proj", field), 0.1)
        x = tape.layer_norm(tape.add(mixed, x), f"{layer}.norm1")
        wide = tape.dropout(tape.activation(tape.linear(x, f"{layer}.linear1", field), "relu"), 0.1)
        narrow = tape.dropout(tape.linear(wide, f"{layer}.linear2", field), 0.1)
        x = tape.layer_norm(tape.add(narrow, x), f"{layer}.norm2")
    x = tape.reshaped(tape.copy(x), rows, field * columns)
    x = tape.linear(x, "tab_embeddings.lin_proj", hidden)
    word = "tb_model.bert.embeddings.word_embeddings.weight"
    tape.parameter(word, vocabulary, hidden)  # looked up by nothing: the fields' embedding takes its place
    x = _bert_encoder(config, tape, x, "tb_model.bert.")
    x = tape.reshaped(x, fields, hidden // columns)
    head = "tb_model.cls.predictions"
    x = tape.activation(tape.linear(x, f"{head}.transform.dense", hidden), config.get("hidden_act", default="gelu"))
    x = tape.layer_norm(x, f"{head}.transform.LayerNorm")
    logits = tape.linear(x, f"{head}.decoder", vocabulary, tied=word)
    _lose(tape, logits, fields)
