"""Programs of `torch.export` as JAX functions and as StableHLO.

`Program` is a pure function of states (parameters, buffers, constants) and inputs. Key
and count of a random program are operands; in-place changes are results. Start at
`Program`; `graphs/interpreter.py` runs the graphs.

>>> import torch, jax.numpy as jnp
>>> from torchax.export import exported_program_to_jax
>>> exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
>>> states, program = exported_program_to_jax(exported)
>>> program(states, (jnp.array([-1.0, 2.0]),))
(Array([0., 2.], dtype=float32),)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as torch_pytree

from torchax.environment import default_env
from torchax.errors import UnsupportedDtypeError
from torchax.export import preparation, symbolic_shapes
from torchax.graphs.fx import may_draw
from torchax.graphs.interpreter import JaxInterpreter
from torchax.rng import RngState, as_key, default_impl, rng_scope

DEBUG: bool = False
"""True to log each operation of programs created from now on, with its result."""

__all__ = [
  "DEBUG",
  "JaxInterpreter",
  "Program",
  "_extract_states_from_exported_program",
  "exported_program_to_jax",
  "exported_program_to_stablehlo",
  "extract_avals",
]


def __dir__() -> list[str]:
  return [name for name in __all__ if not name.startswith("_")]


_STATES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_UPDATES = (
  OutputKind.BUFFER_MUTATION,
  OutputKind.PARAMETER_MUTATION,
  OutputKind.USER_INPUT_MUTATION,
)


class Program:
  """Exported program as a pure JAX function, usable under any JAX transformation.

  Call it with states and inputs:

    outputs = program(states, inputs)
    outputs, updates = program.with_updates(states, inputs)
    states = program.updated(states, updates)

  `states` is a list of arrays in the order of `names`. `inputs` is the tuple of
  positional arguments, structured as at export; `kwargs=` holds keyword arguments.
  `inputs` may also be the list of all leaves of both, in order. That list may omit
  leaves that were constants at export (None, numbers, strings). `rng=` is a key, an
  `RngState` or a seed to draw from (`docs/rng.md`).

  Args:
    program: exported program in functional operations, as after `run_decompositions`.

  Attributes:
    names: names of the states.
    mutated: names of the states that the program changes in place.
    mutated_inputs: names of the inputs that the program changes in place.

  >>> exported = torch.export.export(torch.nn.Dropout(0.5), (torch.ones(4),))
  >>> states, program = exported_program_to_jax(exported)
  >>> call = lambda seed: program(states, (jnp.ones(4),), rng=seed)[0]
  >>> bool((call(0) == jax.jit(call)(0)).all())
  True
  """

  __name__ = "exported_program"

  def __init__(self, program: ExportedProgram):
    signature = program.graph_signature
    _require_plain(signature)
    self._graph = JaxInterpreter(program.graph_module, DEBUG)
    self._may_draw = may_draw(program.graph_module)
    self._in_spec = program.call_spec.in_spec
    self._out_spec = program.call_spec.out_spec
    self._inputs = symbolic_shapes.arguments(program)
    self._argument_check = symbolic_shapes.ArgumentCheck(program)
    specs = signature.input_specs
    self._is_state = [spec.kind in _STATES for spec in specs]
    self.names = tuple(spec.target for spec in specs if spec.kind in _STATES)
    outputs = signature.output_specs
    self._is_update = [spec.kind in _UPDATES for spec in outputs]
    self._updated = [spec.target for spec in outputs if spec.kind in _UPDATES]
    inputs = {spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT}
    self.mutated = tuple(name for name in self._updated if name not in inputs)
    self.mutated_inputs = tuple(name for name in self._updated if name in inputs)

  @property
  def input_names(self) -> tuple[str, ...]:
    """Names of the inputs that are arrays, in order.

    >>> exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    >>> exported_program_to_jax(exported)[1].input_names
    ('input',)
    """
    return tuple(
      name for name, value in self._inputs if symbolic_shapes.is_array(value)
    )

  def __call__(
    self,
    states: Sequence,
    inputs: Sequence,
    kwargs: dict[str, Any] | None = None,
    *,
    rng: Any = None,
  ) -> tuple:
    """Return the program's results as a flat tuple of arrays and constants.

    In-place changes are not included; `with_updates` returns them too.

    Args:
      states: arrays in the order of `names`.
      inputs: tuple of positional arguments, or list of all leaves.
      kwargs: keyword arguments.
      rng: key, `RngState` or seed to draw from; by default the current stream.

    Raises:
      ValueError: the number of inputs, a shape or a constant differs from the export.
      TypeError: a dtype differs from the export.
      TracedDrawError: the program draws inside a JAX transformation without `rng`.
      DataDependentError: a shape depends on traced values.
    """
    return self.with_updates(states, inputs, kwargs, rng=rng)[0]

  def with_updates(
    self,
    states: Sequence,
    inputs: Sequence,
    kwargs: dict[str, Any] | None = None,
    *,
    rng: Any = None,
  ) -> tuple[tuple, dict[str, Any]]:
    """Return the results and the in-place changes of the program.

    Args:
      states: arrays in the order of `names`.
      inputs: tuple of positional arguments, or list of all leaves.
      kwargs: keyword arguments.
      rng: key, `RngState` or seed to draw from; by default the current stream.

    Returns:
      The flat tuple of results, and a dict with the new array of each changed state or
      input, by name.

    Raises:
      ValueError, TypeError, TracedDrawError, DataDependentError: as for a call.

    >>> norm = torch.nn.BatchNorm1d(2)
    >>> exported = torch.export.export(norm, (torch.ones(3, 2),))
    >>> states, program = exported_program_to_jax(exported)
    >>> outputs, updates = program.with_updates(states, (jnp.ones((3, 2)),))
    >>> updates["num_batches_tracked"].item()
    1
    """
    values = self._leaves(inputs, kwargs or {})
    if len(states) != len(self.names):
      raise ValueError(
        f"The program expects {len(self.names)} states, but got {len(states)}."
      )
    self._argument_check.require(values)
    if rng is None:
      return self._run(states, values)
    with rng_scope(rng):
      return self._run(states, values)

  def updated(self, states: Sequence, updates: dict) -> list:
    """Return the states with the updates applied.

    Args:
      states: arrays in the order of `names`.
      updates: new arrays by name, from `with_updates`.

    Returns:
      The new list of states; updates of inputs are ignored.

    >>> exported = torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1),))
    >>> states, program = exported_program_to_jax(exported)
    >>> program.updated(states, {"bias": jnp.ones(1)})[1]
    Array([1.], dtype=float32)
    """
    named = zip(self.names, states, strict=True)
    return [updates.get(name, state) for name, state in named]

  def unflatten(self, outputs: Sequence) -> Any:
    """Return the results in the structure that the module returns.

    Args:
      outputs: flat results of a call.

    >>> class Pair(torch.nn.Module):
    ...   def forward(self, x):
    ...     return {"sum": x.sum(), "max": x.max()}
    >>> states, program = exported_program_to_jax(
    ...   torch.export.export(Pair(), (torch.ones(2),))
    ... )
    >>> program.unflatten(program(states, (jnp.array([1.0, 2.0]),)))
    {'sum': Array(3., dtype=float32), 'max': Array(2., dtype=float32)}
    """
    return self._out_spec.unflatten(outputs)

  def _run(self, states, values) -> tuple:
    states, values = iter(states), iter(values)
    operands = [next(states if is_state else values) for is_state in self._is_state]
    results = self._graph.run(*operands)
    outputs: list[Any] = []
    updates: list[Any] = []
    for is_update, result in zip(self._is_update, results, strict=True):
      if jax.export.is_symbolic_dim(result):
        result = jnp.asarray(result)
      (updates if is_update else outputs).append(result)
    return tuple(outputs), dict(zip(self._updated, updates, strict=True))

  def _leaves(self, inputs, kwargs) -> list:
    """Return the leaves of the arguments, constants included."""
    try:
      return self._in_spec.flatten_up_to((tuple(inputs), kwargs))
    except ValueError:  # another structure: the leaves themselves
      leaves = torch_pytree.tree_leaves((tuple(inputs), kwargs))
    if len(leaves) == len(self._inputs):
      return leaves
    operands = [name for name, value in self._inputs if symbolic_shapes.is_array(value)]
    if len(leaves) != len(operands):
      raise ValueError(
        f"The program expects the {len(self._inputs)} inputs "
        f"{[name for name, _ in self._inputs]}, but got {len(leaves)}. Pass the "
        "positional arguments as a tuple, as they were exported."
      )
    remaining = iter(leaves)
    return [
      next(remaining) if symbolic_shapes.is_array(value) else value
      for _, value in self._inputs
    ]


def _require_plain(signature) -> None:
  """Raise NotImplementedError for inputs that are no arrays, and training results."""
  for spec in signature.input_specs:
    if spec.kind not in (*_STATES, InputKind.USER_INPUT):
      raise NotImplementedError(
        f"The program takes {spec.arg.name}, a {spec.kind.name}, which is no array."
      )
  for spec in signature.output_specs:
    if spec.kind not in (*_UPDATES, OutputKind.USER_OUTPUT):
      raise NotImplementedError(
        f"The program returns {spec.arg.name}, a {spec.kind.name}. Export the forward "
        "pass, and differentiate the function by `jax.grad`."
      )


def _extract_states_from_exported_program(exported_model: ExportedProgram) -> tuple:
  """Return names and torch tensors of parameters, buffers and constants, in order."""
  names, states = [], []
  for spec in exported_model.graph_signature.input_specs:
    if spec.kind not in _STATES:
      continue
    name = spec.target
    state_dict = exported_model.state_dict
    state = state_dict[name] if name in state_dict else exported_model.constants[name]
    names.append(name)
    states.append(state)
  return tuple(names), states


def exported_program_to_jax(
  exported_program: ExportedProgram, export_raw: bool = False
) -> tuple:
  """Convert an exported program to its states and a pure JAX function.

  Args:
    exported_program: result of `torch.export.export`, with or without
      `run_decompositions`.
    export_raw: True to return the states as torch tensors, with their names.

  Returns:
    `(states, program)`: a list of arrays and a `Program`. `program(states, inputs)`
    returns a flat tuple. With `export_raw`, `(names, states, program)`.

  Raises:
    UnsupportedDtypeError: a parameter or buffer is sparse or quantized.
    NotImplementedError: the signature has inputs or results that are no arrays.

  >>> model = torch.nn.Linear(2, 1)
  >>> exported = torch.export.export(model, (torch.ones(3, 2),))
  >>> states, program = exported_program_to_jax(exported)
  >>> loss = lambda states: program(states, (jnp.ones((3, 2)),))[0].sum()
  >>> [gradient.shape for gradient in jax.grad(loss)(states)]
  [(1, 2), (1,)]
  """
  names, states = _extract_states_from_exported_program(exported_program)
  for name, state in zip(names, states):
    _require_dense(name, state)
  functional = preparation.functional(exported_program)
  # The functional program may have more constants.
  names, states = _extract_states_from_exported_program(functional)
  program = Program(functional)
  if export_raw:
    return names, states, program
  return _arrays(states), program


def _require_dense(name: str, state: torch.Tensor) -> None:
  if state.layout is not torch.strided or state.is_quantized:
    kind = "quantized" if state.is_quantized else str(state.layout)
    raise UnsupportedDtypeError(
      f"{name} is {kind}, but JAX arrays are dense. Call `.dequantize()` or "
      "`.to_dense()` on it before the export."
    )


def _arrays(states: list[torch.Tensor]) -> list[jax.Array]:
  """Convert tensors to arrays; copy a tensor with several names once."""
  env, array_by_id = default_env(), {}
  for state in states:
    if id(state) not in array_by_id:
      array_by_id[id(state)] = env.t2j_copy(state.detach())
  return [array_by_id[id(state)] for state in states]


def extract_avals(exported: ExportedProgram) -> list[jax.ShapeDtypeStruct]:
  """Return shapes and dtypes of the inputs that are arrays; see `shapes.avals`.

  Args:
    exported: result of `torch.export.export`.

  Returns:
    One `jax.ShapeDtypeStruct` per input; dynamic dimensions are symbolic.

  >>> extract_avals(torch.export.export(torch.nn.ReLU(), (torch.ones(2, 3),)))
  [ShapeDtypeStruct(shape=(2, 3), dtype=float32)]
  """
  return symbolic_shapes.avals(exported)


def exported_program_to_stablehlo(exported_program: ExportedProgram) -> tuple:
  """Convert an exported program to its states and StableHLO, callable without torch.

  Args:
    exported_program: see `exported_program_to_jax`.

  Returns:
    `(states, exported)`: a list of arrays and a `jax.export.Exported`. Its `call` takes
    `(states, inputs)` and returns the results of `Program`. `inputs` is the tuple of
    inputs that are arrays, in order. A program that changes states or inputs in place
    returns `(outputs, updates)`. A program that draws takes
    `(states, inputs, key_data, count)`: `key_data` is uint32[2], the data of a key, and
    `count` uint32[], the number of draws already made from that key. Draws are numbered
    in program order.

  Raises:
    DataDependentError: a shape depends on data.
    OperatorNotFound: an operation has no lowering, or none for symbolic sizes.

  >>> exported = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
  >>> states, program = exported_program_to_stablehlo(exported)
  >>> program.call(states, (jnp.array([-1.0, 2.0]),))
  (Array([0., 2.], dtype=float32),)
  """
  states, program = exported_program_to_jax(exported_program)
  inputs = tuple(extract_avals(exported_program))
  state_avals = [jax.ShapeDtypeStruct(state.shape, state.dtype) for state in states]
  has_updates = bool(program.mutated or program.mutated_inputs)

  def pure(states, inputs):
    outputs, updates = program.with_updates(states, inputs)
    return (outputs, updates) if has_updates else outputs

  def drawing(states, inputs, key_data, count):
    with rng_scope(RngState(as_key(key_data, impl), count)) as stream:
      results = pure(states, inputs)
      drawn.append(stream.draws)
      return results

  pure.__name__ = drawing.__name__ = program.__name__
  drawn: list[int] = []
  impl = default_impl()
  words = jax.eval_shape(lambda: jax.random.key_data(RngState.from_seed(0, impl).key))
  rng = (words, jax.ShapeDtypeStruct((), jnp.uint32))
  if program._may_draw:
    exported = jax.export.export(jax.jit(drawing))(state_avals, inputs, *rng)
    if any(drawn):
      return states, exported
  return states, jax.export.export(jax.jit(pure))(state_avals, inputs)
