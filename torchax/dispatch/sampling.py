"""Draws of samplers, from the current stream or from a generator.

`Plan.run` calls `Sampling.run`, which passes the key and count of the draw as operands
and records the draw in the ledger.
"""

import functools
from collections.abc import Callable

import jax

from torchax.compat import jax_compat, user_code
from torchax.devices import placement
from torchax.dispatch import recorded_arguments
from torchax.registry.operators import Operator
from torchax.rng import generator_operands, scope
from torchax.rng.generator import record_generator_draw
from torchax.rng.ledger import Recording

_SHARD_DEPENDENT = ("rbg", "unsafe_rbg")


def _check_shards(key: jax.Array, result) -> None:
  """Warn of a draw whose numbers can depend on the number of shards."""
  array = result[0] if isinstance(result, tuple) else result
  is_traced = isinstance(array, jax.core.Tracer)
  if is_traced and not jax_compat.is_divisible():
    return
  if not is_traced and placement.several_device_sharding(array) is None:
    return
  impl = str(jax.random.key_impl(key))
  if impl in _SHARD_DEPENDENT:
    _warn_of_shards(impl)


@functools.cache  # once per process
def _warn_of_shards(impl: str) -> None:
  user_code.warn(
    f"A stream of {impl} draws on a mesh. Its numbers can depend on the number of "
    "shards: under vmap, and with --xla_tpu_spmd_rng_bit_generator_unsafe. Use "
    'Configuration(prng_impl="threefry2x32") for the numbers of one device.',
    UserWarning,
  )


class Sampling:
  """Sampler of one operation, called with the key and count of its next draw.

  Args:
    name: name of the overload.
    operator: operator with the sampler.
    env: environment whose current stream draws.
    names: argument names of the schema.
  """

  def __init__(self, name: str, operator: Operator, env, names):
    self.name, self.operator, self.env, self.names = name, operator, env, names

  def run(self, args, kwargs, operands, execute: Callable, draws: list | None = None):
    """Call `execute` with the key and count of a draw before the operands.

    Args:
      args, kwargs: torch's arguments.
      operands: list of operands from `Flattener.flatten`.
      execute: `operands -> result`.
      draws: list that receives (key, count), for `Plan.redraw`.
    """
    generator = kwargs.get("generator") if kwargs else None
    if generator is None:
      return self.from_stream(args, kwargs, operands, execute, draws)
    before = generator.get_state()
    draw = generator_operands(generator, self.name)
    try:
      result = execute([*draw, *operands])
    except BaseException:
      generator.set_state(before)
      raise
    recorded = recorded_arguments.plain(args, kwargs)
    key, _ = draw
    record_generator_draw(self.name, self._distribution(args), result, recorded, key)
    return result

  def from_stream(self, args, kwargs, operands, execute: Callable, draws=None):
    """Draw from the current stream; advance it if `execute` succeeds."""
    stream = scope.current(self.env.streams)
    with stream.lock:
      draw = stream.peek(self.name)
      result = execute([*draw, *operands])
      _check_shards(draw[0], result)
      if Recording.count or stream.log is not None:
        recorded = recorded_arguments.plain(args, kwargs)
        stream.record_draw(self.name, self._distribution(args), result, recorded)
      else:
        stream.advance(1)
    if draws is not None:
      draws.append(draw)
    return result

  def _distribution(self, args) -> str:
    """Return the distribution's name with its numeric parameters."""
    parameters = [
      f"{name}={arg:g}"
      for name, arg in zip(self.names, args)
      if type(arg) in (int, float)
    ]
    name = self.operator.draw.distribution
    name = name or self.name.split(".")[1].removesuffix("_like")
    return name if name.endswith(")") else f"{name}({', '.join(parameters)})"
