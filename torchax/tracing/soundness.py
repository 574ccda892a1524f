"""Checker of a program's draws: proves from its jaxpr that no key is misused.

Each value has a name for its computation: equal equations on equal values have one
name. So two draws share a key if and only if their keys share a name. A key that
depends on no operand is a constant of the program. `recorded_draws.py` runs the
checker for `torchax.rng.explain`.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Hashable, Iterator

import jax
from jax.extend import core

from torchax.compat import jax_compat, user_code
from torchax.rng.state import is_typed_key

# Name prefixes of programs of random operations (`dispatch/lowering.py`). Their first
# operands are a key and the number to fold in.
_OPERATIONS = ("aten_", "torchax_")


@dataclasses.dataclass(frozen=True)
class Fault:
  """Misuse of a key in a program.

  Attributes:
    kind: "constant", "repeated", "turn" (repeated by a loop) or "dropped".
    lines: source lines that draw, or that take the key.
  """

  kind: str
  lines: tuple[str, ...]

  def __str__(self):
    where = " and ".join(self.lines)
    return {
      "constant": f"{where} draws with a key that is a constant of the program: every "
      "call draws the same numbers. Pass the key as an argument, or draw from the "
      "environment's stream.",
      "repeated": f"{where} draw with one key, so they draw the same numbers. Split "
      "the key, or take one for each.",
      "turn": f"{where} draws with one key in each turn of a loop, so all turns draw "
      "the same numbers. Fold the number of the turn into the key.",
      "dropped": f"{where} takes a key that nothing draws with.",
    }[self.kind]


@dataclasses.dataclass(frozen=True)
class _Value:
  """Description of a value's computation.

  Attributes:
    name: equal for values with equal computations.
    varies: the value depends on an operand of the program.
    turns: loops with a different value in each iteration.
  """

  name: Hashable
  varies: bool = True
  turns: frozenset = frozenset()


def faults(program: core.ClosedJaxpr) -> list[Fault]:
  """Return the faults of a program that has its random state as operands."""
  walk = _Walk()
  operands = [_Value(("operand", n)) for n in range(len(program.jaxpr.invars))]
  walk.program(program, operands)
  return walk.faults()


class _Walk:
  """Walk over a program that names its values and records the key of each draw."""

  def __init__(self):
    self._uses: dict[Hashable, list[str]] = {}
    self._found: list[Fault] = []
    self._loops: list[Hashable] = []
    self._count = 0
    # The current equation, after the equations around it.
    self._around: list = []

  def faults(self) -> list[Fault]:
    repeated = [Fault("repeated", tuple(u)) for u in self._uses.values() if len(u) > 1]
    return [*self._found, *repeated]

  def program(self, program, operands: list[_Value]) -> list[_Value]:
    """Walk through a jaxpr, closed or without constants; return its results."""
    consts = [self._constant(const) for const in getattr(program, "consts", ())]
    jaxpr = getattr(program, "jaxpr", program)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands)))

    def value_of(atom) -> _Value:
      is_literal = isinstance(atom, core.Literal)
      return self._constant(atom.val) if is_literal else values[atom]

    live = _live(jaxpr)
    used = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
    used |= {id(atom) for atom in jaxpr.outvars}
    for number, eqn in enumerate(jaxpr.eqns):
      self._around.append(eqn)
      inputs = [value_of(atom) for atom in eqn.invars]
      if eqn.primitive.name == "random_fold_in" and id(eqn.outvars[0]) not in used:
        self._found.append(Fault("dropped", (self._line(),)))
      run = self._run if number in live else self._fresh
      values.update(zip(eqn.outvars, run(eqn, inputs)))
      self._around.pop()
    return [value_of(atom) for atom in jaxpr.outvars]

  def _run(self, eqn, inputs: list[_Value]) -> list[_Value]:
    params, name = eqn.params, eqn.primitive.name
    if name in ("random_bits", "random_unwrap"):
      self._use(inputs[0])
    is_operation = str(params.get("name", "")).startswith(_OPERATIONS)
    if is_operation and _is_key(eqn.invars):
      self._use(_folded(*inputs[:2]))
      return self._fresh(eqn, inputs)
    if name == "random_fold_in":
      return [_folded(*inputs)]
    if name == "cond":
      return self._cond(eqn, inputs)
    if name == "scan":
      return self._scan(eqn, inputs)
    if name == "while":
      return self._while(eqn, inputs)
    for inner in (params.get(key) for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")):
      if inner is not None:
        return self.program(inner, inputs)
    how = (name, str(sorted(map(str, params.items()))))
    return self._results(eqn, inputs, (how, tuple(value.name for value in inputs)))

  def _line(self) -> str:
    """Return the source line of the current equation, or of the closest one around."""
    for eqn in reversed(self._around):
      location = jax_compat.line_of(eqn.source_info, user_code.LIBRARIES)
      if location is not None:
        return "{}:{}".format(*location)
    return "A line that is not known"

  def _use(self, key: _Value) -> None:
    line = self._line()
    if not key.varies:
      self._found.append(Fault("constant", (line,)))
      return
    if any(loop not in key.turns for loop in self._loops):
      self._found.append(Fault("turn", (line,)))
    self._uses.setdefault(key.name, []).append(line)

  def _fresh(self, eqn, inputs: list[_Value]) -> list[_Value]:
    self._count += 1
    return self._results(eqn, inputs, ("result", self._count))

  def _results(self, eqn, inputs: list[_Value], name: Hashable) -> list[_Value]:
    varies = any(value.varies for value in inputs)
    turns: frozenset = frozenset().union(*[value.turns for value in inputs])
    return [_Value((name, index), varies, turns) for index in range(len(eqn.outvars))]

  def _cond(self, eqn, inputs: list[_Value]) -> list[_Value]:
    before = self._uses
    merged: dict[Hashable, list[str]] = collections.defaultdict(list)
    for branch in eqn.params["branches"]:
      self._uses = {}
      self.program(branch, inputs[1:])
      for name, lines in self._uses.items():  # only one of the branches runs
        merged[name] = max(merged[name], lines, key=len)
    self._uses = before
    for name, lines in merged.items():
      self._uses.setdefault(name, []).extend(lines)
    return self._fresh(eqn, inputs)

  def _scan(self, eqn, inputs: list[_Value]) -> list[_Value]:
    body, n_consts = eqn.params["jaxpr"], jax_compat.constants_of_scan(eqn.params)
    if eqn.params["length"] > 1:
      with self._turns(len(inputs) - n_consts) as changing:
        self.program(body, [*inputs[:n_consts], *changing])
    elif eqn.params["length"]:
      self.program(body, inputs)
    return self._fresh(eqn, inputs)

  def _while(self, eqn, inputs: list[_Value]) -> list[_Value]:
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    with self._turns(len(inputs) - second) as carry:
      self.program(eqn.params["cond_jaxpr"], [*inputs[:first], *carry])
      self.program(eqn.params["body_jaxpr"], [*inputs[first:second], *carry])
    return self._fresh(eqn, inputs)

  @contextlib.contextmanager
  def _turns(self, count: int) -> Iterator[list[_Value]]:
    """Enter a loop; yield `count` values that differ in each of its turns."""
    self._count += 1
    loop = ("loop", self._count)
    self._loops.append(loop)
    turns = frozenset(self._loops)
    yield [_Value((loop, index), True, turns) for index in range(count)]
    self._loops.pop()

  def _constant(self, value) -> _Value:
    if is_typed_key(value):
      return _Value(("key", str(jax.random.key_data(value))), False)
    if getattr(value, "size", 1) == 1:
      return _Value(("constant", str(value)), False)
    return _Value(("constant", id(value)), False)


def _folded(key: _Value, number: _Value) -> _Value:
  """Return the key with a number folded in; a constant key stays a constant."""
  return _Value(
    ("fold_in", key.name, number.name), key.varies, key.turns | number.turns
  )


def _is_key(atoms) -> bool:
  """Return True if there are two operands and the first one is a typed key."""
  if len(atoms) < 2 or isinstance(atoms[0], core.Literal):
    return False
  return jax.dtypes.issubdtype(atoms[0].aval.dtype, jax.dtypes.prng_key)


def _live(jaxpr) -> set[int]:
  """Return the indices of equations that have effects, or that results depend on.

  Others are dead: the jaxpr around a retraced loop keeps the loop's first trace.
  """
  needed = {id(atom) for atom in jaxpr.outvars}
  live = set()
  for number in reversed(range(len(jaxpr.eqns))):
    eqn = jaxpr.eqns[number]
    if eqn.effects or any(id(atom) in needed for atom in eqn.outvars):
      live.add(number)
      needed.update(map(id, eqn.invars))
  return live
