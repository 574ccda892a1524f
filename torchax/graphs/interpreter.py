"""Interpreter of ATen graphs on arrays, for `torch.export` and `torch.compile`.

Operations run by their lowerings, as in eager mode. Sizes may be symbols of
`jax.export`. An operation whose lowering is written with torch operations runs on
tensors instead. Start at `JaxInterpreter`; `run_operation` runs one operation.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.core import InconclusiveDimensionOperation

from torchax.compat import jax_compat, torch_compat, user_code
from torchax.core import mappings
from torchax.dispatch import device_plans
from torchax.dispatch.decomposed import DecompositionPlan
from torchax.dispatch.operands import IGNORED
from torchax.dispatch.plans import Plan
from torchax.dispatch.transfer import ToCopyPlan
from torchax.environment import env_on
from torchax.errors import DataDependentError, OperatorNotFound, TracedStateError
from torchax.graphs import higher_order, lowerings, strided
from torchax.graphs.fx import (
  in_module_of,
  is_marked_random,
  meta,
  site_of,
  source_line,
  where,
)
from torchax.interop.views import call_torch
from torchax.registry.names import aten
from torchax.registry.schema import schema_of

# Exported programs log their operations here (`torchax.export.DEBUG`).
_logger = logging.getLogger("torchax.export")

_VIEWS_OF_BYTES = frozenset({aten.view.dtype, aten.view_copy.dtype})


class JaxInterpreter(torch.fx.Interpreter):
  """Interpreter of a functional ATen graph on arrays: `run(*states, *inputs)`.

  Args:
    graph_module: graph of an `ExportedProgram` after `run_decompositions`, graph of
      AOTAutograd, or an inner graph of one.
    logs: True to log each operation with its result.
    base: site of the operation that runs an inner graph.

  >>> exported = torch.export.export(torch.nn.Softsign(), (torch.ones(2),))
  >>> graph = exported.run_decompositions().graph_module
  >>> JaxInterpreter(graph).run(jnp.array([1.0, -3.0]))
  (Array([ 0.5 , -0.75], dtype=float32),)
  """

  def __init__(
    self, graph_module: torch.fx.GraphModule, logs: bool = False, base: str = ""
  ):
    super().__init__(graph_module)
    self.extra_traceback = False
    self.logs = logs
    self.base = base

  def run_node(self, n: torch.fx.Node) -> Any:
    """Return the value of a node.

    Raises:
      OperatorNotFound: the operation has no lowering.
      DataDependentError: the shape of the result depends on traced values.
      Exception: raised by the operation; a note names the user's line.
    """
    self.node = n
    try:
      is_higher = isinstance(n.target, torch_compat.HigherOrderOperator)
      if is_higher or is_marked_random(n) or not jax_compat.is_top_level():
        with in_module_of(n, self.base):
          value = super().run_node(n)
      else:
        value = super().run_node(n)
    except jax_compat.NO_VALUE as error:
      has_symbols = self._has_symbols(n) and not _depends_on_data(n)
      raise (_needs_sizes(n) if has_symbols else _data_dependent(n)) from error
    except OperatorNotFound as error:
      raise OperatorNotFound(f"{error.text}{where(n)}") from None
    except Exception as error:
      # An inconclusive comparison or a hash of symbolic sizes.
      is_unhashable = isinstance(error, TypeError) and "unhashable" in str(error)
      is_inconclusive = isinstance(error, InconclusiveDimensionOperation)
      if (is_unhashable or is_inconclusive) and self._has_symbols(n):
        raise _needs_sizes(n) from error
      if isinstance(error, TracedStateError) and _depends_on_data(n):
        raise _data_dependent(n) from error
      if n.op == "call_function":
        error.add_note(f"Raised by {n.target} of a captured graph.{where(n)}")
      raise
    if self.logs:
      shape = jax.tree.map(jnp.shape, value) if n.op == "call_function" else ""
      _logger.info("%s -> %s", n.format_node(), shape)
    return value

  def _has_symbols(self, n: torch.fx.Node) -> bool:
    if not isinstance(n.target, torch_compat.OpOverload):
      return False
    operands = self.fetch_args_kwargs_from_env(n)
    return any(map(_is_symbolic, jax.tree.leaves(_plain(operands))))

  def fetch_attr(self, target: str):
    """Return an attribute of the module, tensors as arrays."""
    value = super().fetch_attr(target)
    is_tensor = isinstance(value, torch.Tensor)
    return env_on().t2j_copy(value.detach()) if is_tensor else value

  def output(self, target, args: tuple, kwargs: dict) -> Any:
    """Return the results in Python's own containers."""
    return _plain(super().output(target, args, kwargs))

  def call_function(self, target, args: tuple, kwargs: dict) -> Any:
    """Run an operation on arrays, or a Python function on numbers."""
    args, kwargs = _plain(tuple(args)), _plain(dict(kwargs))
    if isinstance(target, torch_compat.HigherOrderOperator):

      def inner_function(graph_module) -> Callable:
        return JaxInterpreter(graph_module, self.logs, site_of(self.node)).run

      return higher_order.on_arrays(target)(inner_function, *args, **kwargs)
    if not isinstance(target, torch_compat.OpOverload):
      return self._call_on_sizes(target, args, kwargs)
    if target in strided.STRIDED:

      def operation(**named):
        return run_operation(target, tuple(named.values()), {})

      return strided.run(self.node, operation, args, kwargs, self.env)
    if target in _VIEWS_OF_BYTES:
      mappings.check_bytes(meta(self.node.args[0]).dtype, args[1])
    if env_on().config.check_indices:
      with user_code.using_node_source(source_line(self.node)):
        return run_operation(target, args, kwargs)
    return run_operation(target, args, kwargs)

  def _call_on_sizes(self, function, args, kwargs):
    """Run a Python function of sizes; None if it is inconclusive but only asserted."""
    function = lowerings.NUMBERS.get(function, function)
    try:
      return function(*args, **kwargs)
    except (InconclusiveDimensionOperation, *jax_compat.NO_VALUE):
      if all(user.target in lowerings.ASSERTIONS for user in self.node.users):
        return None
      raise


def _depends_on_data(node: torch.fx.Node) -> bool:
  tags = getattr(node.target, "tags", ())
  return bool(
    {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*tags}
  )


def _data_dependent(node: torch.fx.Node) -> DataDependentError:
  return DataDependentError(
    f"{node.target} needs numbers that have no value yet, as they are being traced: "
    "a shape that depends on data, or `.item()`. Give it a static bound "
    "(`torch.nonzero_static`, `torch.where`), or call the function without "
    f"`jax.jit`.{where(node)}"
  )


def _needs_sizes(node: torch.fx.Node) -> OperatorNotFound:
  return OperatorNotFound(
    f"{node.target} with these arguments needs to know a size that is a symbol in this "
    "program. Export without `dynamic_shapes=` for that dimension, or register a "
    f"lowering that does not (docs: Writing lowerings).{where(node)}"
  )


def _plain(value):
  """Convert the list and dict classes of `torch.fx` to Python's."""
  if isinstance(value, dict):
    return {name: _plain(part) for name, part in value.items()}
  if isinstance(value, list):
    return [_plain(part) for part in value]
  return tuple(map(_plain, value)) if type(value) is tuple else value


def _is_symbolic(value) -> bool:
  if isinstance(value, jax.Array):
    return any(map(jax.export.is_symbolic_dim, value.shape))
  return jax.export.is_symbolic_dim(value)


def run_operation(op, args: tuple, kwargs: dict):
  """Run an overload of ATen on arrays, whose sizes may be symbolic.

  Args:
    op: the overload.
    args, kwargs: arguments as in torch, with arrays instead of tensors.

  Raises:
    OperatorNotFound: the overload writes to its arguments, or has no lowering for
      symbolic sizes.
  """
  schema = schema_of(op)
  if schema.written:
    raise OperatorNotFound(
      f"{op} writes to its argument, but a graph of arrays is functional. Call "
      "`run_decompositions()` on the exported program first."
    )
  kwargs = {k: v for k, v in kwargs.items() if k == "layout" or k not in IGNORED}
  special = lowerings.ON_ARRAYS.get(op) or lowerings.COMPOSITES.get(op)
  if special is not None:
    return special(*args, **kwargs)
  is_symbolic = any(map(_is_symbolic, jax.tree.leaves((args, kwargs))))
  if is_symbolic:
    if op in lowerings.SYMBOLIC:
      return lowerings.SYMBOLIC[op](*args, **kwargs)
    args, kwargs = _with_number_arrays(schema, args, kwargs)
  if schema.is_view:
    op = lowerings.copying_form(op) or op
  plan = device_plans.unwrap(env_on().plan_for(op))
  if isinstance(plan, ToCopyPlan):
    plan = plan.cast  # arrays stay on their device
  if isinstance(plan, Plan) and not (
    is_symbolic and isinstance(plan, DecompositionPlan)
  ):
    return plan.run_on_arrays(args, kwargs, caches=not is_symbolic)
  if is_symbolic:
    raise OperatorNotFound(
      f"{op} runs by torch's decomposition, which needs sizes that are known. Export "
      "without `dynamic_shapes=`, or register a lowering for it "
      "(docs: Writing lowerings)."
    )

  # Use the dispatcher: backward graphs pass numbers where the schema has tensors.
  def dispatch(*args, **kwargs):
    return env_on().dispatch(op, (), args, kwargs)

  return call_torch(dispatch, *args, **kwargs)


def _with_number_arrays(schema, args, kwargs) -> tuple[tuple, dict]:
  """Convert symbolic sizes among the dynamic arguments to 0-d arrays."""

  def convert(name, value):
    is_size = name in schema.dynamic and jax.export.is_symbolic_dim(value)
    return jnp.asarray(value) if is_size else value

  args = tuple(map(convert, schema.names, args))
  return args, {name: convert(name, value) for name, value in kwargs.items()}
