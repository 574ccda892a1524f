"""Environments of the tensors that go into a compiled function and come out of it.

Arrays have none, so they are static: a part of what a function is compiled for, and of
what a call of it gives. With one environment in the process nothing is looked at.
"""

from typing import Any

import jax

from torchax.environment import default_env, env_on
from torchax.rng import is_typed_key
from torchax.rng.streams import are_several
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.conversions import is_leaf


def of_call(leaves: list) -> tuple:
  """Return the active one and that of each leaf; () if all are the default one."""
  if not are_several():
    return ()
  default = default_env()
  return _unless_default((env_on(), *[getattr(x, "_env", default) for x in leaves]))


def of_results(out) -> tuple:
  """Return that of each leaf of a tree of tensors; () if all are the default one."""
  if not are_several():
    return ()
  default = default_env()
  leaves = jax.tree.leaves(out, is_leaf=is_leaf)
  return _unless_default(tuple([getattr(leaf, "_env", default) for leaf in leaves]))


def _unless_default(found: tuple) -> tuple:
  default = default_env()
  return found if any(env is not default for env in found) else ()


def given_back(out, environments: tuple) -> Any:
  """A tree of arrays and tensors with tensors of these environments."""
  leaves, treedef = jax.tree.flatten(out, is_leaf=is_leaf)
  for index, (leaf, env) in enumerate(zip(leaves, environments)):
    if isinstance(leaf, Tensor):
      leaf._env = env
    elif isinstance(leaf, jax.Array) and not is_typed_key(leaf):
      leaves[index] = new_tensor(leaf, env)
  return jax.tree.unflatten(treedef, leaves)
