"""TRL's trainers on a small Llama and a tokenizer made here: SFT (packed or not), and DPO with a reference model or LoRA."""

import argparse

import _count
import datasets
import tokenizers
import torch
import transformers
import trl

parser = argparse.ArgumentParser()
parser.add_argument("--method", choices=["sft", "dpo"], default="sft")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
transformers.logging.set_verbosity_error()
transformers.set_seed(0)
datasets.disable_progress_bars()

words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(1000)]
plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)


def small():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(words), hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        )
    )  # fmt: skip


def text(i, length):
    return " ".join(f"w{(i * 17 + j * 7) % 1000}" for j in range(length))


common = dict(
    output_dir="out", max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=args.accumulate,
    bf16=True, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=4, disable_tqdm=True,
    per_device_eval_batch_size=4, eval_strategy="steps", eval_steps=6, max_length=128,
)  # fmt: skip
lora = None
if args.lora:
    import peft

    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])
rows = 4 * 12 * args.accumulate
if args.method == "sft":
    made = [{"text": text(i, 40 + i % 60)} for i in range(rows)]
    trainer = trl.SFTTrainer(
        model=small(),
        args=trl.SFTConfig(dataset_text_field="text", **common),
        train_dataset=datasets.Dataset.from_list(made),
        eval_dataset=datasets.Dataset.from_list(made[:8]),
        processing_class=tokenizer,
        peft_config=lora,
    )
else:
    made = [
        {"prompt": text(i, 20), "chosen": " " + text(i + 1, 30 + i % 20), "rejected": " " + text(i + 2, 30)}
        for i in range(rows)
    ]
    trainer = trl.DPOTrainer(
        model=small(),
        ref_model=None if args.lora else small().eval(),  # as from_pretrained gives it
        args=trl.DPOConfig(beta=0.1, **common),
        train_dataset=datasets.Dataset.from_list(made),
        eval_dataset=datasets.Dataset.from_list(made[:8]),
        processing_class=tokenizer,
        peft_config=lora,
    )
_count.root(trainer.model)
if getattr(trainer, "ref_model", None) is not None:
    _count.root(trainer.ref_model, trained=False)
trainer.train()
_count.said(f"steps {trainer.state.global_step}")
