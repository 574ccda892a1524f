"""Dry run of a call that records its draws, for `torchax.rng.explain`."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from torchax.rng import Ledger, ledger
from torchax.tracing import soundness
from torchax.tracing.conversions import arrays_of
from torchax.tracing.trace import Options, Traced


def dry_run(torch_function: Callable, args: tuple, kwargs: dict[str, Any]) -> Ledger:
  """Trace a call without running it, and return the ledger of its draws."""
  traced = Traced(torch_function, Options(assigns=True))
  leaves, treedef = jax.tree.flatten(arrays_of((args, kwargs)))
  indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
  advances = []

  def on_arrays(operands, *arrays):
    values = list(leaves)
    for index, array in zip(indices, arrays):
      values[index] = array
    args, kwargs = jax.tree.unflatten(treedef, values)
    out, advance = traced(operands, ((), None), *args, **kwargs)
    advances.append(advance)
    return out

  arrays = [leaves[index] for index in indices]
  trace = jax.make_jaxpr(on_arrays)
  program = traced.pure.try_abstractly(lambda rng: trace(rng, *arrays))
  entries = advances[-1].log if advances[-1] else ()
  find_faults = functools.partial(soundness.faults, program)
  return ledger.dry_run(entries, traced.pure.streams(), find_faults)
