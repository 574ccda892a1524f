"""Reinforcement learning: REINFORCE, actor and critic, reward to go, nested batches.

The environment is a corridor in which steps to the right are rewarded.
"""

import random

import numpy as np
import torch
from ecosystem.programs import program
from torch import nn
from torch.distributions import Categorical

F = nn.functional


class Corridor:
  """Corridor with a state of four numbers; it ends at either end or after 12 steps."""

  def __init__(self):
    self.source = np.random.default_rng(0)

  def reset(self):
    self.position, self.steps = 0.1 * self.source.standard_normal(), 0
    return self._seen()

  def _seen(self):
    place = self.position
    return np.array([1.0, place, place**2, self.steps / 12], dtype=np.float32)

  def step(self, action: int):
    self.position += 0.2 if action == 1 else -0.2
    self.steps += 1
    is_over = abs(self.position) > 1 or self.steps == 12
    return self._seen(), float(action == 1), is_over


def _learns(returns, count: int) -> bool:
  return np.mean(returns[-count:]) > np.mean(returns[:count])


@program("REINFORCE: 20 episodes of Categorical.sample")
def reinforce(device):
  world = Corridor()
  policy = nn.Sequential(
    nn.Linear(4, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2), nn.Softmax(dim=1)
  ).to(device)
  optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
  eps, returns = np.finfo(np.float32).eps.item(), []
  for _ in range(20):
    state, is_over, saved, rewards = world.reset(), False, [], []
    while not is_over:
      probs = policy(torch.from_numpy(state).float().unsqueeze(0).to(device))
      choice = Categorical(probs)
      action = choice.sample()
      saved.append(choice.log_prob(action))
      state, reward, is_over = world.step(action.item())
      rewards.append(reward)
    total, gains = 0.0, []
    for reward in reversed(rewards):
      total = reward + 0.99 * total
      gains.insert(0, total)
    gains = torch.tensor(gains, device=device)
    gains = (gains - gains.mean()) / (gains.std() + eps)
    losses = [-log_prob * gain for log_prob, gain in zip(saved, gains, strict=True)]
    optimizer.zero_grad()
    torch.cat(losses).sum().backward()
    optimizer.step()
    returns.append(sum(rewards) / len(rewards))
  return {
    "learns": bool(_learns(returns, 5)),
    "episodes": len(returns),
  }


class ActorCritic(nn.Module):
  """Model with two heads on one layer."""

  def __init__(self):
    super().__init__()
    self.affine, self.actor, self.critic = (
      nn.Linear(4, 16),
      nn.Linear(16, 2),
      nn.Linear(16, 1),
    )

  def forward(self, x):
    x = F.relu(self.affine(x))
    return F.softmax(self.actor(x), dim=-1), self.critic(x)


@program("actor and critic: smooth L1, actions that are given")
def actor_critic(device):
  world, chance = Corridor(), random.Random(0)
  model = ActorCritic().to(device)
  optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
  losses = []
  for _ in range(6):
    state, is_over, saved, rewards = world.reset(), False, [], []
    while not is_over:
      probs, value = model(torch.from_numpy(state).to(device))
      action = torch.tensor(int(chance.random() < probs[1].item())).to(device)
      saved.append((Categorical(probs).log_prob(action), value))
      state, reward, is_over = world.step(action.item())
      rewards.append(reward)
    gains = torch.tensor(np.cumsum(rewards[::-1])[::-1].copy()).float().to(device)
    of_actor, of_critic = [], []
    for (log_prob, value), gain in zip(saved, gains, strict=True):
      of_actor.append(-log_prob * (gain - value.item()))
      of_critic.append(F.smooth_l1_loss(value, gain.view(1)))
    optimizer.zero_grad()
    loss = torch.stack(of_actor).sum() + torch.stack(of_critic).sum()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return {"losses": losses}


@program("reward to go: batches of episodes, Gaussian policy, KL")
def reward_to_go(device):
  target = torch.tensor([0.5, -0.3], device=device)
  mean = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
  log_std = nn.Parameter(torch.full((2,), -0.5, device=device))
  optimizer = torch.optim.Adam([*mean.parameters(), log_std], lr=2e-2)
  returns = []
  for _ in range(15):
    seen = torch.zeros(16, 2, device=device)
    log_probs, rewards = [], []
    for _ in range(4):
      policy = torch.distributions.Normal(mean(seen), log_std.exp())
      action = policy.sample()
      log_probs.append(policy.log_prob(action).sum(-1))
      seen = (seen + 0.3 * action).clamp(-1, 1)
      rewards.append(-(seen - target).square().sum(-1))
    rewards = torch.stack(rewards)
    to_go = rewards.flip(0).cumsum(0).flip(0)
    advantage = (to_go - to_go.mean(1, keepdim=True)) / (to_go.std() + 1e-6)
    loss = -(torch.stack(log_probs) * advantage.detach()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    returns.append(rewards.sum(0).mean().item())
  old = torch.distributions.Normal(torch.zeros(2, device=device), 1.0)
  kl = torch.distributions.kl_divergence(policy, old)
  return {"learns": bool(_learns(returns, 5)), "kl": bool((kl >= 0).all())}


@program("tensordict: batches of nested tensors, modules, states", library="tensordict")
def nested_batches(device):
  from tensordict import TensorDict
  from tensordict.nn import TensorDictModule, TensorDictSequential

  batch = TensorDict(
    {"state": torch.randn(4, 3), "next": {"reward": torch.arange(4.0)}}, [4]
  ).to(device)
  model = TensorDictSequential(
    TensorDictModule(nn.Linear(3, 2), in_keys=["state"], out_keys=["hidden"]),
    TensorDictModule(nn.Tanh(), in_keys=["hidden"], out_keys=["action"]),
  ).to(device)
  out = model(batch.clone())
  loss = (out["action"].sum(1) * out["next", "reward"]).mean()
  loss.backward()
  halved = TensorDict.from_module(model).data.mul(0.5)
  with halved.to_module(model):
    half = model(batch.clone())["action"]
  stacked = torch.stack([batch, batch + 1])
  written = batch.clone()
  written[0] = batch[3]
  written[batch["next", "reward"] > 1] = batch[:2]
  return {
    "loss": loss,
    "gradient": model[0].module.weight.grad,
    "half": half,
    "stacked": stacked["next", "reward"],
    "written": written["state"],
    "viewed": batch.view(2, 2)["state"],
    "expanded": batch.expand(3, 4)["state"].sum(0),
    "parts": [part["state"] for part in batch.split(2)][1],
    "device": batch.device.type == device,
  }
