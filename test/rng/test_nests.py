"""Random nests of boundaries, loops, branches and rows draw the eager numbers.

A nest is a list of nodes: a draw by its name, or a kind of boundary with nodes inside.
It runs as the equivalent plain Python program, with its boundaries, and compiled.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from rng.unrolled import scan_unrolled, vmap_unrolled

from torchax.interop import (
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_vmap,
  scan,
)
from torchax.rng import current

DRAWS = {
  "rand": lambda x: torch.rand(6, device="jax"),
  "dropout": lambda x: F.dropout(x, 0.5),
  "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
  "randn": lambda x: torch.randn(6, device="jax"),
  "randint": lambda x: torch.randint(0, 100, (6,), device="jax"),
  "randperm": lambda x: torch.randperm(6, device="jax"),
  "multinomial": lambda x: torch.multinomial(x.detach(), 3),
}
TURNS = 2


def _with_gradient(wrap, function):
  """Return the function as the auxiliary output of a differentiated one."""
  loss = lambda x: ((x * x).sum(), function(x))  # noqa: E731
  differentiated = wrap(jax_value_and_grad(loss, {"has_aux": True}))
  return lambda x: differentiated(x)[0][1]


WRAPPERS = {
  "jit": jax_jit,
  "checkpoint": gradient_checkpoint,
  "grad": lambda f: _with_gradient(lambda g: g, f),
  "jit of grad": lambda f: _with_gradient(jax_jit, f),
}
_different = functools.partial(jax_vmap, randomness="different")
# Kinds with a second list of nodes, the branch not taken.
BRANCHES = ("cond, true", "cond, false")
KINDS = (*WRAPPERS, "scan", "reversed scan", "vmap", *BRANCHES)


def _count(nodes) -> int:
  """Return the number of draws of a nest."""
  total = 0
  for node in nodes:
    if isinstance(node, str):
      total += 1
      continue
    kind, taken, other = node
    inside = _count(taken)
    if kind in BRANCHES:
      inside = max(inside, _count(other))
    total += inside * (1 if kind in (*WRAPPERS, *BRANCHES) else TURNS)
  return total


def _bounds(nodes, x, nested: bool) -> torch.Tensor:
  """Return the least and greatest number of draws, exact for branches."""
  drawn = [t.detach().float().flatten() for t in _run(nodes, x, nested)]
  return torch.stack([torch.cat(drawn).amin(), torch.cat(drawn).amax()])


def _run(nodes, x, nested: bool) -> list[torch.Tensor]:
  """Run a nest; if not `nested`, as the equivalent plain program."""
  drawn = []
  for node in nodes:
    if isinstance(node, str):
      drawn.append(DRAWS[node](x))
      continue
    kind, taken, other = node
    inner = functools.partial(_run, taken, nested=nested)
    if kind in WRAPPERS:
      drawn += (WRAPPERS[kind](inner) if nested else inner)(x)
    elif kind in BRANCHES:
      drawn.append(_branch(kind, taken, other, x, nested))
    elif kind == "vmap":
      vmap = _different if nested else vmap_unrolled
      drawn += vmap(lambda row, f=inner: f(row))(torch.stack([x, x + 1]))
    else:
      loop = scan if nested else scan_unrolled
      body = lambda carry, turn, f=inner: (carry, f(carry + turn))  # noqa: E731
      turns = torch.arange(1.0, TURNS + 1).to("jax")
      drawn += loop(body, x, turns, reverse=kind == "reversed scan")[1]
  return drawn


def _branch(kind, taken, other, x, nested: bool) -> torch.Tensor:
  run = lambda nodes: lambda x: _bounds(nodes, x, nested)  # noqa: E731
  if nested:
    if kind == "cond, true":
      return cond(x.sum() > 0, run(taken), run(other), x)
    return cond(x.sum() < 0, run(other), run(taken), x)
  bounds = run(taken)(x)
  for _ in range(_count(other) - _count(taken)):
    current().next_key()
  return bounds


_NODES = st.recursive(
  st.sampled_from(list(DRAWS)),
  lambda nodes: st.tuples(
    st.sampled_from(KINDS),
    st.lists(nodes, min_size=1, max_size=2),
    st.lists(st.sampled_from(list(DRAWS)), min_size=1, max_size=3),
  ),
  max_leaves=5,
)


def _node(kind: str, *taken, other=("rand",)) -> tuple:
  return kind, taken, other


@hypothesis.given(st.lists(_NODES, min_size=1, max_size=3))
@hypothesis.settings(max_examples=5)
@hypothesis.example(
  [_node("scan", _node("vmap", _node("cond, false", "rand", other=["randn", "rand"])))]
)
@hypothesis.example(
  [_node("vmap", _node("scan", "dropout", _node("checkpoint", "rand")))]
)
@hypothesis.example([_node("cond, true", _node("reversed scan", "randint")), "rand"])
def test_every_nest_draws_the_numbers_of_the_plain_program(nodes):
  x = torch.arange(1.0, 7.0).to("jax")
  compiled = jax_jit(functools.partial(_run, nodes, nested=True))
  results = []
  for program in (
    functools.partial(_run, nodes, nested=False),
    functools.partial(_run, nodes, nested=True),
    compiled,
    compiled,
  ):
    torch.manual_seed(0)
    results.append(program(x))
    assert current().state.count == _count(nodes)
  for result in results[1:]:
    for numbers, expected in zip(result, results[0], strict=True):
      assert torch.equal(numbers, expected)
