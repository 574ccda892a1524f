"""Compiled programs: a bound on them, their memory back, and numbers that need none."""

import pytest
import torch
from faults.programs import run

import torchax
from torchax.core import programs
from torchax.interop import jax_jit


@pytest.fixture
def bounded():
  """Few programs: the default environment's bound is 10."""
  config = torchax.default_env().config
  before = config.compilation_cache_size
  torchax.clear_caches()
  config.compilation_cache_size = 10
  yield 10
  config.compilation_cache_size = before


GROWING = {
  "an operation, by shape": lambda n: torch.ones(n, device="jax").cos(),
  "an operation, by a static number": lambda n: torch.ones(9, 9, device="jax").diag(n),
  "a torch function, by shape": lambda n: torch.nn.functional.layer_norm(
    torch.ones(2, n + 1, device="jax"), (n + 1,)
  ),
}


@pytest.mark.parametrize("called", GROWING.values(), ids=GROWING)
def test_programs_are_bounded(bounded, called):
  with torchax.default_env():
    for n in range(24):
      called(n)
      assert programs.count() <= bounded


@pytest.mark.parametrize("called", GROWING.values(), ids=GROWING)
def test_nothing_within_the_bound_is_compiled_twice(bounded, called):
  with torchax.default_env():
    for n in range(4):
      called(n)
    known = programs.count()
    for n in range(4):
      called(n)
    assert programs.count() == known


def test_what_is_used_stays(bounded):
  """One function among many: its program is not compiled again."""
  traces = []

  @jax_jit
  def kept(x):
    traces.append(x.shape)
    return x + 1

  with torchax.default_env():
    x = torch.ones(3, device="jax")
    for n in range(24):
      kept(x)
      torch.ones(n, device="jax").cos()
  assert len(traces) == 1


def test_compiled_functions_are_bounded(bounded):
  double = jax_jit(lambda x: 2 * x)
  with torchax.default_env():
    for n in range(24):
      assert double(torch.ones(n, device="jax")).sum() == 2 * n
      assert programs.count() <= bounded


def test_programs_go_with_their_function():
  before = programs.count()
  triple = jax_jit(lambda x: 3 * x)
  triple(torch.ones(3, device="jax"))
  assert programs.count() > before
  del triple
  torchax.clear_caches()
  assert programs.count() == 0


def test_a_backward_pass_survives_a_cleared_cache():
  with torchax.default_env():
    x = torch.arange(4.0, device="jax", requires_grad=True)
    eager = torch.nn.functional.layer_norm(x, (4,)).cos().sum()
    jitted = jax_jit(lambda x: (x * x).sum())(x)
    torchax.clear_caches()
    (eager + jitted).backward()
    reference = torch.arange(4.0, requires_grad=True)
    loss = torch.nn.functional.layer_norm(reference, (4,)).cos().sum()
    (loss + (reference * reference).sum()).backward()
  torch.testing.assert_close(x.grad.cpu(), reference.grad)


def test_random_streams_do_not_notice():
  torch.manual_seed(0)
  expected = [torch.randn(3, device="jax").tolist() for _ in range(2)]
  torch.manual_seed(0)
  found = [torch.randn(3, device="jax").tolist()]
  torchax.clear_caches()
  found.append(torch.randn(3, device="jax").tolist())
  assert found == expected


MEMORY = """
import gc, os, torch, torchax

def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

with torchax.default_env():
  torch.ones(1000, device="jax").softmax(0)
  start = resident()
  for n in range(80):
    torch.ones(n + 2, device="jax").softmax(0)
  full = resident()
  torchax.clear_caches()
  print(start, full, resident())
"""


@pytest.mark.programs
def test_memory_comes_back():
  start, full, cleared = map(float, run(MEMORY).split())
  assert full - start > 40, "80 programs take memory"
  assert cleared - start < (full - start) / 2


@pytest.mark.parametrize("size", [0, -1, 2.5, None, True])
def test_a_size_that_is_none_is_refused(size):
  config = torchax.default_env().config
  before = config.compilation_cache_size
  with pytest.raises(ValueError, match="1 or more"):
    config.compilation_cache_size = size
  assert config.compilation_cache_size == before
