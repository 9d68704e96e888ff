"""SAC: an actor, two critics with their slow copies, a learnt temperature; three optimizers in one iteration."""

import copy

import _count
import torch
from _env import Env
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda"


class Critic(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(70, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, o, a):
        return self.net(torch.cat((o, a), 1))


class Actor(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.logstd = nn.Linear(width, 6), nn.Linear(width, 6)

    def forward(self, o):
        hidden = self.net(o)
        mean, std = self.mean(hidden), self.logstd(hidden).clamp(-5, 2).exp()
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + noise * std)
        logprob = -0.5 * noise.pow(2) - std.log() - torch.log(1 - action.pow(2) + 1e-6)
        return action, logprob.sum(1, keepdim=True)


env = Env(length=40)
actor, q1, q2 = Actor().to(device), Critic().to(device), Critic().to(device)
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
_count.root(actor, q1, q2)
q_optimizer = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=1e-3)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
log_alpha = torch.zeros(1, requires_grad=True, device=device)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=1e-3)
memory, observation = [], env.reset()
for t in range(48):
    with torch.no_grad():
        action = actor(observation.to(device).unsqueeze(0))[0][0].cpu()
    following, reward, done = env.step(action)
    memory.append((observation, action, torch.tensor([reward]), following, torch.tensor([float(done)])))
    observation = env.reset() if done else following
    if t < 32:
        continue
    index = torch.randint(len(memory), (64,))
    o, a, r, n, d = (torch.stack(x).to(device) for x in zip(*(memory[i] for i in index), strict=True))
    with torch.no_grad():
        na, nlogp = actor(n)
        best = r + 0.99 * (1 - d) * (torch.min(t1(n, na), t2(n, na)) - log_alpha.exp() * nlogp)
    q_loss = F.mse_loss(q1(o, a), best) + F.mse_loss(q2(o, a), best)
    q_optimizer.zero_grad()
    q_loss.backward()
    q_optimizer.step()
    pi, logp = actor(o)
    actor_loss = (log_alpha.exp().detach() * logp - torch.min(q1(o, pi), q2(o, pi))).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()
    alpha_loss = (-log_alpha.exp() * (logp.detach() - 6)).mean()
    alpha_optimizer.zero_grad()
    alpha_loss.backward()
    alpha_optimizer.step()
    with torch.no_grad():
        for slow, fast in ((t1, q1), (t2, q2)):
            for p, new in zip(slow.parameters(), fast.parameters(), strict=True):
                p.lerp_(new, 0.005)
    _count.said(f"{t}: {q_loss.item():.4f} {actor_loss.item():.4f}")
