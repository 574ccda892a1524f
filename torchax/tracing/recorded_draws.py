"""Ledgers of draws: a dry run that records them, and the replay of a draw.

`torchax.rng.explain` and `torchax.rng.replay` call these functions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch

from torchax.compat import torch_compat
from torchax.core.partitions import Partition
from torchax.dispatch.recorded_arguments import restore, tensors_in
from torchax.environment import default_env
from torchax.errors import RngError
from torchax.rng import Draw, Ledger, ledger
from torchax.tracing import soundness
from torchax.tracing.conversions import arrays_of
from torchax.tracing.trace import Options, Traced

# Operations whose draws depend only on the shape and dtype of their tensors.
_OF_A_SHAPE = frozenset(
  {
    "torchax.dropout.default",
    "torchax.attention_words.default",
    "aten.native_dropout.default",
    *(f"aten.{name}.default" for name in ("uniform", "normal_functional", "random")),
    *(f"aten.{name}.default" for name in ("cauchy", "log_normal", "exponential")),
    *("aten.geometric.default", "aten.bernoulli.p"),
    *("aten.random.from", "aten.random.to"),
  }
)


def dry_run(torch_function: Callable, args: tuple, kwargs: dict[str, Any]) -> Ledger:
  """Trace a call without running it, and return the ledger of its draws."""
  traced = Traced(torch_function, Options(assigns=True))
  given = Partition(arrays_of((args, kwargs)), lambda leaf: isinstance(leaf, jax.Array))
  advances = []

  def on_arrays(operands, *arrays):
    args, kwargs = given.unflatten(arrays)
    out, advance = traced(operands, ((), None), *args, **kwargs)
    advances.append(advance)
    return out

  trace = jax.make_jaxpr(on_arrays)
  program = traced.keyed.try_abstractly(lambda rng: trace(rng, *given.dynamic))
  entries = advances[-1].log if advances[-1] else ()
  find_faults = functools.partial(soundness.faults, program)
  return ledger.dry_run(entries, traced.keyed.streams(), find_faults)


def redraw(draw: Draw, parameters: tuple[torch.Tensor, ...]) -> torch.Tensor:
  """Repeat a recorded draw; see `torchax.rng.replay`."""
  if draw.arguments is None:
    raise RngError(
      f"Draw {draw.index} ({draw.op}) is a key that was taken; what was drawn with it "
      "is not known here. `draw.prng_key` is the key."
    )
  operands = draw.operands()
  operation = _operation(draw.op)
  wanted = tensors_in(draw.arguments)
  given = _bind(draw, operation, wanted, list(parameters))
  args, kwargs = draw.arguments
  args = [restore(value, given) for value in args]
  kwargs = {name: restore(value, given) for name, value in kwargs}
  return default_env().redraw(operation, operands, args, kwargs)


def _operation(name: str):
  """Return the overload with a name such as "aten.rand.default".

  Raises:
    RngError: this version of torch has no such operation.
  """
  namespace, packet, overload = name.split(".")
  try:
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
  except AttributeError:
    raise RngError(f"torch {torch.__version__} has no operation {name}.") from None


def _bind(draw: Draw, operation, wanted: list, parameters: list) -> list[torch.Tensor]:
  """Return `parameters` on jax; tensors of ones if none are given nor needed.

  Raises:
    ValueError: the number, shapes or dtypes of the tensors differ from the draw's.
  """
  is_of_a_shape = draw.op in _OF_A_SHAPE or operation._schema.name.endswith("_like")
  with torch_compat.without_modes():
    found = [(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in parameters]
  if found == wanted:
    return [parameter.to("jax") for parameter in parameters]
  if not parameters and is_of_a_shape:
    return [
      torch.ones(shape, dtype=getattr(torch, dtype), device="jax")
      for shape, dtype in wanted
    ]
  expected = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in wanted) or "none"
  received = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in found) or "none"
  raise ValueError(
    f"{draw.op} draws by the values of its tensors, which a ledger does not keep. Give "
    f"them again, `replay(draw, …)`: expected {expected}, but got {received}."
  )
