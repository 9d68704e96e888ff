"""Hugging Face's Trainer on a tiny GPT-2 or BERT: accumulation, bf16, checkpointing, compile, evaluation by flags."""

import tempfile

import torch
import transformers
from _report import Report, arguments
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

LENGTH, VOCABULARY = 64, 512
FIELDS = TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
"""transformers 5.23 renamed the option."""


class Sentences(Dataset):
    """Random tokens; the labels are the tokens (GPT-2) or a class (BERT)."""

    def __init__(self, count: int, model: str) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
        self.model = model

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens if self.model == "gpt2" else tokens[0] % 2
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


class Phases(TrainerCallback):
    """Tells the report where the optimizer's step ends; the trainer keeps its other boundaries to itself."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        self.report("optimizer")


def build(name: str) -> transformers.PreTrainedModel:
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4)
        return transformers.GPT2LMHeadModel(config)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=LENGTH,
        )
    )


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--model", choices=["gpt2", "bert"], default="gpt2")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step (1)")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-backend", default="inductor")
    parser.add_argument("--evaluate", action="store_true", help="evaluate after every second step")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data (0)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    report = Report(args)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=build(args.model),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=4,
                per_device_eval_batch_size=4,
                gradient_accumulation_steps=args.accumulate,
                bf16=args.bf16,
                torch_compile=args.compile,
                torch_compile_backend=args.compile_backend if args.compile else None,
                eval_strategy="steps" if args.evaluate else "no",
                eval_steps=2 if args.evaluate else None,
                dataloader_num_workers=args.workers,
                use_cpu=args.device == "cpu",
                seed=args.seed,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **({CHECKPOINTING: True} if args.checkpointing else {}),
            ),
            train_dataset=Sentences(4 * args.accumulate * args.steps, args.model),
            eval_dataset=Sentences(8, args.model),
            callbacks=[Phases(report)],
        )
        if args.report:
            report.note(buffers=sum(buffer.nbytes for buffer in trainer.model.buffers()))
        report("load")
        trainer.train()
    report.done()


if __name__ == "__main__":
    main()
