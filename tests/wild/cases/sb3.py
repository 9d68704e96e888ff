"""Stable-Baselines3: PPO, DQN or SAC on an environment of gymnasium's kind."""

import argparse

import _count
import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, PPO, SAC

parser = argparse.ArgumentParser()
parser.add_argument("--algorithm", choices=["ppo", "dqn", "sac"], default="ppo")
args = parser.parse_args()
torch.distributions.Distribution.set_default_validate_args(False)  # the virtual GPU has no values to look at


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (64,), np.float32)
    action_space = (
        gymnasium.spaces.Box(-1, 1, (4,), np.float32) if args.algorithm == "sac" else gymnasium.spaces.Discrete(6)
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.t += 1
        return self.observation_space.sample(), 1.0, False, self.t >= 20, {}


wide = dict(net_arch=[512, 512])
if args.algorithm == "ppo":
    model = PPO("MlpPolicy", Env(), n_steps=24, batch_size=8, n_epochs=2, policy_kwargs=wide, device="cuda", seed=0)
    parts, steps = [model.policy], 72
    _count.method(model.policy, "evaluate_actions")
elif args.algorithm == "dqn":
    model = DQN(
        "MlpPolicy", Env(), learning_starts=16, train_freq=4, batch_size=16, policy_kwargs=wide, device="cuda", seed=0
    )
    parts, steps = [model.q_net, model.q_net_target], 80
else:
    model = SAC("MlpPolicy", Env(), learning_starts=8, batch_size=16, policy_kwargs=wide, device="cuda", seed=0)
    parts, steps = [model.actor, model.critic, model.critic_target], 24
_count.model(model.policy)
_count.root(*parts, trained=False)  # of the policy
model.learn(total_timesteps=steps)
_count.said(f"{model.num_timesteps} {model._n_updates} {torch.cuda.is_available()}")
