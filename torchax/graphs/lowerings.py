"""What runs in an exported program besides the registered lowerings.

Sizes and assertions, views as copies, branches and loops. The composite operations that
are kept whole are in `composites.py`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torchax.errors import RngError
from torchax.export.preparation import may_draw
from torchax.ops import mappings, ops_registry
from torchax.ops.names import aten, higher_order, present, resolve
from torchax.rng import RngState, current, rng_scope

# Sizes and assertions ----------------------------------------------------------------


def _size(self, dim=None):
  return self.shape if dim is None else self.shape[dim]


def _item(self):
  """The number of an array, which must not be traced."""
  return self.item()


def _assert_scalar(self, message):
  """Raises RuntimeError where a number is zero; undecided ones are JAX's to check."""
  if self is None or isinstance(self, jax.core.Tracer):
    return
  if not self:
    raise RuntimeError(message)


def _nothing(*args, **kwargs):
  """For what torch itself has checked when the program was exported."""


ON_ARRAYS: dict = {
  aten.sym_size.int: _size,
  aten.sym_size.default: _size,
  aten.sym_numel.default: lambda self: math.prod(self.shape),
  aten._local_scalar_dense.default: _item,
  aten._assert_scalar.default: _assert_scalar,
  aten._assert_tensor_metadata.default: _nothing,
  aten.sym_constrain_range.default: _nothing,
  aten.sym_constrain_range_for_size.default: _nothing,
}
ASSERTIONS = frozenset(op for op, f in ON_ARRAYS.items() if f is _assert_scalar)


def _maximum(left, right):
  return jax.core.max_dim(left, right)


def _minimum(left, right):
  return jax.core.min_dim(left, right)


def _sym_float(value):
  return jnp.asarray(value, float) if not isinstance(value, int) else float(value)


NUMBERS: dict = {
  torch.sym_max: _maximum,
  torch.sym_min: _minimum,
  torch.sym_float: _sym_float,
}

# Views -------------------------------------------------------------------------------


def copy_of(op):
  """The operation that copies what a view shows, if it has a lowering; else None."""
  packet = getattr(aten, f"{op.overloadpacket.__name__.lstrip('_')}_copy")
  overload = resolve(getattr(packet, op._overloadname))
  table = ops_registry.all_aten_ops
  return overload if overload in table or resolve(packet) in table else None


def _slice(self, dim=0, start=None, end=None, step=1):
  return self[(slice(None),) * (dim % self.ndim) + (slice(start, end, step),)]


def _select(self, dim, index):
  return self[(slice(None),) * (dim % self.ndim) + (index,)]


def _arange(start, end=None, step=1, *, dtype=torch.int64):
  """Whole numbers; the sizes that bound them need not be known."""
  start, end = (0, start) if end is None else (start, end)
  return jnp.arange(start, end, step, dtype=mappings.t2j_dtype(dtype or torch.int64))


# For arrays with sizes that are symbols.
SYMBOLIC: dict = {
  aten.arange.default: _arange,
  aten.arange.start: _arange,
  aten.arange.start_step: _arange,
  aten.view.default: jnp.reshape,
  aten._unsafe_view.default: jnp.reshape,
  aten.slice.Tensor: _slice,
  aten.select.int: _select,
}

# Branches and loops ------------------------------------------------------------------


def _cond(part, pred, true_graph, false_graph, operands=()):
  """Both branches draw from where the stream stands, which moves as far as either."""
  branches = [part(graph) for graph in (true_graph, false_graph)]
  if not (may_draw(true_graph) or may_draw(false_graph)):
    return lax.cond(pred, *[lambda _, f=f: f(*operands) for f in branches], None)
  stream = current()
  position = stream.peek("torch.cond")
  moved = []

  def drawing(branch):
    def run(_):
      with rng_scope(RngState(position.key, position.count)) as inner:
        out = branch(*operands)
        moved.append(inner.draws)
        return out

    return run

  out = lax.cond(pred, *map(drawing, branches), None)
  stream.advance(max(moved))
  return out


def _while_loop(part, cond_graph, body_graph, carried, additional=()):
  if may_draw(cond_graph) or may_draw(body_graph):
    raise RngError(
      "torch.while_loop with a draw in it cannot be exported: how far it moves the "
      "random state is not known. Draw before the loop."
    )
  test, body = part(cond_graph), part(body_graph)

  def holds(values):
    result = test(*values, *additional)
    return result[0] if isinstance(result, tuple | list) else result

  def turn(values):
    return tuple(body(*values, *additional))

  return lax.while_loop(holds, turn, tuple(map(jnp.asarray, carried)))


def _without_gradients(part, enabled, graph, *args):
  out = part(graph)(*args)
  return out if enabled else jax.tree.map(lax.stop_gradient, out)


# (part, *arguments) -> arrays, where `part` makes a function of a graph.
HIGHER_ORDER: dict[object, Callable] = present(
  {
    higher_order.cond: _cond,
    higher_order.while_loop: _while_loop,
    higher_order.wrap_with_set_grad_enabled: _without_gradients,
  }
)


def names() -> list[str]:
  """The higher-order operations that can be exported."""
  return sorted(op.name() for op in HIGHER_ORDER)
