"""Higher-order operators, such as `torch.cond`: how each one runs.

`TABLE` has a row for each operator. A graph of ATen operations, which `torch.export`
or `torch.compile` of plain tensors makes, runs on arrays (`interpreter.py`). On jax
tensors an operator runs by a JAX transformation of `torchax.interop`: eagerly, in
`jax_jit`, and in a graph that `torch.compile` captures.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

from torchax.environment import default_env
from torchax.errors import OperatorNotFound, RngError
from torchax.graphs.fx import (
  at_sites,
  inner,
  may_draw,
  meta,
  returned,
  user_name,
  where,
)
from torchax.interop import loops, mismatches
from torchax.registry.names import higher_order, present
from torchax.rng import RngState, RngStream, current, rng_scope
from torchax.rng.sites import advance_past_branches
from torchax.tensor import Tensor
from torchax.view import View

# On arrays ----------------------------------------------------------------------------


def _cond(part, predicate, on_true, on_false, operands=()):
  """Both branches draw from where the stream stands, which moves as far as either."""
  graphs = (on_false, on_true)
  forms: dict = {}

  def branch(number: int) -> Callable:
    run = part(graphs[number])

    def branch(_):
      out = run(*operands)
      forms[number] = mismatches.forms_of(out)
      return out

    return branch

  branches = [branch(0), branch(1)]
  stream = current() if any(map(may_draw, graphs)) else None
  inside: dict[int, RngStream] = {}
  if stream is not None:
    stream.check("torch.cond")
    branches = [_drawing(b, stream, inside, n) for n, b in enumerate(branches)]
  index = jnp.asarray(predicate, bool).reshape(()).astype(jnp.int32)
  with mismatches.explained(lambda: _mismatch(graphs, forms)):
    out = lax.switch(index, branches, None)
  if stream is not None:
    advance_past_branches(stream, list(inside.values()))
  return out


def _drawing(branch: Callable, stream: RngStream, inside: dict, number: int):
  """A branch with the stream in its own trace, which is then `inside[number]`."""

  def run(_):
    inside[number] = stream.nested()
    with rng_scope(inside[number]):
      return branch(_)

  return run


def _mismatch(graphs, forms: dict) -> str | None:
  names = [user_name(graph.graph) for graph in graphs]
  return mismatches.of_branches("cond", names, forms)


def require_equal_branches(node: fx.Node) -> None:
  """Checks the branches of a `torch.cond`.

  torch lets the sizes of their results differ, and takes the size for one that depends
  on data.

  Args:
    node: any operation of a graph of ATen operations.

  Raises:
    TypeError: the results differ in shape, dtype or structure.
  """
  if node.target is not higher_order.cond:
    return
  branches: Any = node.args[1:3]
  graphs: list[Any] = [inner(branch) for branch in reversed(branches)]
  said = _mismatch(graphs, dict(enumerate(map(_forms_of, graphs))))
  if said is not None:
    raise TypeError(f"{said}{where(node)}")


def _forms_of(graph: fx.GraphModule):
  """The dtypes and shapes of a graph's results, as `mismatches.forms_of` has them."""
  values = map(meta, returned(graph.graph))
  return tuple(
    f"{value.dtype} of shape {list(value.shape)}"
    if isinstance(value, torch.Tensor)
    else str(value)
    for value in values
  )


def _while_loop(part, condition, body, carried, additional=()):
  """The body draws from a child stream of the current one, which moves by one draw."""
  if may_draw(condition):
    raise RngError(
      "The condition of torch.while_loop draws random numbers. Draw in the body, and "
      "pass what the condition needs among the carried values."
    )
  test, step = part(condition), part(body)
  key = current().next_key("torch.while_loop") if may_draw(body) else None

  def holds(values):
    result = test(*values, *additional)
    result = result[0] if isinstance(result, tuple | list) else result
    return jnp.asarray(result).reshape(())

  def turn(state):
    count, values = state
    if key is None:
      results = step(*values, *additional)
    else:
      with rng_scope(RngState(key, count)) as child:
        results = step(*values, *additional)
        count += child.draws
    return count, tuple(jnp.asarray(n, old.dtype) for n, old in zip(results, values))

  start = jnp.uint32(0), tuple(map(jnp.asarray, carried))
  return lax.while_loop(lambda state: holds(state[1]), turn, start)[1]


def _without_gradients(part, enabled, graph, *args):
  out = part(graph)(*args)
  return out if enabled else jax.tree.map(lax.stop_gradient, out)


def _subgraph(part, graph, identifier, *operands):
  return tuple(part(graph)(*operands))


# On tensors ---------------------------------------------------------------------------


def _cond_of_tensors(predicate, on_true, on_false, operands=()):
  operands = tuple(operands)
  if not isinstance(predicate, torch.Tensor):
    return (on_true if predicate else on_false)(*operands)
  for branch in (on_true, on_false):
    if isinstance(branch, fx.GraphModule):
      at_sites(branch)
      name = user_name(branch.graph)
      if name:
        branch.__name__ = name  # for messages, in place of Dynamo's `cond_true_0`
  return loops.cond(predicate.reshape(()), on_true, on_false, *operands)


def _cond_of_fakes(predicate, on_true, on_false, operands=()):
  return on_true(*operands)


def _checkpoint(body: fx.GraphModule, *args, **kwargs):
  """A checkpoint that keeps the random state, which torch leaves to its compiler."""
  kwargs = {**kwargs, "use_reentrant": False, "preserve_rng_state": True}
  context = body.meta.get("_checkpoint_context_fn")
  if context is not None:
    kwargs["context_fn"] = context
  # A module of torch.fx would print the exception by which torch ends a recomputation.
  return checkpoint(body.forward, *args, **kwargs)


# The table ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HigherOrder:
  """How a higher-order operator runs.

  Attributes:
    on_arrays: `(part, *args, **kwargs) -> arrays`, where `part(graph)` is a function of
      arrays. Without it the operator is refused in graphs of ATen operations.
    on_tensors: a function of the operator's arguments, with jax tensors. Without it
      torch runs the operator.
    on_fakes: a function that gives fake results. It is needed where torch's own rule
      takes fake tensors of torch's class only.
    has_overrides: torch lets modes and tensor classes override the operator. One
      without overrides is replaced in Dynamo's graphs.
  """

  on_arrays: Callable | None = None
  on_tensors: Callable | None = None
  on_fakes: Callable | None = None
  has_overrides: bool = True


# torch does not capture `torch.while_loop` and `scan` on wrapper tensors: on jax, use
# `interop.while_loop` and `interop.scan`.
TABLE: dict[Any, HigherOrder] = present(
  {
    higher_order.cond: HigherOrder(_cond, _cond_of_tensors, _cond_of_fakes),
    higher_order.while_loop: HigherOrder(_while_loop),
    higher_order.invoke_subgraph: HigherOrder(_subgraph),
    higher_order.wrap_with_set_grad_enabled: HigherOrder(_without_gradients),
    higher_order.tag_activation_checkpoint: HigherOrder(
      on_tensors=_checkpoint, has_overrides=False
    ),
  }
)


def on_arrays(operation) -> Callable:
  """What runs an operation in a graph of ATen operations; see `HigherOrder`.

  Raises:
    OperatorNotFound: nothing does.
  """
  row = TABLE.get(operation)
  if row is None or row.on_arrays is None:
    known = sorted(op.name() for op, row in TABLE.items() if row.on_arrays)
    raise OperatorNotFound(
      f"torch.ops.higher_order.{operation.name()} takes graphs and has no lowering. "
      f"Those that do are {', '.join(known)}."
    )
  return row.on_arrays


def replacement(operation) -> Callable | None:
  """What a graph on jax calls in place of an operation; None where it may stay."""
  row = TABLE.get(operation)
  return None if row is None or row.has_overrides else row.on_tensors


def on_fakes(operation) -> Callable | None:
  """What gives the shapes of an operation on jax tensors; None where torch does."""
  row = TABLE.get(operation)
  return None if row is None else row.on_fakes


# Eagerly ------------------------------------------------------------------------------


def _overrides() -> dict:
  rows = TABLE.items()
  return {
    op: row.on_tensors for op, row in rows if row.on_tensors and row.has_overrides
  }


def register_functions(env) -> None:
  """Adds the operations to an environment's function table."""
  for operation, function in _overrides().items():
    env.functions.add(operation, _Handler(operation, function))


class _Handler:
  """Runs an operation in place of torch where a tensor is on jax."""

  def __init__(self, operation, function):
    self.operation, self.function = operation, function

  def __call__(self, args, kwargs):
    leaves = torch_pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
      return self.function(*args, **kwargs)
    return self.operation(*args, **kwargs)


def register_kernels() -> None:
  """Has torch run the operations here for jax tensors outside of environments."""
  for operation, function in _overrides().items():
    for cls in (Tensor, View):
      operation.py_impl(cls)(_enabled(function))


def _enabled(function):
  def run(*args, **kwargs):
    with default_env():
      return function(*args, **kwargs)

  return run
