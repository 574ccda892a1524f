"""Errors for branches with different results, and for loops that change their carry.

JAX's own errors name the functions that JAX traced, which are wrappers. These errors
name the user's function and the path in the user's tree. A "form" is a tree with the
dtype and shape of each leaf as text. `loops.py` uses them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torchax.compat.user_code import name_of
from torchax.core import mappings


@contextlib.contextmanager
def rewording_type_errors(explain: Callable[[], str | None]) -> Iterator[None]:
  """Replace a `TypeError` of JAX by one with our message.

  Raises:
    TypeError: has the message `explain()`; the original error if that is None.
  """
  try:
    yield
  except TypeError:
    message = explain()
    if message is None:
      raise
    raise TypeError(message) from None


def describe_tree(tree) -> Any:
  """Return the tree with the dtype and shape of each array as text."""
  return jax.tree.map(_form_of, tree)


def _form_of(leaf) -> str:
  dtype = mappings.j2t_dtype(jnp.result_type(leaf))
  return f"{dtype} of shape {list(jnp.shape(leaf))}"


def branch_mismatch_message(kind: str, names: Sequence[str], forms: dict) -> str | None:
  """Return an error message for branches with different results, or None.

  Args:
    kind: "cond" or "switch".
    names: names of the branches' functions; "" if unknown.
    forms: forms of their results, by index.
  """
  labels = [f"branch {number}" for number in range(len(names))]
  if kind == "cond":
    labels = ["the false branch", "the true branch"]
  names = [f"{label} `{name}`" if name else label for label, name in zip(labels, names)]
  for number, form in forms.items():
    difference = _difference(forms.get(0), form)
    if difference is not None:
      path, first, other = difference
      return (
        f"The branches of {kind} return the same structure, shapes and dtypes, but "
        f"{_at('the result', path)} {names[0]} has {first}, and {names[number]} has "
        f"{other}. Make them equal: by `.to(dtype)`, `.reshape(…)`, or zeros in place "
        "of what one of them lacks."
      )
  return None


def loop_message(kind: str, functions, before, after, condition) -> str | None:
  """Return an error message for the functions of a `while_loop`, or None.

  For a "fori_loop" the carry is (index, upper, value), and only the value is compared.
  """
  if kind == "fori_loop" and before is not None:
    before, after = before[2], after[2]
  message = condition_message(functions[0], condition)
  return message or carry_message(kind, functions[1], before, after)


def carry_message(kind: str, body: Callable, before, after) -> str | None:
  """Return an error message for a loop body that changes the carry's form, or None.

  Args:
    kind: "scan", "fori_loop" or "while_loop".
    body: the user's function.
    before, after: forms of the carry before and after an iteration.
  """
  what = "carry" if kind == "scan" else "value"
  difference = _difference(before, after)
  if difference is None:
    return None
  path, first, other = difference
  return (
    f"The {what} of {kind} keeps its structure, shapes and dtypes from turn to turn, "
    f"but {_at(f'the {what}', path)} `{name_of(body)}` is given {first} and returns "
    f"{other}. Start with a {what} of the form that it returns, or convert in it."
  )


def condition_message(function: Callable, form) -> str | None:
  """Return an error message for a loop condition that is not a 0-d bool, or None."""
  right = _form_of(True)
  if form is None or form == right:
    return None
  return (
    f"The condition `{name_of(function)}` of while_loop returns {right}, but it "
    f"returned {form}. Reduce it: `.any()`, `.all()`."
  )


def _at(what: str, path: str) -> str:
  return f"at `{path}` of {what}" if path else f"for {what}"


def _difference(first, other) -> tuple[str, str, str] | None:
  """Return the first path where two forms differ, with the text of each; or None."""
  ours, theirs = _by_path(first), _by_path(other)
  for path in [*ours, *(path for path in theirs if path not in ours)]:
    if ours.get(path) != theirs.get(path):
      return path, ours.get(path, _absent(first)), theirs.get(path, _absent(other))
  structures = [jax.tree.structure(tree) for tree in (first, other)]
  return None if structures[0] == structures[1] else ("", *map(str, structures))


def _by_path(tree) -> dict[str, str]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): form for path, form in leaves}


def _absent(tree) -> str:
  if isinstance(tree, dict):
    return f"nothing there (in a dict with the keys {list(tree)})"
  if isinstance(tree, tuple | list):
    return f"nothing there (in a {type(tree).__name__} of {len(tree)})"
  return "None" if tree is None else f"nothing there (it is one tensor, {tree})"
