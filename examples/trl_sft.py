"""TRL's SFTTrainer with gpumon's callback: `gpumon run examples/trl_sft.py`, or without `gpumon run`."""

import datasets
import tokenizers
import transformers
import trl

import gpumon_agent.transformers

transformers.set_seed(0)
words = ["<pad>", "<eos>", "<unk>"] + [f"w{i}" for i in range(200)]
plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
config = transformers.LlamaConfig(
    vocab_size=len(words),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
)
texts = [" ".join(f"w{(i * 17 + j * 7) % 200}" for j in range(20 + i % 10)) for i in range(8 * 10)]
trainer = trl.SFTTrainer(
    model=transformers.LlamaForCausalLM(config),
    args=trl.SFTConfig(
        output_dir="out",
        max_steps=10,
        per_device_train_batch_size=8,
        logging_steps=5,
        max_length=32,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
    train_dataset=datasets.Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    callbacks=[gpumon_agent.transformers.Callback()],  # the one line
)
trainer.train()
