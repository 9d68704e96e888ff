"""Hugging Face's Trainer with gpumon's callback: `gpumon run examples/transformers_trainer.py`, or without."""

import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import gpumon_agent.transformers


class Rows(Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(256, (count, 32))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


transformers.set_seed(0)
config = transformers.GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2)
trainer = Trainer(
    model=transformers.GPT2LMHeadModel(config),
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=Rows(8 * 12),
    eval_dataset=Rows(16),
    callbacks=[gpumon_agent.transformers.Callback()],  # the one line
)
trainer.train()
