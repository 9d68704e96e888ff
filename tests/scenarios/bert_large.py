"""Fine-tuning BERT-large as in Hugging Face's "anatomy of model's memory": batch 4, 512 tokens, AdamW."""

import torch
import transformers
from _report import Report, arguments, device_used
from torch.nn import functional as F

try:
    from transformers.initialization import no_init_weights
except ImportError:  # before transformers 5
    from transformers.modeling_utils import no_init_weights


def build() -> transformers.PreTrainedModel:
    """BERT-large from its configuration; `from_pretrained` would overwrite every weight, so none is initialised."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=2
    )
    with no_init_weights():
        return transformers.BertForSequenceClassification(config)


def main() -> None:
    parser = arguments(__doc__, steps=3)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    report = Report(args)
    torch.ones((1, 1)).to(args.device)
    before = device_used(args.device) if args.report else None
    model = build().to(args.device)
    if args.report:
        report.note(device_used_before=before, device_used_after=device_used(args.device))
    report("load")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model.train()
    for _ in range(args.steps):
        tokens = torch.randint(100, 30000, (args.batch, 512)).to(args.device)
        mask = torch.ones_like(tokens)
        labels = torch.randint(2, (args.batch,)).to(args.device)
        report("between")
        logits = model(input_ids=tokens, attention_mask=mask).logits
        report("forward")
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, mask, labels, logits, loss
    report.done()


if __name__ == "__main__":
    main()
