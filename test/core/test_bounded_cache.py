"""Caches of interned and compiled objects are bounded."""

import gc

import pytest
import torch

import torchax
from torchax.core import chains, program_limit, static_values
from torchax.core.bounded_cache import BoundedCache
from torchax.dispatch import programs as operation_programs
from torchax.dispatch import torch_functions
from torchax.interop import JittableModule
from torchax.registry import operators
from torchax.tracing import specialization

LIMIT = 4


def test_cache_keeps_entries_in_use_and_evicts_others():
  cache = BoundedCache(LIMIT)
  for n in range(100):
    cache[n] = str(n)
    assert cache.get(0) == "0"  # used each time, so it is not evicted
    assert len(cache) <= LIMIT + 1
  assert cache.get(98) == "98"
  assert cache.get(50) is None
  cache.clear()
  assert len(cache) == 0 and cache.get(0) is None


def test_an_entry_can_be_replaced():
  cache = BoundedCache(LIMIT)
  for value in "abc":
    cache["key"] = value
  assert cache.get("key") == "c"
  assert len(cache) == 1


def test_a_cache_without_room_is_refused():
  with pytest.raises(ValueError, match="expects limit >= 2, but got 1"):
    BoundedCache(1)


def test_programs_of_an_operation(monkeypatch):
  """One program per value of a static argument; the first is evicted after many."""
  x = torch.ones(3, 3, device="jax")
  x.tril(0)
  plan = torchax.default_env()._dispatcher.plan_for(torch.ops.aten.tril.default)
  monkeypatch.setattr(operation_programs, "MOST_PROGRAMS", LIMIT)
  monkeypatch.setattr(plan, "programs", operation_programs.Programs(plan.lowering))
  for n in [*range(-6, 6), -6]:
    assert torch.equal(x.tril(n).cpu(), torch.ones(3, 3).tril(n))
    assert len(plan.programs) <= LIMIT


def test_programs_of_a_torch_function():
  x = torch.ones(3, 4, device="jax")
  handler = torch_functions.ArrayFunctionHandler(
    torch.nn.functional.layer_norm,
    operators.all_torch_functions[torch.nn.functional.layer_norm],
    torchax.default_env(),
  )
  handler._functions = BoundedCache(LIMIT)
  for n in range(1, 8):
    handler((x, (4,)), {"eps": n / 10})
    assert len(handler._functions) <= LIMIT


def test_static_numbers():
  for n in range(20_000):
    static_values.static_number(n + 0.5)
  assert len(static_values._numbers) <= static_values._numbers.limit


def test_chains_of_views_go_with_the_last_tensor():
  base = torch.arange(60.0, device="jax")
  gc.collect()
  before = len(chains.WHOLE._longer)
  views = [base.view(*shape) for shape in ((2, 30), (30, 2), (3, 20), (20, 3), (4, 15))]
  assert views[0]._chain is base.view(2, 30)._chain
  known = len(chains.WHOLE._longer)
  assert known > before
  del views
  gc.collect()
  assert len(chains.WHOLE._longer) == before


def test_a_kept_chain_stays_the_chain_of_its_steps():
  """The chain is a program's key, so equal steps must give the same chain."""
  base = torch.arange(60.0, device="jax")
  kept = base.view(3, 20).t().reshape(60)._chain
  gc.collect()
  assert base.view(3, 20).t().reshape(60)._chain is kept


def test_views_of_views_are_compiled_once():
  base = torch.arange(60.0, device="jax")
  for n in range(3):
    base.view(3, 20).t().cos()
    gc.collect()
    if n == 0:
      before = program_limit.count()
  assert program_limit.count() == before


def test_specializations_go_with_their_programs():
  model = torch.nn.Dropout(0.5).to("jax")
  x = torch.ones(2, device="jax")

  def run():
    compiled = JittableModule(model)
    for p in (0.1, 0.2, 0.3, 0.4):
      model.p = p
      compiled(x)

  run()
  gc.collect()
  before = len(specialization._known)
  for _ in range(3):
    run()
  gc.collect()
  assert len(specialization._known) <= before + 4
