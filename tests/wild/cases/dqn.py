"""DQN: a replay buffer, acting without gradients, a target network that is copied, a step every fourth action."""

import collections
import copy
import random

import _count
import torch
from _env import Env
from torch import nn
from torch.nn import functional as F

random.seed(0)
torch.manual_seed(0)
device = "cuda"


class QNetwork(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6)
        )

    def forward(self, x):
        return self.net(x)


env, buffer = Env(), collections.deque(maxlen=1000)
q = QNetwork().to(device)
target = copy.deepcopy(q)
_count.root(q)
optimizer = torch.optim.Adam(q.parameters(), lr=1e-4)
observation, steps = env.reset(), 0
for t in range(160):
    if random.random() < max(0.05, 1 - t / 100):
        action = random.randrange(6)
    else:
        with torch.no_grad():
            action = int(q(observation.to(device).unsqueeze(0)).argmax(1))
    following, reward, done = env.step(action)
    buffer.append((observation, action, reward, following, float(done)))
    observation = env.reset() if done else following
    if t < 64 or t % 4:
        continue
    sample = random.sample(buffer, 32)
    o, a, r, n, d = (
        torch.as_tensor(x) if not isinstance(x[0], torch.Tensor) else torch.stack(x) for x in zip(*sample, strict=True)
    )
    o, a, r, n, d = o.to(device), a.to(device), r.to(device), n.to(device), d.to(device)
    with torch.no_grad():
        best = r + 0.99 * target(n).max(1).values * (1 - d)
    loss = F.smooth_l1_loss(q(o).gather(1, a[:, None]).squeeze(1), best.float())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(q.parameters(), 100)
    optimizer.step()
    steps += 1
    if steps % 5 == 0:
        target.load_state_dict(q.state_dict())
        _count.said(f"{t}: {loss.item():.4f}")
