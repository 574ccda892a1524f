"""Calls of operators with numbers close to those of a sample, and their programs.

A sample of `op_db` runs on jax with its gradient. Each ATen operation in it is called
again with one of its numbers replaced, and `count` returns how many programs the
numbers take. The numbers tried are those with which CPU torch gives results of the same
shapes and dtypes.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from opinfo.checks import copied, tensors_of
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torchax
from torchax.core import program_limit

MOST = 8
"""Numbers that are tried in one place."""
FEWEST = 3
"""So many are needed: the first two may compile."""
_INT32 = range(-(2**31), 2**31)


@dataclasses.dataclass(frozen=True)
class Call:
  """Call of an ATen operation, or of an operator of `op_db`."""

  func: Callable
  args: tuple
  kwargs: dict

  @property
  def name(self) -> str:
    """Name such as `aten.roll`, or the name in `op_db`."""
    if isinstance(self.func, OpOverload):
      return f"{self.func.namespace}.{self.func.overloadpacket.__name__}"
    return self.func.name

  @property
  def key(self):
    """Key shared by calls of one overload; for an operator of `op_db`, its name."""
    return self.func if isinstance(self.func, OpOverload) else self.name

  def given(self) -> dict[str, object]:
    """Arguments by their names in the schema."""
    if isinstance(self.func, OpOverload):
      names = [argument.name for argument in self.func._schema.arguments]
    else:
      names = [f"argument {place}" for place in range(len(self.args))]
    return {**dict(zip(names, self.args)), **self.kwargs}

  def numbers(self) -> list[str]:
    """Names of arguments that are a number, or a list that begins with one."""
    return [name for name, value in self.given().items() if _is_number(_first(value))]

  def number(self, name: str):
    """Return the number of that name."""
    return _first(self.given()[name])

  def with_number(self, name: str, number) -> "Call":
    """Return the call with another number, in a list as the first element."""

    def replaced(value):
      is_list = isinstance(value, list | tuple)
      return type(value)([number, *value[1:]]) if is_list else number

    place = list(self.given()).index(name)
    if place >= len(self.args):
      kwargs = {**self.kwargs, name: replaced(self.kwargs[name])}
      return dataclasses.replace(self, kwargs=kwargs)
    args = (*self.args[:place], replaced(self.args[place]), *self.args[place + 1 :])
    return dataclasses.replace(self, args=args)

  def on(self, device: str) -> "Call":
    """Return the call with copies of its tensors on a device."""
    args, kwargs = copied((self.args, self.kwargs), device)
    return dataclasses.replace(self, args=tuple(args), kwargs=kwargs)

  def run(self):
    """Run the call; return the results."""
    torch.manual_seed(0)
    with torch.no_grad():
      return self.func(*self.args, **self.kwargs)


def _first(value):
  return value[0] if isinstance(value, list | tuple) and value else value


def _is_number(value) -> bool:
  return type(value) is float or (type(value) is int and value in _INT32)


class _Recorder(TorchDispatchMode):
  """Mode that records the ATen operations that arrive at jax."""

  def __init__(self):
    super().__init__()
    self.calls: list[Call] = []

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    self.calls.append(Call(func, args, kwargs or {}))
    return func(*args, **(kwargs or {}))


def calls_of(op, sample) -> list[Call]:
  """Return an operator of `op_db` and the operations of it and of its gradient."""
  whole = Call(op, (sample.input, *sample.args), sample.kwargs)
  args, kwargs = copied(
    (whole.args, whole.kwargs), "jax", requires_grad=op.supports_autograd
  )
  recorder = _Recorder()
  # Other tests are about refusals; here the call is only left out.
  with torchax.default_env(), recorder, contextlib.suppress(Exception):
    results = [t for t in tensors_of(op(*args, **kwargs)) if t.requires_grad]
    if results:
      torch.autograd.backward(results, list(map(torch.ones_like, results)))
  aten = [call for call in recorder.calls if call.func.namespace == "aten"]
  return [*aten, whole]


def close_to(number) -> list:
  """Return numbers of the same type near a number."""
  if type(number) is int:
    return [number + step for step in (*range(-5, 0), *range(1, 13))]
  return [number + 0.013 * step for step in (*range(-6, 0), *range(1, 7))]


def _forms(result) -> list:
  return [
    (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
    for leaf in pytree.tree_leaves(result)
  ]


def alternatives(call: Call, name: str) -> list:
  """Return numbers with which CPU torch gives results of the same form."""
  on_cpu = call.on("cpu")
  try:
    expected = _forms(on_cpu.run())
  except Exception:
    return []  # an operation of jax only
  found = []
  for number in close_to(call.number(name)):
    try:
      result = on_cpu.with_number(name, number).on("cpu").run()
    except Exception:
      continue
    if _forms(result) == expected:
      found.append(number)
  return found[-MOST:]


def is_growing(call: Call, name: str) -> bool | None:
  """Return True if every number takes a program of its own, a few special ones aside.

  Return None if too few numbers can be tried.
  """
  found = _counts(call, name)
  return all(found) if found else None


def _counts(call: Call, name: str) -> list[int]:
  """Return the programs that each of the `alternatives` takes after the first two."""
  found = []
  for number in alternatives(call, name):
    moved = call.with_number(name, number).on("jax")
    before = program_limit.count()
    with torchax.default_env():
      try:
        moved.run()
      except Exception:
        continue  # other tests are about refusals
    found.append(program_limit.count() - before)
  return found[FEWEST - 1 :]


def places(calls) -> Iterator[tuple[Call, str]]:
  """Yield each operation with each of its numbers; of the operator itself, its floats.

  The operator's integers are varied in the operations, as the schemas name them.
  """
  for call in calls:
    for name in call.numbers():
      if isinstance(call.func, OpOverload) or type(call.number(name)) is float:
        yield call, name
