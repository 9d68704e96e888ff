"""torch.compile in its three forms: a wrapped module, Module.compile() in place, and a module in one full graph."""

import torch
from _gpt import GPT, GPTConfig, batch, next_token_loss
from _report import Report, arguments


def main() -> None:
    parser = arguments(__doc__, steps=5)
    parser.add_argument("--form", choices=["module", "inplace", "fullgraph"], default="module")
    parser.add_argument("--backend", default="inductor", help="inductor, aot_eager or eager")
    args = parser.parse_args()
    report = Report(args)
    config = GPTConfig(layers=1, width=128, vocabulary=1024)
    with torch.device(args.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if args.form == "inplace":
        model.compile(backend=args.backend)
        compiled = model
    else:
        compiled = torch.compile(model, backend=args.backend, fullgraph=args.form == "fullgraph")
    report("load")
    for _ in range(args.steps):
        tokens, targets = batch(config, 4, args.device)
        report("between")
        logits = compiled(tokens)
        report("forward")
        loss = next_token_loss(logits, targets)
        loss.backward()
        report("backward")
        optimizer.step()
        report("optimizer")
        optimizer.zero_grad()
        del tokens, targets, logits, loss
    counters = torch._dynamo.utils.counters
    report.note(graphs=counters["stats"]["unique_graphs"], breaks=sum(counters["graph_break"].values()))
    report.done()


if __name__ == "__main__":
    main()
