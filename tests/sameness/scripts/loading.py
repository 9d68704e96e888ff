# same: cases=plain,fork,persistent,spawn,pinned
"""A DataLoader with workers: batches, what workers see, what they print."""

import sys
import threading

import torch
from same import bits, case, device, tell, watch


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        if i == 3:
            worker = torch.utils.data.get_worker_info()
            tell(
                "worker",
                [
                    worker and worker.id,
                    sorted(t.name for t in threading.enumerate() if not t.name.startswith(("QueueFeeder", "Thread-"))),
                ],
            )
            tell("hooks", [sys.excepthook is sys.__excepthook__, torch.get_num_threads()])
        return torch.full((8,), float(i)) + torch.rand(8)


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch(model, optimizer)
    options = {
        "plain": {},
        "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
        "persistent": {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"},
        "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
        "pinned": {"pin_memory": device == "cuda", "num_workers": 1, "multiprocessing_context": "fork"},
    }[case]
    loader = torch.utils.data.DataLoader(Data(), batch_size=4, shuffle=True, **options)
    for _ in range(2):
        for x in loader:
            loss = model(x.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tell("batch", bits(x.cpu()))
    tell("loss", bits(loss))
    tell("random", bits(torch.rand(4)))


if __name__ == "__main__":
    main()
