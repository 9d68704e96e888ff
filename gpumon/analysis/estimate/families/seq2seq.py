"""Encoders with a decoder: T5.

Source. transformers/models/t5/modeling_t5.py (5.x).
"""

from __future__ import annotations

from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.tape import Tape, Value


def t5(config: Config, tape: Tape) -> None:
    """RMS norms ahead, a learned bias on the scores that all layers share, one vocabulary for encoder and decoder.

    Targets are as long as the inputs.
    """
    hidden, vocabulary = config.size("d_model", default=512), config.size("vocab_size", default=32128)
    ids = tape.tokens()
    x = tape.embedding("shared", vocabulary, hidden, ids)
    for name in ("encoder", "decoder"):
        tape.tie(f"{name}.embed_tokens.weight", "shared.weight")
    memory = _stack(config, tape, x, "encoder", config.size("num_layers", default=6), None)
    tape.held.append(memory)
    y = tape.embedding("shared", vocabulary, hidden, tape.tokens())
    layers = config.size("num_decoder_layers", "num_layers", default=6)
    y = _stack(config, tape, y, "decoder", layers, memory)
    if config.is_for("ConditionalGeneration"):
        logits = tape.linear(tape.scale(y), "lm_head", vocabulary, bias=False, tied="shared.weight")
        tape.held.append(logits)
        if tape.training:
            tape.cross_entropy(logits, tape.given(logits.rows))
    else:
        tape.held.append(y)
        tape.tables.append("shared.weight")


def _stack(config: Config, tape: Tape, x: Value, name: str, layers: int, memory: Value | None) -> Value:
    drop, inner = config.share("dropout_rate", default=0.1), config.size("d_ff", default=2048)
    form = str(config.get("feed_forward_proj", default="relu"))
    gated = form.startswith("gated-")
    act = form.removeprefix("gated-")
    act = "gelu_new" if form == "gated-gelu" else act
    hidden = x.features
    x = tape.dropout(x, drop)
    bias: Value | None = None
    nothing: Value | None = None
    for index in range(layers):
        layer = f"{name}.block.{index}.layer"
        with tape.layer():
            x, bias = _attend(config, tape, x, x, f"{layer}.0.SelfAttention", f"{layer}.0.layer_norm", bias)
            part = 1
            if memory is not None:
                own = f"{layer}.1.EncDecAttention"
                x, nothing = _attend(config, tape, x, memory, own, f"{layer}.1.layer_norm", nothing, cross=True)
                part = 2
            normal = tape.rms_norm(x, f"{layer}.{part}.layer_norm", in_place_type=True)
            own = f"{layer}.{part}.DenseReluDense"
            if gated:
                wide = tape.activation(tape.linear(normal, f"{own}.wi_0", inner, bias=False), act)
                wide = tape.multiply(wide, tape.linear(normal, f"{own}.wi_1", inner, bias=False))
            else:
                wide = tape.activation(tape.linear(normal, f"{own}.wi", inner, bias=False), act)
            wide = tape.dropout(wide, drop)
            x = tape.add(x, tape.dropout(tape.linear(wide, f"{own}.wo", hidden, bias=False), drop))
    x = tape.rms_norm(x, f"{name}.final_layer_norm", in_place_type=True)
    return tape.dropout(x, drop)


def _attend(
    config: Config,
    tape: Tape,
    x: Value,
    source: Value,
    name: str,
    norm: str,
    bias: Value | None,
    *,
    cross: bool = False,
) -> tuple[Value, Value]:
    """One attention with its norm and residual; returns the scores' bias, made by the first layer."""
    heads, head = config.size("num_heads", default=8), config.size("d_kv", default=64)
    drop = config.share("dropout_rate", default=0.1)
    normal = tape.rms_norm(x, norm, in_place_type=True)
    given = source if cross else normal
    q = tape.linear(normal, f"{name}.q", heads * head, bias=False)
    k, v = (tape.linear(given, f"{name}.{part}", heads * head, bias=False) for part in "kv")
    cached = tape.cache and name.startswith("decoder")
    if cached:
        k, v = tape.cat(k), tape.cat(v)
        tape.kept_keys += [k, v]
    if bias is None:
        bias = _bias(config, tape, f"{name}.relative_attention_bias", heads, learned=not cross)
    mixed = tape.attention(q, k, v, heads=heads, dropout=drop, bias=bias, cached=cached)
    mixed = tape.linear(mixed, f"{name}.o", x.features, bias=False)
    return tape.add(x, tape.dropout(mixed, drop)), bias


def _bias(config: Config, tape: Tape, name: str, heads: int, *, learned: bool) -> Value:
    pairs = tape.sequence * tape.sequence
    if not learned:
        return tape.constant(pairs, heads)
    buckets = config.size("relative_attention_num_buckets", default=32)
    return tape.embedding(name, buckets, heads, tape.constant(pairs, 1, width=8))
