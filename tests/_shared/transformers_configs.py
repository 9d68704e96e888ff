"""Configurations of well-known transformers as their config.json states them, with a batch and a length to train at."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def bert(task: str, hidden: int, layers: int, heads: int, inner: int) -> Config:
    return {
        "model_type": "bert",
        "architectures": [f"BertFor{task}"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }


def llama(kind: str, name: str, **sizes: Any) -> Config:
    return {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **sizes}


MODELS: dict[str, tuple[Config, int, int]] = {
    "bert-base": (bert("MaskedLM", 768, 12, 12, 3072), 8, 512),
    "bert-large": (bert("SequenceClassification", 1024, 24, 16, 4096), 4, 512),
    "roberta-base": (
        {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 514,
         "type_vocab_size": 1},
        8, 256,
    ),
    "distilbert": ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, 8, 512),
    "gpt2": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, 4, 1024),
    "pythia-410m": (
        {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 1024,
         "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 50304},
        4, 512,
    ),
    "opt-125m": ({"model_type": "opt", "architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 768}, 4, 1024),
    "opt-350m": (
        {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 24,
         "num_attention_heads": 16, "ffn_dim": 4096, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
        4, 512,
    ),
    "llama-1b": (
        llama("llama", "Llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
              intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, head_dim=64),
        1, 512,
    ),
    "mistral-small": (
        llama("mistral", "Mistral", hidden_size=1024, num_hidden_layers=12, num_attention_heads=16,
              num_key_value_heads=4, intermediate_size=3584, head_dim=64),
        4, 1024,
    ),
    "qwen2-0.5b": (
        llama("qwen2", "Qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
              intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True),
        4, 512,
    ),
    "qwen3-0.6b": (
        llama("qwen3", "Qwen3", hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
              intermediate_size=3072, vocab_size=151936, head_dim=128, tie_word_embeddings=True),
        2, 512,
    ),
    "gemma-2b": (
        llama("gemma", "Gemma", hidden_size=2048, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1,
              intermediate_size=16384, head_dim=256, vocab_size=256000),
        1, 256,
    ),
    "t5-small": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}, 8, 512,
    ),
    "t5-v1_1-base": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0,
         "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False},
        4, 256,
    ),
    "vit-base": ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, 16, 197),
}  # fmt: skip
