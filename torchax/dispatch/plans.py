"""Plan of an operation whose lowering is a function of arrays, such as `aten.add`.

A call takes four steps: sort the arguments into operands and a static key
(`operands.py`), look up the compiled program of the key (`programs.py`), run it, and
wrap the result. One program includes the views of the arguments, the promotion, the
lowering and the random draw. In-place and `out=` plans wrap such a plan.
`dispatcher.py` chooses the plan of an overload.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from torchax.compat import jax_compat
from torchax.core import deferred, grad_mode, mappings
from torchax.core.partitions import Partition
from torchax.core.recorder import ARRAYS
from torchax.dispatch import explaining, index_checks, new_shapes, torch_checks
from torchax.dispatch.lowering import Lowering
from torchax.dispatch.programs import Programs
from torchax.dispatch.sampling import Sampling
from torchax.registry.operators import Operator
from torchax.rng import scope
from torchax.tensor import new_tensor


class Plan:
  """Plan of one functional operation with a lowering on arrays."""

  def __init__(self, op, operator: Operator, env):
    self.op, self.operator, self.env = op, operator, env
    self.lowering = Lowering(op, operator, env)
    self.programs = Programs(self.lowering)
    self.name = self.lowering.name
    self.flattener = self.lowering.flattener
    self.is_sampler = self.lowering.is_sampler
    self.sampling = Sampling(self.name, operator, env, self.flattener.names)
    self._is_inlined = self.lowering.is_inlined
    self._checks = operator.checks
    self._compiled = operator.execution.compiled
    self._may_compile = self._compiled in (True, None)
    # A lowering that may not compile looks at numbers.
    self._call = deferred.run_at_once if self._compiled is None else deferred.run
    # Results may need narrower indices, or be on the CPU.
    self._needs_wrap = (
      bool(operator.execution.index_results) or self.lowering.takes_device
    )
    # The program can be called without a check, a draw or a decision before it.
    self._is_simple = (
      self._checks.check is None
      and self._checks.rules is None
      and self._may_compile
      and not self.is_sampler
    )

  def __call__(self, args, kwargs, draws=None):
    operands, static_key = self.flattener.flatten(args, kwargs)
    try:
      if self._is_simple and jax_compat.is_top_level():
        program = self.programs.get(static_key) or self.programs.build(
          args, kwargs, static_key
        )
        result = self._call(program, operands)
      else:
        result = self.run(args, kwargs, operands, static_key, draws=draws)
    except torch_checks.Refused:
      with self.retry_unchecked(args, kwargs, static_key):
        return self(args, kwargs, draws)
    except explaining.EXPLAINED as error:
      explaining.raise_as_torch(error, self.op, args, kwargs, self.operator)
      raise
    if type(result) in ARRAYS and not self._needs_wrap:
      return new_tensor(result, self.env)
    device = kwargs.get("device") if kwargs else None
    if device is not None and device.type == "cpu":
      return jax.tree.map(mappings.j2t, deferred.values(result))
    return self._wrap(result)

  def run(
    self, args, kwargs, operands, static_key, write=None, sharding=None, draws=None
  ):
    """Check the arguments, draw if the operation is a sampler, and run its program.

    Args:
      args, kwargs: torch's arguments, for the checks.
      operands, static_key: results of `Flattener.flatten`.
      write: None, or (chain, dtype, shape) of a tensor that the result is written to.
        Then the first operand is the base of that tensor, and the new base is
        returned. For several tensors, a tuple of these with a tuple of bases.
      sharding: sharding of the result, or a tuple of them; None lets JAX choose.
      draws: a sampler appends its draw to this list, for `redraw`.

    Returns:
      An array or a pytree of arrays.
    """
    if self._is_inlined():
      self.programs.check_once(args, kwargs, static_key)
    self._require(args, kwargs)
    if not self.is_sampler:
      return self._execute(args, kwargs, operands, static_key, write, sharding)

    def execute(operands):
      return self._execute(args, kwargs, operands, static_key, write, sharding)

    return self.sampling.run(args, kwargs, operands, execute, draws)

  def _require(self, args, kwargs) -> None:
    """Raise for arguments that fail the operator's check or its index rules."""
    try:
      if self._checks.check is not None:
        self._checks.check(*args, **(kwargs or {}))
      self._require_rules(args, kwargs)
    except explaining.EXPLAINED:
      self.programs.check_with_torch(args, kwargs)  # torch reports shapes first
      raise

  def _require_rules(self, args, kwargs) -> None:
    rules = self._checks.rules
    if rules is not None:
      given = rules(*args, **(kwargs or {}))
      index_checks.require(given, self.name, self.env.config)

  def _execute(self, args, kwargs, operands, static_key, write=None, sharding=None):
    may_compile = self._compiled
    if callable(may_compile):
      may_compile = bool(may_compile(args, kwargs or {}))
    # Samplers are compiled inside traces too: `jax.checkpoint` outside of jit would
    # run one operation by operation, which rounds differently.
    if may_compile is False or (self._is_inlined() and not self.is_sampler):
      operands = deferred.values(operands)
      result = None
      if write is None and jax_compat.is_top_level():
        given = self.operator, self.flattener, static_key, operands
        result = new_shapes.run_in_numpy(*given)
      if result is None:
        result = self.lowering.inline(static_key, write, operands)
      return result
    # `programs.cache_key`, inlined to save a Python call.
    cache_key = static_key if write is None else (write, static_key)
    if sharding is not None:
      cache_key = (sharding, cache_key)
    program = self.programs.get(cache_key)
    if program is None:
      program = self.programs.build(args, kwargs, static_key, write, sharding)
    if jax_compat.is_top_level():
      return self._call(program, operands)
    return program.in_traces(*operands)

  def _wrap(self, result):
    result = grad_mode.stop_gradients(result)
    if self.operator.execution.index_results and self.env.config.use_int32_for_index:
      result = self._with_narrow_indices(result)
    return self._wrap_array(result)

  def _with_narrow_indices(self, result):
    result = deferred.values(result)
    results = list(result) if isinstance(result, tuple) else [result]
    for index in self.operator.execution.index_results:
      if index < len(results) and results[index].dtype == jnp.int64:
        results[index] = results[index].astype(jnp.int32)
    return tuple(results) if isinstance(result, tuple) else results[0]

  def _wrap_array(self, result):
    if type(result) in ARRAYS or isinstance(result, jax.Array):
      return new_tensor(result, self.env)
    if isinstance(result, tuple):
      return tuple([self._wrap_array(value) for value in result])
    if isinstance(result, list):
      return [self._wrap_array(value) for value in result]
    return result

  @contextlib.contextmanager
  def retry_unchecked(self, args, kwargs, static_key, write=None) -> Iterator[None]:
    """Check and evict after `Refused`; the caller retries the call inside the block.

    The check inside the program used the numbers of the program's first call. torch
    checks the numbers of this call here; then the program is rebuilt without a check.

    Raises:
      Exception: torch's error, if torch refuses the arguments of this call.
    """
    self.programs.check_with_torch(args, kwargs)
    self.programs.evict(args, kwargs, static_key, write)
    with torch_checks.unchecked(self.programs):
      yield

  def redraw(self, draw, args, kwargs=None):
    """Run a sampler with the key and count of an earlier draw; no stream advances."""
    operands, static_key = self.flattener.flatten(args, kwargs)
    with torch_checks.unchecked(self.programs):
      result = self._execute(args, kwargs, [*draw, *operands], static_key)
    return self._wrap(result)

  def run_sharded(self, sharding, args, kwargs):
    """Run the operation with a sharded result; each device computes its shard.

    Args:
      sharding: the `jax.sharding.Sharding` of the result.
      args, kwargs: torch's arguments.
    """
    operands, static_key = self.flattener.flatten(args, kwargs)
    return self._wrap(self.run(args, kwargs, operands, static_key, sharding=sharding))

  def run_on_arrays(self, args, kwargs, caches=True):
    """Run the operation on arrays, for graphs whose arguments torch has checked.

    Args:
      args, kwargs: torch's arguments, with arrays for tensors.
      caches: compile and cache the lowering; False if sizes are symbols.
    """
    self._require_rules(args, kwargs)
    operands, static_key = self.flattener.flatten(args, kwargs)

    def execute(operands):
      if caches and self._may_compile:
        return self._execute(args, kwargs, operands, static_key)
      return self.lowering.inline(static_key, None, operands)

    with torch_checks.unchecked(self.programs):
      if not self.is_sampler:
        return deferred.values(execute(operands))
      drawn = self.sampling.from_stream(args, kwargs, operands, execute)
      return deferred.values(drawn)

  def shapes(self, args, kwargs):
    """Return the results as `jax.ShapeDtypeStruct`s, without computing or drawing.

    Args:
      args, kwargs: torch's arguments, with `jax.ShapeDtypeStruct`s for tensors.
    """
    stream = scope.current(self.env.streams)
    draw = list(stream.peek(self.name)) if self.is_sampler else []
    given = Partition(
      (args, kwargs), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def run(draw, arrays):
      operands, static_key = self.flattener.flatten(*given.unflatten(arrays))
      return self.lowering.inline(static_key, None, [*draw, *operands])

    return jax.eval_shape(run, draw, given.dynamic)
