"""Environments of the arguments and results of a compiled function.

An array has no environment, so the environments of tensors are static: those of the
arguments are part of the `Specialization`, those of the results part of the `Effects`.
A process with one environment skips all of this.
"""

from typing import Any

import jax

from torchax.core.partitions import is_tensor
from torchax.environment import default_env, env_on
from torchax.rng import is_typed_key
from torchax.rng.environment_streams import are_several
from torchax.tensor import Tensor, new_tensor


def of_call(leaves: list) -> tuple:
  """Return the active environment and each leaf's; () if all are the default."""
  if not are_several():
    return ()
  default = default_env()
  return _unless_default((env_on(), *[getattr(x, "_env", default) for x in leaves]))


def of_results(out) -> tuple:
  """Return the environment of each leaf; () if all are the default."""
  if not are_several():
    return ()
  default = default_env()
  leaves = jax.tree.leaves(out, is_leaf=is_tensor)
  return _unless_default(tuple([getattr(leaf, "_env", default) for leaf in leaves]))


def _unless_default(found: tuple) -> tuple:
  default = default_env()
  return found if any(env is not default for env in found) else ()


def with_environments(out, environments: tuple) -> Any:
  """Convert a tree of arrays and tensors to tensors of these environments."""
  leaves, treedef = jax.tree.flatten(out, is_leaf=is_tensor)
  for index, (leaf, env) in enumerate(zip(leaves, environments)):
    if isinstance(leaf, Tensor):
      leaf._env = env
    elif isinstance(leaf, jax.Array) and not is_typed_key(leaf):
      leaves[index] = new_tensor(leaf, env)
  return jax.tree.unflatten(treedef, leaves)
