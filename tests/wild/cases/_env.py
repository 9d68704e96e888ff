"""A small environment with images or vectors as observations; no library needed."""

import torch


class Env:
    def __init__(self, size=64, actions=6, length=50, seed=0):
        self.size, self.actions, self.length = size, actions, length
        self.random = torch.Generator().manual_seed(seed)
        self.t = 0

    def reset(self):
        self.t = 0
        return torch.randn(self.size, generator=self.random)

    def step(self, action):
        self.t += 1
        reward = float(torch.rand((), generator=self.random))
        return torch.randn(self.size, generator=self.random), reward, self.t >= self.length
