"""Training of a policy in an environment of gymnasium on jax equals the CPU's."""

import numpy as np
import pytest
import torch
from torch import nn

gymnasium = pytest.importorskip(
  "gymnasium", reason="the extra `ecosystem` is not installed"
)

LIBRARY, DISTRIBUTION = "gymnasium", "gymnasium"
LINES = '`torchax.enable_globally()`; `device="jax"`'
LENGTH, SIDE = 8, 4

pytestmark = pytest.mark.usefixtures("env")


class Corridor(gymnasium.Env):
  """Corridor in which steps to the right are rewarded; episodes have a fixed length.

  So all episodes have equal shapes, and each operation is compiled once.
  """

  observation_space = gymnasium.spaces.Box(0, 1, (SIDE,), np.float32)
  action_space = gymnasium.spaces.Discrete(2)

  def _observe(self):
    return np.eye(SIDE, dtype=np.float32)[self.place]

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.place, self.steps = int(self.np_random.integers(SIDE)), 0
    return self._observe(), {}

  def step(self, action):
    self.place = int(np.clip(self.place + 2 * action - 1, 0, SIDE - 1))
    self.steps += 1
    return self._observe(), float(action), self.steps == LENGTH, False, {}


def _policy(device: str) -> nn.Module:
  torch.manual_seed(0)
  return nn.Sequential(nn.Linear(SIDE, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def _train(device: str, choose, episodes: int) -> tuple[list, list]:
  """Train by REINFORCE; return the returns and losses. `choose` draws from logits."""
  world = Corridor()
  policy = _policy(device)
  optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
  returns, losses = [], []
  for episode in range(episodes):
    seen, _ = world.reset(seed=episode)
    scores, rewards, is_over = [], [], False
    while not is_over:
      logits = policy(torch.as_tensor(seen, device=device))
      action = choose(logits)
      scores.append(torch.distributions.Categorical(logits=logits).log_prob(action))
      seen, reward, terminated, truncated, _ = world.step(action.item())
      rewards.append(reward)
      is_over = terminated or truncated
    gains = np.cumsum(rewards[::-1])[::-1].copy()
    gains = torch.as_tensor(gains, dtype=torch.float32, device=device)
    loss = -(torch.stack(scores) * (gains - gains.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    returns.append(sum(rewards))
    losses.append(loss.item())
  return returns, losses


def _drawn_by_numpy():
  """Draw an action with numpy, equal on each device."""
  source = np.random.default_rng(0)

  def choose(logits):
    chance = logits.softmax(-1)[1].item()
    return torch.tensor(int(source.random() < chance), device=logits.device)

  return choose


def test_losses_equal_the_cpu_for_the_same_actions():
  actual = _train("jax", _drawn_by_numpy(), 3)
  expected = _train("cpu", _drawn_by_numpy(), 3)
  assert actual[0] == expected[0]
  assert actual[1] == pytest.approx(expected[1], rel=1e-3, abs=1e-4)


def test_a_policy_learns_and_a_seed_gives_the_same_run():
  def run(seed: int):
    torch.manual_seed(seed)
    return _train(
      "jax", lambda logits: torch.distributions.Categorical(logits=logits).sample(), 12
    )

  returns, losses = run(0)
  assert (returns, losses) == run(0)
  assert np.mean(returns[-4:]) > np.mean(returns[:4])


def test_a_generator_of_jax_draws_the_actions():
  def run(seed: int):
    generator = torch.Generator(device="jax").manual_seed(seed)

    def choose(logits):
      return torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[0]

    return _train("jax", choose, 2)

  assert run(1) == run(1)
