"""Static part of a call, a part of the cache key of programs: `Specialization`.

`trace.py` builds it before each call; `program_keys.py` describes it.
"""

import dataclasses
import operator
import threading
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

from torchax.core.chains import WHOLE
from torchax.core.partitions import is_tensor
from torchax.core.storage import Excerpt
from torchax.core.view_steps import memory_order
from torchax.environment import default_env, env_on
from torchax.rng import is_typed_key
from torchax.rng.environment_streams import are_several
from torchax.tensor import Tensor, new_tensor

_interning = threading.Lock()
_known: "weakref.WeakValueDictionary[tuple, Specialization]"
_known = weakref.WeakValueDictionary()


class CapturedTensors(list[Tensor]):
  """List of captured tensors, in the order of the operands."""

  __slots__ = ("__weakref__",)


class CaptureKey:
  """Key of a function's captured tensors, compared by identity.

  It refers to the tensors weakly, since JAX's caches keep the key alive.

  Attributes:
    edition: number of times that tensors or modules of the function were replaced.
  """

  __slots__ = ("edition", "_reference")

  def __init__(self, edition: int, tensors: CapturedTensors):
    self.edition = edition
    self.refer_to(tensors)

  def refer_to(self, tensors: CapturedTensors) -> None:
    """Refer to a new list, whose gradients were added, replaced or removed."""
    self._reference = weakref.ref(tensors)

  @property
  def tensors(self) -> list[Tensor]:
    """The tensors; empty once the function captures other ones."""
    return self._reference() or []


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Specialization:
  """Static part of a call; each value has programs of its own.

  JAX compares `interned` objects by identity, which is fast. Each lives as long as a
  program that was compiled for it.

  Attributes:
    same: (index, earlier index) of each argument leaf that repeats a tensor.
    overlapping: indices of argument leaves whose storage another view shares, or that
      repeat elements.
    has_grad: indices of the leaves in `Captures.graded` that have a `.grad`.
    extra: value from the wrapper, such as the training flags of a module.
    wants_grad: None if torch records no gradient; otherwise one flag per argument leaf,
      then per captured tensor: it requires a gradient.
    no_grad: the call is under `torch.no_grad`.
    default_dtype: torch's default dtype, the dtype of factories and promoted integers.
    autocast: dtype of the autocast around the call, or None.
    captures: key of the captured tensors, or None.
    guards: differences from the first values of the guards (`Guards.key`).
    environments: active environment, then one per argument leaf; empty if all are the
      default one.
    layouts: (index, layout) of each leaf without a gradient that is not contiguous.
    copied: indices of the argument leaves that the function receives as copies, so that
      torch records the gradients of its in-place changes (`copied_arguments`).
  """

  same: tuple[tuple[int, int], ...] = ()
  overlapping: tuple[int, ...] = ()
  has_grad: tuple[int, ...] = ()
  extra: Any = None
  wants_grad: tuple[bool, ...] | None = None
  no_grad: bool = False
  default_dtype: torch.dtype = torch.float32
  autocast: torch.dtype | None = None
  captures: CaptureKey | None = None
  guards: tuple = ()
  environments: tuple = ()
  layouts: tuple[tuple[int, "Layout"], ...] = ()
  copied: tuple[int, ...] = ()

  def interned(self) -> "Specialization":
    """Return the unique object with these attributes."""
    with _interning:
      return _known.setdefault(_attributes_of(self), self)


_attributes_of = operator.attrgetter(
  *[f.name for f in dataclasses.fields(Specialization)]
)
ORDINARY = Specialization().interned()
"""Specialization of a call with all attributes at their defaults."""
ORDINARY_ATTRIBUTES = _attributes_of(ORDINARY)


def is_trained(tensor: Tensor) -> bool:
  """Return True for a leaf with a `.grad`; reading it warns for other tensors."""
  return tensor.requires_grad and tensor.is_leaf


class Layout(NamedTuple):
  """Memory layout of a tensor that is not contiguous.

  `contiguous` and `reshape` copy such a tensor; they may return other tensors
  themselves.

  Attributes:
    order: the dimensions by decreasing stride.
    gaps: one flag per dimension in `order`, then one for elements: it is followed by
      memory that the tensor skips.
  """

  order: tuple[int, ...]
  gaps: tuple[bool, ...]

  @classmethod
  def of(cls, tensor: torch.Tensor) -> "Layout":
    """Return the layout of a tensor."""
    sizes, strides = tensor.shape, tensor.stride()
    order = memory_order(sizes, strides)
    gaps, dense = [False] * (len(order) + 1), 1
    for position, dim in reversed(list(enumerate(order))):
      if sizes[dim] > 1:
        gaps[position + 1] = strides[dim] != dense
        dense = strides[dim] * sizes[dim]
    return cls(order, tuple(gaps))

  def tensor(self, array: jax.Array, env) -> torch.Tensor:
    """Return a tensor around an array, with this layout."""
    base = jnp.transpose(array, self.order)
    inverse = [self.order.index(dim) for dim in range(array.ndim)]
    if not any(self.gaps):
      return torch.permute(new_tensor(base, env), inverse)
    base = base[..., None]
    whole = new_tensor(jnp.pad(base, [(0, int(gap)) for gap in self.gaps]), env)
    whole._storage.__class__ = Excerpt
    view: torch.Tensor = whole
    for position, size in enumerate(base.shape):
      if self.gaps[position]:
        view = torch.narrow(view, position, 0, size)
    return torch.permute(torch.select(view, -1, 0), inverse)


def memory_of(leaves: list) -> tuple[tuple, tuple, tuple]:
  """Return `same`, `overlapping` and `layouts` of argument leaves.

  A leaf that repeats elements, such as an expanded view, overlaps itself.
  """
  if len(leaves) == 1 and getattr(leaves[0], "_chain", WHOLE) is WHOLE:
    return (), (), ()  # the usual call: one tensor that is no view
  first: dict[int, int] = {}
  same, overlapping, layouts = [], [], []
  for index, leaf in enumerate(leaves):
    if not isinstance(leaf, Tensor):
      continue
    if leaf._chain is not WHOLE:
      if any(info.overlaps for info in leaf._chain.infos):
        overlapping.append(index)
      if not (leaf.requires_grad or leaf.is_contiguous()):
        layouts.append((index, Layout.of(leaf)))
    earlier = first.setdefault(id(leaf._storage), index)
    if earlier == index:
      continue
    first_leaf = leaves[earlier]
    # A tensor and its `detach()` are not the same: only one of them has a gradient.
    is_same = leaf is first_leaf or not (leaf.requires_grad or first_leaf.requires_grad)
    if first_leaf._chain is leaf._chain and is_same:
      same.append((index, earlier))
    else:
      overlapping += [earlier, index]
  return tuple(same), tuple(overlapping), tuple(layouts)


def copied_arguments(leaves: list) -> tuple[int, ...]:
  """Return the indices of the argument leaves whose in-place changes torch records.

  For a leaf of the graph that requires a gradient, torch raises an error instead.
  """
  return tuple(
    [
      index
      for index, leaf in enumerate(leaves)
      if isinstance(leaf, Tensor) and not is_trained(leaf)
    ]
  )


# Environments of arguments and results -----------------------------------------------
#
# An array has no environment, so the environments of tensors are static: those of the
# arguments are part of the `Specialization`, those of the results part of the
# `Effects`. A process with one environment skips all of this.


def environments_of_call(leaves: list) -> tuple:
  """Return the active environment and each leaf's; () if all are the default."""
  if not are_several():
    return ()
  default = default_env()
  return _unless_default((env_on(), *[getattr(x, "_env", default) for x in leaves]))


def environments_of_results(out) -> tuple:
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
