"""Table of the operators of one environment, on top of the shared registry.

`env._ops[op] = Operator(…)` and `env._decomps[op] = Operator(…)` change one environment
only. Deleting an entry hides it in this environment only.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torchax.registry.names import resolve
from torchax.registry.operators import Operator, keys_of


class OperatorTable(MutableMapping):
  """Table from operation to operator; own entries take precedence over shared ones.

  Args:
    shared: returns the tables shared by all environments.
    changed: called with an operation whose own entry has changed.
    as_operator: `(operation, entry) -> Operator`, if the entries of the shared tables
      are not operators.
  """

  def __init__(
    self,
    shared: Callable[[], tuple[Mapping, ...]],
    changed: Callable[[Any], None],
    as_operator: Callable[[Any, Any], Operator] = lambda operation, entry: entry,
  ):
    self._shared = shared
    self._changed = changed
    self._as_operator = as_operator
    self.own: dict[Any, Operator | None] = {}

  def __getitem__(self, operation) -> Operator:
    """Return the operator of an overload (or its packet), a packet or a function."""
    keys = keys_of(operation)
    for key in keys:
      if key in self.own:
        operator = self.own[key]
        if operator is None:
          raise KeyError(operation)
        return operator
    tables = self._shared()
    for table in tables:
      for key in keys:
        if key in table:
          return self._as_operator(operation, table[key])
    # The last table may derive entries that it does not list.
    return self._as_operator(operation, tables[-1][operation])

  def __setitem__(self, operation, operator: Operator) -> None:
    """Set the operator of an operation in this environment.

    Raises:
      TypeError: `operator` is not an `Operator`.
    """
    if not isinstance(operator, Operator):
      raise TypeError(
        f"The entry of {operation} expects an Operator, but got {operator!r}. Write "
        "`Operator(op, function, is_jax_function=…)`, or call "
        "`env.override_op_definition(op, function)`."
      )
    operation = resolve(operation)
    self.own.pop(operation, None)
    if self.get(operation) is not operator:
      self.own[operation] = operator
    self._changed(operation)

  def __delitem__(self, operation) -> None:
    self[operation]  # raises KeyError if there is none
    self.own[resolve(operation)] = None
    self._changed(operation)

  def __contains__(self, operation) -> bool:
    keys = keys_of(operation)
    for key in keys:
      if key in self.own:
        return self.own[key] is not None
    return any(key in table for table in self._shared() for key in keys)

  def __iter__(self) -> Iterator:
    seen = {**self.own}
    for table in self._shared():
      seen.update(dict.fromkeys(key for key in table if key not in seen))
    return (key for key in seen if key in self)

  def __len__(self) -> int:
    return sum(1 for _ in self)

  def __repr__(self) -> str:
    count = sum(operator is not None for operator in self.own.values())
    return f"<{len(self)} operators, {count} of this environment alone>"
