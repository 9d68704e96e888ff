"""Sentence-Transformers' trainer with in-batch negatives on a small BERT and a tokenizer made here."""

import _count
import datasets
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer

transformers.logging.set_verbosity_error()
transformers.set_seed(0)
datasets.disable_progress_bars()
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(1000)]
with open("vocab.txt", "w") as file:
    file.write("\n".join(words))
transformers.BertTokenizer("vocab.txt").save_pretrained("bert")
config = transformers.BertConfig(
    vocab_size=len(words), hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536
)
transformers.BertModel(config).save_pretrained("bert")
inner = Transformer("bert", max_seq_length=64)
model = SentenceTransformer(modules=[inner, Pooling(384)], device="cuda")


def text(i):
    return " ".join(f"w{(i * 17 + j) % 1000}" for j in range(30))


loss = MultipleNegativesRankingLoss(model)
_count.root(loss)  # the trainer calls the loss, which has the model in it and calls it twice
rows = datasets.Dataset.from_list([{"anchor": text(i), "positive": text(i + 1)} for i in range(16 * 12)])
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir="out", max_steps=12, per_device_train_batch_size=16, report_to="none", save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=rows,
    loss=loss,
)  # fmt: skip
trainer.train()
_count.said(f"steps {trainer.state.global_step}")
