"""Vision transformers.

Source. transformers/models/vit/modeling_vit.py (5.x).
"""

from __future__ import annotations

from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.tape import Tape


def vit(config: Config, tape: Tape) -> None:
    """Patches by a convolution, a class token ahead, layers with the norm ahead."""
    hidden, inner = config.size("hidden_size", default=768), config.size("intermediate_size", default=3072)
    heads = config.size("num_attention_heads", default=12)
    side, patch = _side(config, "image_size", 224), _side(config, "patch_size", 16)
    channels, bias = config.size("num_channels", default=3), bool(config.get("qkv_bias", default=True))
    drop, act = config.share("hidden_dropout_prob"), config.get("hidden_act", default="gelu")
    attention_drop = config.share("attention_probs_dropout_prob")
    root = "" if config.architecture.endswith("Model") else "vit."
    patches = (side // patch) ** 2
    tokens = patches + 1
    tape.sequence, tape.has_tokens = tokens, False
    pixels = tape.given(tape.batch, channels * side * side, tape.numbers.weights)
    start = tape.parameter(f"{root}embeddings.cls_token", 1, 1, hidden)
    places = tape.parameter(f"{root}embeddings.position_embeddings", 1, tokens, hidden)
    kernel = tape.parameter(f"{root}embeddings.patch_embeddings.projection.weight", hidden, channels, patch, patch)
    offset = tape.parameter(f"{root}embeddings.patch_embeddings.projection.bias", hidden)
    x = tape.product(pixels, tape.batch * patches, hidden, (kernel, offset))
    x = tape.joined(x, tape.batch * tokens, (start,))
    x = tape.dropout(tape.plus_parameter(x, places), drop)
    for index in range(config.size("num_hidden_layers", default=12)):
        layer = f"{root}layers.{index}"
        with tape.layer():
            normal = tape.layer_norm(x, f"{layer}.layernorm_before")
            q, k, v = (tape.linear(normal, f"{layer}.attention.{part}_proj", hidden, bias=bias) for part in "qkv")
            mixed = tape.attention(q, k, v, heads=heads, keys=tokens, dropout=attention_drop, wide_softmax=True)
            x = tape.add(tape.dropout(tape.linear(mixed, f"{layer}.attention.o_proj", hidden), drop), x)
            normal = tape.layer_norm(x, f"{layer}.layernorm_after")
            wide = tape.activation(tape.linear(normal, f"{layer}.mlp.fc1", inner), act)
            x = tape.add(tape.dropout(tape.linear(wide, f"{layer}.mlp.fc2", hidden), drop), x)
    x = tape.layer_norm(x, f"{root}layernorm")
    if config.is_for("ImageClassification"):
        logits = tape.linear(tape.pick(x, tape.batch), "classifier", config.labels)
        tape.held.append(logits)
        if tape.training:
            tape.cross_entropy(logits, tape.given(tape.batch))
    else:
        tape.activation(tape.linear(tape.pick(x, tape.batch), f"{root}pooler.dense", hidden), "tanh")
        tape.held.append(x)


def _side(config: Config, name: str, default: int) -> int:
    """Sides may be written as [224, 224]."""
    value = config.get(name, default=default)
    if isinstance(value, list) and len(set(value)) == 1:
        return int(value[0])
    return config.size(name, default=default)
