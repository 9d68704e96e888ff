"""TRL's SFTTrainer with gpumon's callback: `gpumon run examples/trl_sft.py`, or without `gpumon run`."""

import datasets
import torch
import transformers
import trl

import gpumon_agent.transformers

transformers.set_seed(0)
words = [f"w{i}" for i in range(60)]
vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", *words])}

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
