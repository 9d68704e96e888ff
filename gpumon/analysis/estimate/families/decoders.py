"""Decoders: GPT-2, GPT-NeoX, OPT, and the Llama line (Mistral, Qwen2, Qwen3, Gemma).

Source. transformers/models/{gpt2,gpt_neox,opt,llama,mistral,qwen2,qwen3,gemma}/modeling_*.py (5.x).
"""

from __future__ import annotations

from gpumon.analysis.estimate.families.config import Config
from gpumon.analysis.estimate.tape import FLOAT, Tape, Value


def gpt2(config: Config, tape: Tape) -> None:
    """Norms ahead, one matrix for query, key and value, learned positions, gelu written out in Python."""
    hidden = config.size("n_embd", "hidden_size", default=768)
    inner = config.size("n_inner", default=4 * hidden)
    heads = config.size("n_head", "num_attention_heads", default=12)
    vocabulary = config.size("vocab_size", default=50257)
    drop, attention_drop = config.share("resid_pdrop", default=0.1), config.share("attn_pdrop", default=0.1)
    act = config.get("activation_function", default="gelu_new")
    root = "" if config.architecture.endswith("Model") and "LMHead" not in config.architecture else "transformer."
    ids = tape.tokens()
    x = tape.embedding(f"{root}wte", vocabulary, hidden, ids)
    positions = config.size("n_positions", "max_position_embeddings", default=1024)
    places = tape.embedding(f"{root}wpe", positions, hidden, tape.indices(tape.sequence))
    x = tape.dropout(tape.add(x, places), config.share("embd_pdrop", default=0.1))
    for index in range(config.size("n_layer", "num_hidden_layers", default=12)):
        layer = f"{root}h.{index}"
        with tape.layer():
            normal = tape.layer_norm(x, f"{layer}.ln_1")
            three = tape.linear(normal, f"{layer}.attn.c_attn", 3 * hidden, transposed=True)
            q, k, v = (tape.part(three, hidden) for _ in range(3))
            k, v = _cached(tape, k, v)
            mixed = tape.attention(q, k, v, heads=heads, dropout=attention_drop, mask=True, cached=tape.cache)
            x = tape.add(tape.dropout(tape.linear(mixed, f"{layer}.attn.c_proj", hidden, transposed=True), drop), x)
            wide = tape.linear(tape.layer_norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc", inner, transposed=True)
            wide = tape.activation(wide, act)
            x = tape.add(x, tape.dropout(tape.linear(wide, f"{layer}.mlp.c_proj", hidden, transposed=True), drop))
    x = tape.layer_norm(x, f"{root}ln_f")
    _head(config, tape, x, f"{root}wte", "lm_head", "score", tied=True)


def gpt_neox(config: Config, tape: Tape) -> None:
    """Attention and perceptron side by side, rotated positions on a part of each head."""
    hidden, inner = config.size("hidden_size", default=6144), config.size("intermediate_size", default=24576)
    heads, drop = config.size("num_attention_heads", default=64), config.share("hidden_dropout")
    bias, parallel = config.get("attention_bias", default=True), config.get("use_parallel_residual", default=True)
    rope, act = config.get("rope_parameters", default={}), config.get("hidden_act", default="gelu")
    turned = float(rope.get("partial_rotary_factor", config.share("rotary_pct", default=0.25)))
    rotated = int(hidden // heads * turned) * heads
    root = "" if config.architecture.endswith("Model") else "gpt_neox."
    _frequencies(tape, root, rotated // heads)
    x = tape.embedding(f"{root}embed_in", config.size("vocab_size", default=50432), hidden, tape.tokens())
    x = tape.dropout(x, drop)
    plain = x.width
    for index in range(config.size("num_hidden_layers", default=44)):
        layer = f"{root}layers.{index}"
        with tape.layer():
            normal = tape.layer_norm(x, f"{layer}.input_layernorm")
            three = tape.linear(normal, f"{layer}.attention.query_key_value", 3 * hidden, bias=bias)
            q, k, v = (tape.part(three, hidden) for _ in range(3))
            q, k = (_rotated(tape, value, plain, rotated) for value in (q, k))
            k, v = _cached(tape, k, v)
            mixed = tape.attention(
                q, k, v, heads=heads, dropout=config.share("attention_dropout"), mask=True, cached=tape.cache,
                wide_softmax=True, head_major=True,
            )  # fmt: skip
            mixed = tape.dropout(tape.linear(mixed, f"{layer}.attention.dense", hidden, bias=bias), drop)
            source = x if parallel else tape.add(mixed, x)
            normal = tape.layer_norm(source, f"{layer}.post_attention_layernorm")
            wide = tape.activation(tape.linear(normal, f"{layer}.mlp.dense_h_to_4h", inner), act)
            narrow = tape.dropout(tape.linear(wide, f"{layer}.mlp.dense_4h_to_h", hidden), drop)
            x = tape.add(tape.add(narrow, mixed), x) if parallel else tape.add(narrow, source)
    x = tape.layer_norm(x, f"{root}final_layer_norm")
    _head(config, tape, x, f"{root}embed_in", "lm_head", "score", tied=False)


def opt(config: Config, tape: Tape) -> None:
    """Learned positions, norms ahead (behind in the 350 M model), a narrower embedding there."""
    hidden, inner = config.size("hidden_size", default=768), config.size("ffn_dim", default=3072)
    narrow_word = config.size("word_embed_proj_dim", default=hidden)
    heads, drop = config.size("num_attention_heads", default=12), config.share("dropout", default=0.1)
    ahead, bias = config.get("do_layer_norm_before", default=True), config.get("enable_bias", default=True)
    act = config.get("activation_function", default="relu")
    root = "decoder." if config.architecture.endswith("Model") else "model.decoder."
    x = tape.embedding(f"{root}embed_tokens", config.size("vocab_size", default=50272), narrow_word, tape.tokens())
    positions = config.size("max_position_embeddings", default=2048) + 2
    places = tape.embedding(f"{root}embed_positions", positions, hidden, tape.indices(x.rows))
    if narrow_word != hidden:
        x = tape.linear(x, f"{root}project_in", hidden, bias=False)
    x = tape.add(x, places)
    for index in range(config.size("num_hidden_layers", default=12)):
        layer = f"{root}layers.{index}"
        with tape.layer():
            normal = tape.layer_norm(x, f"{layer}.self_attn_layer_norm") if ahead else x
            q, k, v = (tape.linear(normal, f"{layer}.self_attn.{part}_proj", hidden, bias=bias) for part in "qkv")
            q, (k, v) = tape.scale(q), _cached(tape, k, v)
            mixed = tape.attention(
                q, k, v, heads=heads, dropout=config.share("attention_dropout"), mask=True, cached=tape.cache,
                wide_softmax=True,
            )  # fmt: skip
            mixed = tape.dropout(tape.linear(mixed, f"{layer}.self_attn.out_proj", hidden, bias=bias), drop)
            x = tape.add(x, mixed)
            x = x if ahead else tape.layer_norm(x, f"{layer}.self_attn_layer_norm")
            normal = tape.layer_norm(x, f"{layer}.final_layer_norm") if ahead else x
            wide = tape.activation(tape.linear(normal, f"{layer}.fc1", inner, bias=bias), act)
            x = tape.add(x, tape.dropout(tape.linear(wide, f"{layer}.fc2", hidden, bias=bias), drop))
            x = x if ahead else tape.layer_norm(x, f"{layer}.final_layer_norm")
    if ahead and not config.get("_remove_final_layer_norm"):
        x = tape.layer_norm(x, f"{root}final_layer_norm")
    if narrow_word != hidden:
        x = tape.linear(x, f"{root}project_out", narrow_word, bias=False)
    _head(config, tape, x, f"{root}embed_tokens", "lm_head", "score", tied=True)


def llama(config: Config, tape: Tape) -> None:
    """RMS norms ahead, rotated positions, gated perceptron, fewer key heads than query heads."""
    kind = config.model_type
    sizes = _LLAMA[kind]
    hidden, inner = (config.size(name, default=sizes[name]) for name in ("hidden_size", "intermediate_size"))
    heads = config.size("num_attention_heads", default=sizes["num_attention_heads"])
    key_heads = config.size("num_key_value_heads", default=sizes.get("num_key_value_heads", heads))
    head = config.size("head_dim", default=sizes.get("head_dim", hidden // heads))
    bias = bool(config.get("attention_bias", default=False))
    qkv_bias = bias or kind == "qwen2"
    mlp_bias = bool(config.get("mlp_bias", default=False))
    act = config.get("hidden_activation", "hidden_act", default="silu") if kind != "gemma" else "gelu_pytorch_tanh"
    gemma = kind == "gemma"
    root = "" if config.architecture.endswith("Model") else "model."
    _frequencies(tape, root, head)
    vocabulary = config.size("vocab_size", default=sizes["vocab_size"])
    x = tape.embedding(f"{root}embed_tokens", vocabulary, hidden, tape.tokens())
    if gemma:
        tape.buffer(f"{root}embed_tokens.embed_scale", 1, width=FLOAT)
        x = tape.scale(x)
    plain = x.width
    for index in range(config.size("num_hidden_layers", default=sizes["num_hidden_layers"])):
        layer = f"{root}layers.{index}"
        with tape.layer():
            normal = tape.rms_norm(x, f"{layer}.input_layernorm", offset=gemma)
            own = f"{layer}.self_attn"
            q = tape.linear(normal, f"{own}.q_proj", heads * head, bias=qkv_bias)
            k, v = (tape.linear(normal, f"{own}.{part}_proj", key_heads * head, bias=qkv_bias) for part in "kv")
            if kind == "qwen3":
                q, k = _head_norm(tape, q, f"{own}.q_norm", head), _head_norm(tape, k, f"{own}.k_norm", head)
            q, k = _rotated(tape, q, plain), _rotated(tape, k, plain)
            k, v = _cached(tape, k, v)
            mixed = tape.attention(
                q, k, v, heads=heads, dropout=config.share("attention_dropout"), mask=True, cached=tape.cache,
                wide_softmax=True, repeats=heads // key_heads,
            )  # fmt: skip
            x = tape.add(x, tape.linear(mixed, f"{own}.o_proj", hidden, bias=bias))
            normal = tape.rms_norm(x, f"{layer}.post_attention_layernorm", offset=gemma)
            gate = tape.activation(tape.linear(normal, f"{layer}.mlp.gate_proj", inner, bias=mlp_bias), act)
            gated = tape.multiply(gate, tape.linear(normal, f"{layer}.mlp.up_proj", inner, bias=mlp_bias))
            x = tape.add(x, tape.linear(gated, f"{layer}.mlp.down_proj", hidden, bias=mlp_bias))
    x = tape.rms_norm(x, f"{root}norm", offset=gemma)
    _head(config, tape, x, f"{root}embed_tokens", "lm_head", "score", tied=gemma)


_LLAMA: dict[str, dict[str, int]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
}  # fmt: skip
"""What the configuration classes fill in where a config.json is silent."""


def _head(config: Config, tape: Tape, x: Value, word: str, name: str, score: str, *, tied: bool) -> None:
    """A language-model head and its loss over every token, a classifier of the last token, or nothing."""
    if config.is_for("CausalLM", "LMHead"):
        is_tied = bool(config.get("tie_word_embeddings", default=tied))
        vocabulary = tape.parameters[f"{word}.weight"].shape[0]
        if tape.cache and not tape.training:  # generate() asks for the last token's logits only
            x = tape.copy(tape.pick(x, tape.batch))
        logits = tape.linear(x, name, vocabulary, bias=False, tied=f"{word}.weight" if is_tied else None)
        tape.held.append(logits)
        if tape.training:
            tape.cross_entropy(logits, tape.given(logits.rows), upcast=True)
        if not is_tied:
            tape.tables.append(f"{word}.weight")
        return
    tape.tables.append(f"{word}.weight")
    if config.is_for("SequenceClassification"):
        logits = tape.linear(x, score, config.labels, bias=False)
        tape.held.append(logits)
        if tape.training:
            tape.cross_entropy(tape.pick(logits, tape.batch), tape.given(tape.batch))
    else:
        tape.held.append(x)


def _cached(tape: Tape, k: Value, v: Value) -> tuple[Value, Value]:
    """With use_cache, keys and values are copied into the cache that the output carries, in the keys' numbers."""
    if not tape.cache:
        return k, v
    kept = (tape.cat(k), tape.cat(tape.cast(v, k.width)))
    tape.kept_keys += kept
    return kept


def _frequencies(tape: Tape, root: str, width: int) -> None:
    for name in ("inv_freq", "original_inv_freq"):
        tape.buffer(f"{root}rotary_emb.{name}", width // 2, width=FLOAT)


def _rotated(tape: Tape, value: Value, width: int, features: int | None = None) -> Value:
    """x·cos + rotate_half(x)·sin, in the wider of the numbers of x and of the hidden states."""
    turned = features or value.features
    wide = max(value.width, width)
    source = value if turned == value.features else tape.part(value, turned)
    by_cosine = tape.scaled_to(source, wide)
    by_sine = tape.scaled_to(tape.cat(source), wide)
    out = tape.add(by_cosine, by_sine)
    if turned == value.features:
        return out
    return tape.widened(out, value, value.features)


def _head_norm(tape: Tape, value: Value, name: str, head: int) -> Value:
    rows, features = value.rows, value.features
    normal = tape.rms_norm(tape.reshaped(value, value.count // head, head), name)
    return tape.reshaped(normal, rows, features)
