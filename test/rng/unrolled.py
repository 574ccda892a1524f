"""Loops and maps as plain Python, the reference for their compiled forms."""

import jax
import torch


def _is_tensor(value) -> bool:
  return isinstance(value, torch.Tensor)


def _map(function, *trees):
  return jax.tree.map(function, *trees, is_leaf=_is_tensor)


def _row(tree, number: int, axis: int = 0):
  return _map(lambda tensor: tensor.select(axis, number), tree)


def scan_unrolled(f, init, xs=None, length=None, reverse=False, unroll=1):
  """Run `torchax.interop.scan` as a Python loop."""
  carry = init
  leaves = jax.tree.leaves(xs, is_leaf=_is_tensor)
  length = len(leaves[0]) if leaves else length
  ys = [None] * length
  for turn in reversed(range(length)) if reverse else range(length):
    carry, ys[turn] = f(carry, _row(xs, turn))
  return carry, _map(lambda *rows: torch.stack(rows), *ys)


def fori_unrolled(lower, upper, body_fun, init_val, *, unroll=None):
  """Run `torchax.interop.fori_loop` as a Python loop."""
  value = init_val
  for index in range(lower, upper):
    value = body_fun(torch.tensor(index, dtype=torch.int32).to("jax"), value)
  return value


def vmap_unrolled(f, in_axes=0, out_axes=0):
  """Run `torchax.interop.jax_vmap(randomness="different")` as a Python loop.

  Args:
    f: function of positional arguments.
    in_axes: an int or None for each argument, or one for all.
    out_axes: an int.
  """

  def mapped(*args):
    axes = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
    sizes = [
      jax.tree.leaves(arg, is_leaf=_is_tensor)[0].shape[axis]
      for arg, axis in zip(args, axes)
      if axis is not None
    ]
    rows = []
    for turn in range(sizes[0]):
      parts = [
        arg if axis is None else _row(arg, turn, axis) for arg, axis in zip(args, axes)
      ]
      rows.append(f(*parts))
    return _map(lambda *leaves: torch.stack(leaves, out_axes), *rows)

  return mapped
