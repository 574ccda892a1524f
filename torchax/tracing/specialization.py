"""Static part of a call, for which a program is compiled: `Specialization`."""

import dataclasses
import operator
import threading
import weakref
from typing import Any

import jax
import torch

from torchax.tensor import Tensor

_interning = threading.Lock()
_known: "weakref.WeakValueDictionary[tuple, Specialization]"
_known = weakref.WeakValueDictionary()


class CapturedTensors(list[Tensor]):
  """List of captured tensors, in the order of the operands."""

  __slots__ = ("__weakref__",)


class CaptureKey:
  """Key of the captured tensors for which programs are compiled, by its identity.

  It refers to them weakly, since JAX's caches keep it.

  Attributes:
    edition: how often the function has got other tensors to capture.
  """

  __slots__ = ("edition", "_reference")

  def __init__(self, edition: int, tensors: CapturedTensors):
    self.edition = edition
    self.refer_to(tensors)

  def refer_to(self, tensors: CapturedTensors) -> None:
    """Take a list in which gradients have come or gone."""
    self._reference = weakref.ref(tensors)

  @property
  def tensors(self) -> list[Tensor]:
    """The tensors; none where the function captures others by now."""
    return self._reference() or []


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Specialization:
  """Static part of a call, for which a program is compiled.

  JAX compares `interned` ones by identity, so that a call is quick. Each lives as long
  as a program that was compiled for it.

  Attributes:
    same: for each argument leaf that repeats an earlier one's tensor, the two indices.
    overlapping: indices of argument leaves whose storage another view shares.
    has_grad: for each captured leaf, whether it has a gradient.
    extra: anything the wrapper adds, such as the training flags of a module.
    wants_grad: None where torch records no gradient; else for each argument leaf and
      then for each captured tensor whether it needs one.
    no_grad: called under `torch.no_grad`.
    default_dtype: torch's, which decides what integers and factories give.
    autocast: the dtype of the autocast around the call, or None.
    captures: the captured tensors; None for none.
    guards: the differences from what the function decided by at first (`Guards`).
    environments: the one that is on, and that of each argument leaf; empty where all
      are the default one.
  """

  same: tuple[tuple[int, int], ...] = ()
  overlapping: tuple[int, ...] = ()
  has_grad: tuple[bool, ...] = ()
  extra: Any = None
  wants_grad: tuple[bool, ...] | None = None
  no_grad: bool = False
  default_dtype: torch.dtype = torch.float32
  autocast: torch.dtype | None = None
  captures: CaptureKey | None = None
  guards: tuple = ()
  environments: tuple = ()

  def interned(self) -> "Specialization":
    """Return the only object with these attributes."""
    with _interning:
      return _known.setdefault(_attributes_of(self), self)


_attributes_of = operator.attrgetter(
  *[f.name for f in dataclasses.fields(Specialization)]
)
ORDINARY = Specialization().interned()
"""No argument repeats another one, and nothing else matters."""
ORDINARY_ATTRIBUTES = _attributes_of(ORDINARY)


def is_trained(tensor: Tensor) -> bool:
  """True for leaves that autograd gives a `.grad`; others warn when asked for it."""
  return tensor.requires_grad and tensor.is_leaf


def repeated(leaves: list) -> tuple[tuple, tuple]:
  """Find argument leaves that are the same tensor, and those that overlap otherwise."""
  first: dict[int, int] = {}
  same, overlapping = [], []
  for index, leaf in enumerate(leaves):
    if not isinstance(leaf, Tensor):
      continue
    earlier = first.setdefault(id(leaf._storage), index)
    if earlier == index:
      continue
    first_leaf = leaves[earlier]
    # A tensor and its `detach()` are two: only one of them takes part in gradients.
    is_same = leaf is first_leaf or not (leaf.requires_grad or first_leaf.requires_grad)
    if first_leaf._chain is leaf._chain and is_same:
      same.append((index, earlier))
    else:
      overlapping += [earlier, index]
  return tuple(same), tuple(overlapping)
