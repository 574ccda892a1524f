"""Plans of operations whose lowering is a function of tensors.

Such a function is torch's decomposition, compiled as one program, or a lowering that
calls torch operations. `Dispatcher` builds these plans; see `plans.py` for lowerings on
arrays.
"""

import dataclasses

import jax

from torchax.compat import jax_compat, torch_compat
from torchax.core import host_numbers
from torchax.core.storage import active as _active
from torchax.dispatch import explaining, torch_derivatives
from torchax.dispatch.operands import IGNORED
from torchax.dispatch.plans import Plan
from torchax.registry.derivatives import formula_of
from torchax.registry.operators import Kind, Operator
from torchax.tensor import Tensor, new_tensor


class DecompositionPlan(Plan):
  """Plan of an operation that runs torch's decomposition, compiled as one function.

  torch's decompositions branch on numbers, so all numbers are static.
  """

  def __init__(self, op, operator: Operator, env):
    def on_arrays(*args, **kwargs):
      args, kwargs = _tensors((args, kwargs), env)
      # A compiled decomposition must not depend on the modes of its first call.
      with torch_compat.without_function_modes(), torch_compat.without_autocast():
        return _arrays(operator.func(*args, **kwargs))

    array_operator = dataclasses.replace(operator, func=on_arrays, kind=Kind.ARRAYS)
    super().__init__(op, array_operator, env)


def _tensors(tree, env):
  return jax.tree.map(
    lambda leaf: new_tensor(leaf, env) if isinstance(leaf, jax.Array) else leaf, tree
  )


def _arrays(tree):
  return jax.tree.map(
    lambda leaf: leaf.jax() if isinstance(leaf, Tensor) else leaf, tree
  )


class TensorPlan:
  """Plan of an operation whose lowering takes tensors and may call torch operations.

  Its derivative under JAX is torch's backward formula, if the operation needs that.
  """

  def __init__(self, op, operator: Operator, env):
    self.op = op
    self.operator = operator
    self.env = env
    self._formula = formula_of(op)

  def __call__(self, args, kwargs):
    if self._formula is None or jax_compat.is_top_level():
      return self._call(args, kwargs)
    # `with_derivative_of` takes arrays.
    given = _arrays((list(args), kwargs or {}))
    found = torch_derivatives.with_derivative_of(
      self._formula, self._lower, self.env, *given
    )
    return _tensors(found, self.env)

  def _lower(self, args, kwargs):
    return _arrays(self._call(*_tensors((args, kwargs), self.env)))

  def _call(self, args, kwargs):
    try:
      return self._run(args, kwargs)
    except explaining.EXPLAINED as error:
      explaining.raise_as_torch(error, self.op, args, kwargs, self.operator)
      raise

  def _run(self, args, kwargs):
    dropped = IGNORED - {"generator"}  # the operations it calls draw from the generator
    kwargs = {k: v for k, v in (kwargs or {}).items() if k not in dropped}
    if _active.boundary is not None:
      args = [host_numbers.concretize(arg) for arg in args]
      kwargs = {k: host_numbers.concretize(v) for k, v in kwargs.items()}
    if self.operator.needs_env:
      kwargs["env"] = self.env
    return self.operator.func(*args, **kwargs)
