"""Buckets: sizes of arguments that share one compiled program.

`jax_jit(f, buckets={"x": {1: "pow2"}})` pads `x` along dimension 1 to the next power of
two. `Buckets` checks the option and finds the padded sizes; `padded/` has the program.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from torchax.compat.user_code import name_of, signature_of
from torchax.tracing.program_keys import argument_name, parameter_names

Sizes = str | Sequence[int] | Callable[[int], int]
"""Sizes of the buckets of a dimension: "pow2", all of them, or a function of a size."""


@runtime_checkable
class PaddedSizes(Protocol):
  """Padded sizes of the operands of a compiled function."""

  def padded(self, leaves: list, treedef) -> tuple[dict[int, tuple[int, ...]], Any]:
    """Return the shapes of the leaves to pad, by index, and the padded structure.

    Raises:
      ValueError, IndexError, TypeError: the leaves have no bucket.
    """


_SHARDINGS = ("in_shardings", "out_shardings")


class Buckets:
  """Checked `buckets` of a compiled function.

  Args:
    function: the user's function.
    buckets: sizes by argument name and dimension.
    options: other options of `jax.jit`.
    leading: number of arguments of the compiled function before the user's.

  Raises:
    TypeError: `buckets` has another form.
    ValueError: the function has no such argument, or an option excludes buckets.
  """

  def __init__(
    self, function: Callable, buckets: Any, options: dict[str, Any], leading: int
  ):
    name = name_of(function)
    is_mapping = isinstance(buckets, Mapping)
    if not is_mapping or not all(isinstance(v, Mapping) for v in buckets.values()):
      raise TypeError(
        'buckets expects sizes by argument name and dimension, such as {"x": {1: '
        f'"pow2"}}}}, but got {buckets!r}.'
      )
    self._names = [""] * leading + parameter_names(function)
    _check_names(function, name, list(buckets))
    for argument, dims in buckets.items():
      for dim, sizes in dims.items():
        _check(argument, dim, sizes)
    given = [key for key in _SHARDINGS if options.get(key) is not None]
    if given:
      raise ValueError(
        f"buckets and {given[0]} exclude each other: the program takes padded arrays. "
        "Shard the arguments and the module instead."
      )
    self._sizes: dict[str, dict[int, Sizes]] = {k: dict(v) for k, v in buckets.items()}

  def padded(self, leaves: list, treedef) -> tuple[dict[int, tuple[int, ...]], Any]:
    """Return the padded shapes of leaves, by index, and the structure as it is."""
    found = {}
    tree = jax.tree.unflatten(treedef, leaves)
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
      name = argument_name(path, self._names)
      if name in self._sizes:
        shape = self.padded_shape(name, leaf)
        if shape != tuple(leaf.shape):
          found[index] = shape
    return found, treedef

  def padded_shape(self, argument: str, leaf) -> tuple[int, ...]:
    """Return the shape of a tensor's bucket.

    Raises:
      TypeError: the argument is no tensor.
      IndexError: it has fewer dimensions.
      ValueError: no bucket is large enough.
    """
    if not hasattr(leaf, "shape"):
      raise TypeError(
        f"buckets names the argument {argument!r}, which has to be a tensor, but got "
        f"{leaf!r}. Only tensors have sizes."
      )
    shape = list(leaf.shape)
    for dim, sizes in self._sizes[argument].items():
      if not -len(shape) <= dim < len(shape):
        raise IndexError(
          f"buckets names dimension {dim} of {argument!r}, but it has the shape "
          f"{shape}."
        )
      shape[dim] = padded_size(f"dimension {dim} of {argument!r}", sizes, shape[dim])
    return tuple(shape)


def _check_names(function: Callable, name: str, names: list[str]) -> None:
  signature = signature_of(getattr(function, "forward", function))
  if signature is None:
    raise ValueError(
      f"buckets names the argument {names[:1]}, but the arguments of {name} have no "
      f"names in Python. Wrap it: `lambda x: {name}(x)`."
    )
  parameters = list(signature.parameters.values())
  if any(each.kind is each.VAR_KEYWORD for each in parameters):
    return
  known = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
  for unknown in names:
    if unknown not in known:
      raise ValueError(
        f"buckets names the argument {unknown!r}, but {name} takes {known}."
      )


def _check(argument: str, dim, sizes) -> None:
  if type(dim) is not int or not are_sizes(sizes):
    raise TypeError(
      f"buckets[{argument!r}] expects a dimension and its sizes: {EXPECTED}. It got "
      f"{dim!r}: {sizes!r}."
    )


EXPECTED = (
  '"pow2", a list of positive integers, or a function that returns the padded size of '
  "a size"
)


def are_sizes(sizes) -> bool:
  """Return True for sizes of buckets in one of their forms."""
  if isinstance(sizes, str):
    return sizes == "pow2"
  if isinstance(sizes, Sequence):
    return bool(sizes) and all(type(size) is int and size > 0 for size in sizes)
  return callable(sizes)


def padded_size(name: str, sizes: Sizes, size: int) -> int:
  """Return the size of the bucket of a size.

  Args:
    name: name of the dimension, for errors.
    sizes: sizes of the buckets.
    size: true size.

  Raises:
    ValueError: no bucket is large enough.
  """
  if size <= 1:
    return size
  if isinstance(sizes, str):
    return 1 << (size - 1).bit_length()
  if callable(sizes):
    found = sizes(size)
    if type(found) is int and found >= size:
      return found
    raise ValueError(
      f"The buckets of {name} are a function, which has to return an integer of at "
      f"least {size} for the size {size}, but returned {found!r}."
    )
  large = [each for each in sizes if each >= size]
  if not large:
    raise ValueError(
      f"The size of {name} is {size}, but its largest bucket is {max(sizes)}. Add a "
      "larger bucket, or pass a shorter tensor."
    )
  return min(large)
