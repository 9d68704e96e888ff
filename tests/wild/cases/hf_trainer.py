"""Hugging Face's Trainer on GPT-2 or BERT: evaluation, accumulation, bf16, checkpointing, a checkpoint; LoRA by PEFT."""

import argparse

import _count
import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt2")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--evaluate", action="store_true")
args = parser.parse_args()
transformers.logging.set_verbosity_error()
transformers.set_seed(0)


class Rows(Dataset):
    def __init__(self, count):
        self.tokens = torch.randint(2048, (count, 128))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        tokens = self.tokens[i]
        labels = tokens if args.model != "bert" else tokens[0] % 2
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


if args.model == "gpt2":
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=2048, n_positions=128, n_embd=384, n_layer=4, n_head=6)
    )
elif args.model == "llama":
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=2048, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip
else:
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=2048, hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536
        )
    )
if args.lora:
    import peft

    model = peft.get_peft_model(
        model,
        peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj"]),
    )
_count.root(model)
CHECKPOINTING = (
    "activation_checkpointing" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient_checkpointing"
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        max_steps=12,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=args.accumulate,
        bf16=args.bf16,
        fp16=args.fp16,
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=4 if args.evaluate else None,
        eval_on_start=args.evaluate,
        save_strategy="steps",
        save_steps=8,
        logging_steps=4,
        report_to="none",
        disable_tqdm=True,
        **({CHECKPOINTING: True} if args.checkpointing else {}),
    ),
    train_dataset=Rows(8 * 12 * args.accumulate),
    eval_dataset=Rows(16),
)
trainer.train()
_count.said(f"steps {trainer.state.global_step}")
