"""PPO as CleanRL writes it: a rollout without gradients, advantages, then epochs of shuffled minibatches."""

import _count
import torch
from _env import Env
from torch import nn
from torch.distributions import Categorical

num_envs, num_steps, epochs, minibatches, updates = 8, 16, 2, 4, 4
gamma, lam, clip, ent_coef, vf_coef = 0.99, 0.95, 0.2, 0.01, 0.5


class Agent(nn.Module):
    def __init__(self, observations=64, actions=6, width=1024):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(observations, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
        )
        self.actor, self.critic = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, x, action=None):
        hidden = self.body(x)
        probs = Categorical(logits=self.actor(hidden), validate_args=False)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).flatten()


torch.manual_seed(1)
device = torch.device("cuda")
envs = [Env(seed=i) for i in range(num_envs)]
agent = Agent().to(device)
_count.root(agent)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs = torch.zeros(num_steps, num_envs, 64, device=device)
actions = torch.zeros(num_steps, num_envs, device=device)
logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs, device=device) for _ in range(4))
next_obs = torch.stack([env.reset() for env in envs]).to(device)
next_done = torch.zeros(num_envs, device=device)
for update in range(updates):
    optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - update / updates)
    for step in range(num_steps):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent(next_obs)
        values[step], actions[step], logprobs[step] = value, action, logprob
        outcome = [env.step(int(a)) for env, a in zip(envs, action.cpu(), strict=True)]
        next_obs = torch.stack([o if not d else e.reset() for e, (o, _, d) in zip(envs, outcome, strict=True)]).to(
            device
        )
        rewards[step] = torch.tensor([r for _, r, _ in outcome]).to(device)
        next_done = torch.tensor([float(d) for _, _, d in outcome]).to(device)
    with torch.no_grad():
        next_value = agent(next_obs)[3]
        advantages, last = torch.zeros_like(rewards), 0
        for t in reversed(range(num_steps)):
            alive = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
            following = next_value if t == num_steps - 1 else values[t + 1]
            last = rewards[t] + gamma * following * alive - values[t] + gamma * lam * alive * last
            advantages[t] = last
        returns = advantages + values
    flat = [t.reshape(-1, *t.shape[2:]) for t in (obs, actions, logprobs, advantages, returns)]
    for _ in range(epochs):
        for index in torch.randperm(num_steps * num_envs).chunk(minibatches):
            o, a, old, adv, ret = (t[index.to(device)] for t in flat)
            _, new, entropy, value = agent(o, a.long())
            ratio = (new - old).exp()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
            loss = pg - ent_coef * entropy.mean() + vf_coef * 0.5 * (value - ret).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    _count.said(f"update {update}: {loss.item():.4f}")
