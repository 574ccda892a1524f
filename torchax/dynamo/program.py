"""Graph of ATen operations, compiled by JAX as a function of plain torch tensors.

`jax.jit` traces the graph with the lowerings of eager mode, once for each combination
of shapes. Symbolic sizes are static: another size retraces here, without Dynamo. The
packed key and the integers of arithmetic are operands; the positions of draws are
static. `backend.py` creates programs; `torch_io.py` converts their inputs and results.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch import fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from torchax.compat import torch_compat
from torchax.core import mappings, program_limit
from torchax.dynamo import draws, numbers
from torchax.dynamo.options import Options
from torchax.dynamo.sizes import GraphSizes, ListedSizes
from torchax.dynamo.torch_io import (
  Outputs,
  as_numpy,
  is_computed_number,
  is_number,
)
from torchax.environment import default_env
from torchax.errors import DataDependentError, OperatorNotFound
from torchax.graphs import higher_order
from torchax.graphs.fx import (
  attribute,
  inline_effects,
  inputs,
  line_of,
  meta,
  results_of,
  where,
)
from torchax.graphs.interpreter import JaxInterpreter
from torchax.registry.names import aten
from torchax.registry.names import higher_order as operators
from torchax.rng import rng_scope
from torchax.rng.packing import DrawPosition, Form, PackedStream
from torchax.tracing.padded.bucketed import Bucketed


@jax.tree_util.register_static
class _Static:
  """Static results of a trace, returned by every call of the compiled function.

  Attributes:
    values: results other than tensors.
    log: records of the draws.
    checks: functions that raise for wrong values of the checked array results.
  """

  def __init__(self, values: tuple, log: tuple, checks: tuple):
    self.values, self.log, self.checks = values, log, checks


class Keys:
  """Random state and results shared by the graphs of a function.

  Attributes:
    function: name of the function.
    rng: name of the graphs' input with the packed key.
    draws: number of draws in one call of the forward pass.
    sites: number of draws at each site.
    form: static part of the packed key.
    log: draws of the last call, for ledgers.
    visible: number of results of the forward graph for its caller, not to be saved.
  """

  def __init__(self, function: str):
    self.function = function
    self.rng = ""
    self.draws = 0
    self.sites: dict[str, int] = {}
    self.form: Form | None = None
    self.log: tuple = ()
    self.visible = 0


class Program:
  """Compiled graph; a call takes the list of inputs and empties it.

  Args:
    module: the graph and its constants.
    options: options of the backend.
    keys: random state shared with the other graphs of the same function.
    name: name of the program in logs and profiles.
    visible: number of results, the first ones, that share memory as in eager mode.
  """

  # torch then passes the arguments as one list, so that they can be freed early.
  _boxed_call = True

  def __init__(
    self,
    module: fx.GraphModule,
    options: Options,
    keys: Keys,
    name: str,
    visible: int,
  ):
    self.module, self.options, self.keys, self.name = module, options, keys, name
    inline_effects(module.graph)
    self._inputs = inputs(module.graph)
    self._numbers = list(filter(is_number, module.graph.nodes))
    _require_runnable([n for n in module.graph.nodes if not is_number(n)])
    self._changed, values = _remove_changes(module.graph, self._inputs)
    results = [*results_of(module.graph), *values]
    self._outputs = Outputs(results, self._inputs, visible)
    is_rng = [node.name == keys.rng for node in self._inputs]
    self._rng = is_rng.index(True) if True in is_rng else None
    # Tokens of effects are only returned; torch passes None for them.
    self._is_used = [
      isinstance(meta(node), torch.Tensor)
      and any(user.op != "output" for user in node.users)
      for node in self._inputs
    ]
    self._operands = {
      position
      for position, node in enumerate(self._inputs)
      if isinstance(meta(node), torch.SymInt) and numbers.is_operand(node)
    }
    self._constants: dict[str, jax.Array] | None = None
    self._jitted = self._jit()

  def _convert_constants(self) -> dict[str, jax.Array]:
    nodes = self.module.graph.nodes
    constants = {n.target: attribute(n) for n in nodes if n.op == "get_attr"}
    with self.options.apply():
      return {
        name: mappings.t2j(value)
        for name, value in constants.items()
        if isinstance(value, torch.Tensor)
      }

  def _jit(self) -> Callable:
    def pure(static, form, constants, arrays):
      return self._trace(static, form, constants, arrays)

    is_whole = self.name == "inference"
    function = self.keys.function
    pure.__name__ = function if is_whole else f"{function}_{self.name}"
    options = {}
    if self.options.compiler_options:
      options["compiler_options"] = self.options.compiler_options
    if self.options.buckets is None:
      return program_limit.jit(pure, is_of_user=True, static_argnums=(0, 1), **options)
    graph_sizes = GraphSizes([*map(meta, self._inputs)], self.options.buckets)
    counted = program_limit.Counted(pure.__name__, is_of_user=True)
    options["static_argnums"] = (0, 1)
    are_arrays = [
      (is_used or None) if isinstance(meta(node), torch.Tensor) else False
      for node, is_used in zip(self._inputs, self._is_used)
    ]
    sizes = ListedSizes(graph_sizes, are_arrays)
    return counted.of(Bucketed(pure, None, sizes, counted, options))

  # While tracing --------------------------------------------------------------------

  def _trace(self, static, form, constants, arrays):
    used, remaining = iter(arrays), iter(static)
    values: dict[fx.Node, Any] = dict.fromkeys(self._numbers)
    for node, is_used in zip(self._inputs, self._is_used):
      if isinstance(meta(node), torch.Tensor):
        values[node] = next(used) if is_used else None
      else:
        number = next(remaining)
        values[node] = next(used) if number is None else number
    packed = None if self._rng is None else values[self._inputs[self._rng]]
    stream = None if packed is None else PackedStream(packed, form)
    interpreter = _Interpreter(self.module, constants, stream)
    with torch.no_grad(), torch_compat.without_autocast():
      interpreter.run(initial_env=values, enable_io_processing=False)
    values = interpreter.env
    seen = {id(array) for array in arrays}
    computed = self._outputs.in_memory_order(
      [values[node] for node in self._outputs.arrays]
    )
    outputs = [_copy_aliased(array, seen) for array in computed]
    others = tuple(
      values[n] if isinstance(n, fx.Node) else n for n in self._outputs.numbers
    )
    checked = [value for value, _ in interpreter.checks]
    log = () if stream is None else tuple(stream.log)
    checks = tuple(check for _, check in interpreter.checks)
    return (outputs, checked), _Static(others, log, checks)

  # On a call ------------------------------------------------------------------------

  def __call__(self, args: list) -> list:
    if self.options.change_settings:
      with self.options.apply():
        return self._call(args)
    return self._call(args)

  def _call(self, args: list) -> list:
    arrays, static = [], []
    for position, value in enumerate(args):
      if isinstance(value, torch.Tensor):
        if self._is_used[position]:
          arrays.append(as_numpy(value))
      elif position in self._operands and numbers.fits_int32(value):
        arrays.append(value)
        static.append(None)
      else:
        static.append(value)
    passed = {position: args[position] for position in self._outputs.passed}
    changed = [args[position] for position in self._changed]
    args.clear()
    if self._constants is None:
      # Converted on the first call: tensors are fake while torch compiles.
      self._constants = self._convert_constants()
    computed = self._jitted(tuple(static), self.keys.form, self._constants, arrays)
    (outputs, checked), results = jax.block_until_ready(computed)
    for value, check in zip(checked, results.checks):
      check(value)
    if results.log:
      self.keys.log = results.log
    tensors = self._outputs.assemble(passed, outputs, results.values)
    with torch.no_grad():
      for tensor in reversed(changed):
        tensor.copy_(tensors.pop())
    return tensors


def _remove_changes(graph: fx.Graph, arguments: Sequence[fx.Node]) -> tuple[list, list]:
  """Remove the changes of inputs from a graph, which torch puts at its end.

  Returns:
    The positions of the changed inputs, and the nodes of their new values.
  """
  changes = [node for node in graph.nodes if node.target is aten.copy_.default]
  changed = [arguments.index(node.args[0]) for node in changes]
  values = [node.args[1] for node in changes]
  for node in changes:
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)
  return changed, values


class _Interpreter(JaxInterpreter):
  """Interpreter of a graph with constants as operands and with keyed draws.

  Args:
    module: the graph.
    constants: arrays for the tensor attributes of the module, by name.
    stream: stream of the draws, or None.

  Attributes:
    checks: (value, function) of each assertion, called with the value after the call.
  """

  def __init__(self, module: fx.GraphModule, constants: dict, stream):
    super().__init__(module)
    self.garbage_collect_values = False  # `Outputs` may need any of them
    self._constants, self._stream = constants, stream
    self.checks: list[tuple] = []

  def fetch_attr(self, target: str):
    constant = self._constants.get(target)
    return super().fetch_attr(target) if constant is None else constant

  def call_function(self, target, args: tuple, kwargs: dict) -> Any:
    if target in _CHECKS and isinstance(args[0], jax.Array):
      value, *others = args
      check = functools.partial(_CHECKS[target], *others, **kwargs)
      self.checks.append((value, check))
      return None
    if target is draws.run_keyed:
      return self._draw(*args, **kwargs)
    product = _transposed_product(self.node, self.env)
    return super().call_function(target, args, kwargs) if product is None else product

  def _draw(self, packed, position: tuple, operation, *args, **kwargs):
    at_position = self._stream.at(DrawPosition(*position), line_of(self.node))
    with rng_scope(self._stream), at_position:
      return super().call_function(operation, args, kwargs)

  def output(self, target, args: tuple, kwargs: dict) -> None:
    """Return None: `Outputs` selects the results."""


def _check_true(message: str, condition: jax.Array) -> None:
  if not condition:
    raise RuntimeError(message)


def _check_info(name: str, info: jax.Array, **kwargs) -> None:
  aten._linalg_check_errors.default(mappings.j2t(info), name, **kwargs)


# Assertion -> function of its other arguments and of the value that it checks.
_CHECKS = {
  aten._assert_async.default: functools.partial(_check_true, "_assert_async failed"),
  aten._assert_async.msg: _check_true,
  aten._assert_scalar.default: _check_true,
  aten._linalg_check_errors.default: _check_info,
}


def _copy_aliased(array: jax.Array, seen: set[int]) -> jax.Array:
  """Copy an array that is an input or a repeated output; JAX would return an alias."""
  if id(array) in seen:
    return jax.numpy.copy(array)
  seen.add(id(array))
  return array


# Checks before compiling --------------------------------------------------------------


def _require_runnable(steps: Sequence[fx.Node]) -> None:
  """Check that every operation of a graph can run.

  Raises:
    OperatorNotFound: an operation has no lowering; the message has the user's line.
    DataDependentError: the shape of a result depends on the values of a tensor.
    TypeError: the branches of a `torch.cond` have different results.
  """
  for node in steps:
    value = node.meta.get("val")
    if has_free_unbacked_symbols(value) and not is_computed_number(value):
      higher_order.require_equal_branches(node)
      if node.target == operators.while_loop_stack_output:
        raise DataDependentError(
          "The gradient of a torch.while_loop depends on every iteration, and their "
          "number on data, so it cannot be part of a compiled JAX program. Use scan "
          f"with a fixed length, or run the loop eagerly on jax tensors.{where(node)}"
        )
      raise DataDependentError(
        f"{node.target} returns a tensor whose shape depends on the values of a "
        "tensor, so it cannot be part of a compiled JAX program. Leave "
        "torch._dynamo.config.capture_dynamic_output_shape_ops off, and for a size "
        "from `.item()` capture_scalar_outputs too, so that the graph breaks there."
        f"{where(node)}"
      )
    target = node.args[2] if node.target is draws.run_keyed else node.target
    try:
      _require_lowering(node, target)
    except OperatorNotFound as error:
      raise OperatorNotFound(
        f"{error.text}{where(node)} Or keep that code out of the graph with "
        "@torch.compiler.disable."
      ) from None


def _require_lowering(node: fx.Node, target) -> None:
  dispatcher = default_env()._dispatcher
  if isinstance(target, torch_compat.HigherOrderOperator):
    is_other = target not in higher_order.TABLE
    if is_other and node.args and isinstance(node.args[0], torch_compat.OpOverload):
      # `auto_functionalized` has no lowering. The message names the operation in it.
      raise OperatorNotFound(
        f"{node.args[0]} has no lowering for graphs of CPU tensors, because it changes "
        "its arguments. Move the tensors to jax."
      )
    higher_order.on_arrays(target)
  elif isinstance(target, torch_compat.OpOverload):
    dispatcher.plan_for(target)


# Matrix products with transposed operands ---------------------------------------------
# torch's graphs multiply by transposed matrices (`x @ weight.t()`). XLA's CPU backend
# would copy the transposed matrix first. Contracting the other dimension needs no copy.


def _transposed_product(node: fx.Node, values: dict):
  """Return the product if a factor of `node` is a transpose, else None."""
  if node.kwargs or node.target not in _PRODUCTS:
    return None
  *bias, left, right = node.args
  if len(bias) != _PRODUCTS[node.target]:
    return None
  left, left_transposed = _without_transpose(left)
  right, right_transposed = _without_transpose(right)
  if not (left_transposed or right_transposed):
    return None
  left, right = values[left], values[right]
  if left.dtype != right.dtype or not jnp.issubdtype(left.dtype, jnp.inexact):
    return None
  contracted = (int(not left_transposed),), (int(right_transposed),)
  product = lax.dot_general(left, right, (contracted, ((), ())))
  return values[bias[0]] + product if bias else product


# Number of operands before the two matrices.
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}


def _without_transpose(node: fx.Node) -> tuple[fx.Node, bool]:
  """Return (matrix, True) for the transpose of a matrix, else (node, False)."""
  if node.op == "call_function" and node.target is aten.t.default:
    return node.args[0], True
  return node, False
