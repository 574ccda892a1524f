"""Draws with each of torch's APIs, of a tensor of shape (6,) with numbers in (0, 1)."""

import torch
import torch.nn.functional as F

DRAWS = {
  "rand": lambda x: torch.rand(6, device="jax"),
  "dropout": lambda x: F.dropout(x, 0.3),
  "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
  "randn": lambda x: torch.randn(6, device="jax"),
  "randint": lambda x: torch.randint(-5, 100, (6,), device="jax"),
  "randperm": lambda x: torch.randperm(6, device="jax"),
  "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.4)),
  "normal": lambda x: torch.normal(x.detach(), 2.0),
  "normal_": lambda x: torch.empty_like(x).normal_(1.0, 3.0),
  "uniform_": lambda x: torch.empty_like(x).uniform_(-1.0, 3.0),
  "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
  "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
  "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
  "geometric_": lambda x: torch.empty_like(x).geometric_(0.2),
  "random_": lambda x: torch.empty_like(x).random_(3, 77),
  "multinomial": lambda x: torch.multinomial(x.detach(), 3),
  "multinomial with replacement": lambda x: torch.multinomial(x.detach(), 3, True),
  "bfloat16": lambda x: torch.randn(6, device="jax", dtype=torch.bfloat16),
  "rand_like": lambda x: torch.rand_like(x),
  "dropout2d": lambda x: F.dropout2d(x.view(1, 6, 1, 1), 0.3),
}


def all_draws(x) -> list[torch.Tensor]:
  return [draw(x) for draw in DRAWS.values()]
