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


MODELS: dict[str, tuple[Config, int, int]] = {
    "bert-large": (bert("SequenceClassification", 1024, 24, 16, 4096), 4, 512),
    "gpt2": ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, 4, 1024),
    "llama-1b": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256,
         "tie_word_embeddings": True, "head_dim": 64},
        1, 512,
    ),
    "t5-small": (
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}, 8, 512,
    ),
    "vit-base": ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, 16, 197),
}  # fmt: skip
"""One of each kind: an encoder, decoders, both, images."""
