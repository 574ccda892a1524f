"""Lowerings of higher-order operators, such as `torch.cond`.

Start at `TABLE`, which has a row for each operator. ATen graphs of `torch.export`, and
of `torch.compile` for plain tensors, run them on arrays (`interpreter.py`). For jax
tensors an operator becomes a transformation of `torchax.interop`: in eager mode, in
`jax_jit`, and in graphs that `torch.compile` captures.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

from torchax import amp
from torchax.compat import torch_compat
from torchax.environment import default_env, env_on
from torchax.errors import OperatorNotFound
from torchax.graphs import array_loops, tensor_loops
from torchax.graphs.fx import (
  draw_at_sites,
  inner_graph,
  may_draw,
  meta,
  results_of,
  user_name,
  where,
)
from torchax.interop import loops, mismatches
from torchax.interop.views import call_torch
from torchax.ops.jaten import flex_attention
from torchax.registry.names import aten, higher_order, present
from torchax.rng import RngStream, current, restore, rng_scope, snapshot
from torchax.rng.counter import advance_past_branches
from torchax.tensor import Tensor
from torchax.view import View

# On arrays ----------------------------------------------------------------------------


def _cond(part, predicate, on_true, on_false, operands=()):
  """Run `torch.cond` by `lax.switch`.

  Both branches draw from the current offset of the stream. The stream then advances
  by the larger number of draws, whichever branch ran.
  """
  graphs = (on_false, on_true)
  forms: dict = {}

  def branch(number: int) -> Callable:
    run = part(graphs[number])

    def branch(_):
      out = run(*operands)
      forms[number] = mismatches.describe_tree(out)
      return out

    return branch

  branches = [branch(0), branch(1)]
  stream = current() if any(map(may_draw, graphs)) else None
  streams: dict[int, RngStream] = {}
  if stream is not None:
    stream.check("torch.cond")
    branches = [_with_stream(b, stream, streams, n) for n, b in enumerate(branches)]
  index = jnp.asarray(predicate, bool).reshape(()).astype(jnp.int32)
  with mismatches.rewording_type_errors(lambda: _mismatch(graphs, forms)):
    out = lax.switch(index, branches, None)
  if stream is not None:
    advance_past_branches(stream, list(streams.values()))
  return out


def _with_stream(branch: Callable, stream: RngStream, streams: dict, number: int):
  """Run a branch with a nested stream, which is stored in `streams[number]`."""

  def run(_):
    streams[number] = stream.nest()
    with rng_scope(streams[number]):
      return branch(_)

  return run


def _mismatch(graphs, forms: dict) -> str | None:
  names = [user_name(graph.graph) for graph in graphs]
  return mismatches.branch_mismatch_message("cond", names, forms)


def require_equal_branches(node: fx.Node) -> None:
  """Check that the branches of a `torch.cond` have equal results.

  torch allows different sizes, and treats such a size as data-dependent.

  Raises:
    TypeError: the results differ in shape, dtype or structure.
  """
  if node.target is not higher_order.cond:
    return
  branches: Any = node.args[1:3]
  graphs: list[Any] = [inner_graph(branch) for branch in reversed(branches)]
  message = _mismatch(graphs, dict(enumerate(map(_forms_of, graphs))))
  if message is not None:
    raise TypeError(f"{message}{where(node)}")


def _forms_of(graph: fx.GraphModule):
  """Return dtype and shape of a graph's results, like `mismatches.describe_tree`."""
  values = map(meta, results_of(graph.graph))
  return tuple(
    f"{value.dtype} of shape {list(value.shape)}"
    if isinstance(value, torch.Tensor)
    else str(value)
    for value in values
  )


def _without_gradients(part, enabled, graph, *args):
  out = part(graph)(*args)
  return out if enabled else jax.tree.map(lax.stop_gradient, out)


def _flex_attention(
  part,
  query,
  key,
  value,
  score_mod,
  block_mask,
  scale,
  kernel_options,
  score_operands=(),
  mask_operands=(),
):
  return flex_attention.attention(
    query,
    key,
    value,
    block_mask[2:6],
    score_operands,
    mask_operands,
    scale,
    score_mod=part(score_mod),
    mask_mod=part(block_mask[-1]),
    block_size=block_mask[-3:-1],
  )


# On tensors ---------------------------------------------------------------------------


def _cond_of_tensors(predicate, on_true, on_false, operands=()):
  operands = tuple(operands)
  if not isinstance(predicate, torch.Tensor):
    return (on_true if predicate else on_false)(*operands)
  return loops.cond(predicate.reshape(()), on_true, on_false, *operands)


def _prepare_graphs(function: Callable) -> Callable:
  """Make the graphs that a function takes draw at the sites of their modules."""

  def run(*args, **kwargs):
    for graph in args:
      if isinstance(graph, fx.GraphModule):
        draw_at_sites(graph)
        name = user_name(graph.graph)
        if name:
          graph.__name__ = name  # for messages, in place of Dynamo's `cond_true_0`
    return function(*args, **kwargs)

  return run


def _run_with_rng_state(state: torch.Tensor, operation, *args, **kwargs):
  before = snapshot()
  restore(state)
  try:
    return operation(*args, **kwargs)
  finally:
    restore(before)


def _out_dtype(operation, dtype: torch.dtype, *args) -> torch.Tensor:
  """Run an operation in a wide enough dtype; return the result in `dtype`."""
  tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
  dtypes = {tensor.dtype for tensor in tensors}
  if operation is aten.mm.default and dtype is torch.int32 and dtypes == {torch.int8}:
    return aten._int_mm.default(*args)
  wide = functools.reduce(torch.promote_types, dtypes, dtype)
  cast = [arg.to(wide) if isinstance(arg, torch.Tensor) else arg for arg in args]
  return operation(*cast).to(dtype)


def _checkpoint(body: fx.GraphModule, *args, **kwargs):
  """Checkpoint a body and its random state, which torch leaves to its compiler."""
  kwargs = {**kwargs, "use_reentrant": False, "preserve_rng_state": True}
  context = body.meta.get("_checkpoint_context_fn")
  if context is not None:
    kwargs["context_fn"] = context
  # `fx.GraphModule.__call__` would print the exception with which torch stops a
  # recomputation early.
  return checkpoint(body.forward, *args, **kwargs)


class _Captured(fx.Interpreter):
  """Interpreter of Dynamo's graph of a function, on 0-d tensors that have no values.

  Dynamo passes a captured Python float as a 0-d tensor, and takes its `item()`.
  """

  def call_method(self, target, args, kwargs):
    return args[0] if target == "item" else super().call_method(target, args, kwargs)


def _on_arrays(graph: fx.GraphModule) -> Callable:
  """Return the function of arrays of a graph of Dynamo."""

  def run(*arrays):
    with torch_compat.with_function_overrides():
      return call_torch(_Captured(graph).run, *arrays)

  return run


def _number_or_tensor(tensor: torch.Tensor):
  is_number = not isinstance(tensor, Tensor) and not tensor.dim()
  return tensor.item() if is_number else tensor


def _flex_attention_of_tensors(
  query, key, value, score_mod, block_mask, scale, kernel_options, *operands
):
  """Run `flex_attention`, compiled once per graph of its functions.

  Dynamo has captured the functions, so that captured tensors are operands.
  """
  if not all(isinstance(f, fx.GraphModule) for f in (score_mod, block_mask[-1])):
    # torch's flag for debugging these functions keeps Dynamo out.
    return torch_compat.unfused_flex_attention(
      query, key, value, score_mod, block_mask, scale, kernel_options, *operands
    )
  dtype = amp.dtype_in_force() or query.dtype
  tensors = (tensor.to(dtype) for tensor in (query, key, value))
  operands = torch_pytree.tree_map_only(torch.Tensor, _number_or_tensor, operands)
  arguments = (*tensors, score_mod, block_mask, scale, None, *operands)
  return env_on().functions.call(
    _flex_attention,
    _on_arrays,
    *arguments,
    numbers=("scale", "score_operands", "mask_operands"),
  )


# On fakes -----------------------------------------------------------------------------


def _map_of_fakes(function, xs, additional=(), mutated_arg_indices=""):
  return _scan_of_fakes(function, (), xs, additional)


def _while_of_fakes(condition, body, carried, additional=(), mutated_arg_indices=""):
  for value in carried:
    if not isinstance(value, torch.Tensor):
      raise TypeError(
        "torch.while_loop on jax expects tensors in its carry, but got "
        f"{type(value).__name__}. Pass `torch.tensor({value})` on the device."
      )
  return tuple(body(*carried, *additional))


def _scan_of_fakes(combine, init, xs, additional=(), mutated_arg_indices=""):
  length = xs[0].shape[0]
  results = tuple(combine(*init, *[x.select(0, 0) for x in xs], *additional))
  ys = [y.expand(length, *y.shape).clone() for y in results[len(init) :]]
  return *results[: len(init)], *ys


def _flex_attention_of_fakes(query, key, value, *others):
  out = query.new_empty(
    *query.shape[:-1], value.shape[-1], dtype=amp.dtype_in_force() or query.dtype
  )
  wide = torch.promote_types(out.dtype, torch.float32)
  statistics = [query.new_empty(query.shape[:-1], dtype=wide) for _ in range(2)]
  return out, *statistics


# The table ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HigherOrder:
  """Implementations of a higher-order operator.

  Attributes:
    on_arrays: `(part, *args, **kwargs) -> arrays`, where `part(graph)` is a function of
      arrays. None: graphs of ATen operations raise OperatorNotFound.
    on_tensors: function of the operator's arguments, with jax tensors. None: torch runs
      the operator.
    on_fakes: function that returns fake results. It is needed if torch's own rule only
      takes torch's class of fake tensors.
    has_overrides: True if torch lets modes and tensor classes override the operator.
      Otherwise the operator is replaced in Dynamo's graphs.
  """

  on_arrays: Callable | None = None
  on_tensors: Callable | None = None
  on_fakes: Callable | None = None
  has_overrides: bool = True


TABLE: dict[Any, HigherOrder] = present(
  {
    higher_order.cond: HigherOrder(
      _cond,
      _prepare_graphs(_cond_of_tensors),
      lambda predicate, on_true, on_false, operands=(): on_true(*operands),
    ),
    higher_order.while_loop: HigherOrder(
      array_loops.while_loop, _prepare_graphs(tensor_loops.while_loop), _while_of_fakes
    ),
    higher_order.scan: HigherOrder(
      array_loops.scan, _prepare_graphs(tensor_loops.scan), _scan_of_fakes
    ),
    higher_order.map_impl: HigherOrder(
      array_loops.map_slices,
      _prepare_graphs(tensor_loops.map_slices),
      _map_of_fakes,
    ),
    higher_order.associative_scan: HigherOrder(
      array_loops.associative_scan,
      _prepare_graphs(tensor_loops.associative_scan),
      lambda combine, xs, additional=(): tuple(map(torch.clone, xs)),
    ),
    higher_order.invoke_subgraph: HigherOrder(
      lambda part, graph, identifier, *operands: tuple(part(graph)(*operands)),
      _prepare_graphs(lambda graph, identifier, *operands: graph(*operands)),
    ),
    higher_order.wrap_with_set_grad_enabled: HigherOrder(_without_gradients),
    higher_order.flex_attention: HigherOrder(
      _flex_attention, _flex_attention_of_tensors, _flex_attention_of_fakes
    ),
    higher_order.tag_activation_checkpoint: HigherOrder(
      on_tensors=_checkpoint, has_overrides=False
    ),
    higher_order.out_dtype: HigherOrder(
      lambda part, operation, dtype, *args: call_torch(
        functools.partial(_out_dtype, operation, dtype), *args
      ),
      _out_dtype,
    ),
    higher_order.run_and_save_rng_state: HigherOrder(
      on_tensors=lambda op, *args, **kwargs: (snapshot(), op(*args, **kwargs))
    ),
    higher_order.run_with_rng_state: HigherOrder(on_tensors=_run_with_rng_state),
  }
)


def on_arrays(operation) -> Callable:
  """Return the implementation on arrays of a higher-order operator.

  Raises:
    OperatorNotFound: there is none.
  """
  row = TABLE.get(operation)
  if row is None or row.on_arrays is None:
    names = sorted(op.name() for op, row in TABLE.items() if row.on_arrays)
    raise OperatorNotFound(
      f"torch.ops.higher_order.{operation.name()} takes graphs and has no lowering. "
      f"Those that do are {', '.join(names)}."
    )
  return row.on_arrays


def replacement(operation) -> Callable | None:
  """Return the function that replaces an operator in graphs on jax, if any."""
  row = TABLE.get(operation)
  return None if row is None or row.has_overrides else row.on_tensors


def on_fakes(operation) -> Callable | None:
  """Return the function for fake jax tensors; None if torch's own rule applies."""
  row = TABLE.get(operation)
  return None if row is None else row.on_fakes


# Eagerly ------------------------------------------------------------------------------


def _overrides() -> dict:
  rows = TABLE.items()
  return {
    op: row.on_tensors for op, row in rows if row.on_tensors and row.has_overrides
  }


def register_functions(env) -> None:
  """Add the operators to an environment's function table."""
  for operation, function in _overrides().items():
    env.functions.add(operation, _Handler(operation, function))


class _Handler:
  """Override of an operator that applies if any argument is on jax."""

  def __init__(self, operation, function):
    self.operation, self.function = operation, function

  def __call__(self, args, kwargs):
    leaves = torch_pytree.tree_leaves((args, kwargs))
    if any(isinstance(leaf, Tensor) for leaf in leaves):
      return self.function(*args, **kwargs)
    return self.operation(*args, **kwargs)


def register_kernels() -> None:
  """Register the operators with torch for jax tensors outside of environments."""
  for operation, function in _overrides().items():
    for cls in (Tensor, View):
      operation.py_impl(cls)(_enable(function))


def _enable(function):
  def run(*args, **kwargs):
    with default_env():
      return function(*args, **kwargs)

  return run
