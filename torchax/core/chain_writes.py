"""Writes to a view: through the steps of its chain back to the base."""

import jax
import jax.numpy as jnp


def write(steps: list, base: jax.Array, value: jax.Array) -> jax.Array:
  """The base after a write of `value` through steps to it.

  If an element shows several times, and later steps show a part of that, all of these
  are one step: the other appearances would overwrite the new value.

  Args:
    steps: pairs of a `ViewInfo` and its starts, which only a `MovingInfo` has.
    base: the array that the first step reads.
    value: of the shape of the view.
  """
  sources = [base]
  for info, start in steps[:-1]:
    sources.append(info.transform_tensor(sources[-1], *start))
  end = len(steps)
  while end:
    first = _first_of_write(steps, end)
    info, start = steps[first]
    if first == end - 1:
      value = info.update_tensor(value, sources[first], *start)
    else:
      value = _write_picked(steps[first:end], sources[first], value)
    end = first
  return value


def _first_of_write(steps: list, end: int) -> int:
  """The first of the steps before `end` that have to be written through as one."""
  first = end - 1
  for place in range(end - 1, -1, -1):
    info, _ = steps[place]
    if not info.picks:
      break
    first = place if info.overlaps else first
  return first


def _write_picked(steps: list, source: jax.Array, value: jax.Array) -> jax.Array:
  picked = jnp.arange(source.size).reshape(source.shape)
  for info, start in steps:
    picked = info.transform_tensor(picked, *start)
  return source.ravel().at[picked].set(value).reshape(source.shape)
