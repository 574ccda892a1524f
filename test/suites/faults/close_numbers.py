"""Calls of operators with numbers close to those of a sample, and programs they need.

A sample of `op_db` is run on jax with its gradient, and each ATen operation that it
consists of is called again with other numbers in place of one of its own: `count`
says how many programs each of these takes. CPU torch decides which numbers are tried:
those that leave shapes and dtypes of the results as they are.
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
  """A call of an ATen operation, or of an operator of `op_db`."""

  func: Callable
  args: tuple
  kwargs: dict

  @property
  def name(self) -> str:
    """Such as `aten.roll`, or the operator's in `op_db`."""
    if isinstance(self.func, OpOverload):
      return f"{self.func.namespace}.{self.func.overloadpacket.__name__}"
    return self.func.name

  @property
  def key(self):
    """What calls of one overload share; of one operator of `op_db`, its name."""
    return self.func if isinstance(self.func, OpOverload) else self.name

  def given(self) -> dict[str, object]:
    """The arguments by name, as the schema has it."""
    if isinstance(self.func, OpOverload):
      names = [argument.name for argument in self.func._schema.arguments]
    else:
      names = [f"argument {place}" for place in range(len(self.args))]
    return {**dict(zip(names, self.args)), **self.kwargs}

  def numbers(self) -> list[str]:
    """Names of arguments that are a number, or a list that begins with one."""
    return [name for name, value in self.given().items() if _is_number(_first(value))]

  def number(self, name: str):
    """The number of that name."""
    return _first(self.given()[name])

  def with_number(self, name: str, number) -> "Call":
    """The same call with another number, at the front where there is a list."""

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
    """The same call with copies of its tensors."""
    args, kwargs = copied((self.args, self.kwargs), device)
    return dataclasses.replace(self, args=tuple(args), kwargs=kwargs)

  def run(self):
    """The results."""
    torch.manual_seed(0)
    with torch.no_grad():
      return self.func(*self.args, **self.kwargs)


def _first(value):
  return value[0] if isinstance(value, list | tuple) and value else value


def _is_number(value) -> bool:
  return type(value) is float or (type(value) is int and value in _INT32)


class _Recorder(TorchDispatchMode):
  """Notes the ATen operations that arrive at jax."""

  def __init__(self):
    super().__init__()
    self.calls: list[Call] = []

  def __torch_dispatch__(self, func, types, args=(), kwargs=None):
    self.calls.append(Call(func, args, kwargs or {}))
    return func(*args, **(kwargs or {}))


def calls_of(op, sample) -> list[Call]:
  """The operations of an operator of `op_db` and of its gradient, and itself."""
  whole = Call(op, (sample.input, *sample.args), sample.kwargs)
  args, kwargs = copied(
    (whole.args, whole.kwargs), "jax", requires_grad=op.supports_autograd
  )
  recorder = _Recorder()
  # What jax refuses is for other tests; here it only is not called again.
  with torchax.default_env(), recorder, contextlib.suppress(Exception):
    results = [t for t in tensors_of(op(*args, **kwargs)) if t.requires_grad]
    if results:
      torch.autograd.backward(results, list(map(torch.ones_like, results)))
  aten = [call for call in recorder.calls if call.func.namespace == "aten"]
  return [*aten, whole]


def close_to(number) -> list:
  """Numbers near one, of its type."""
  if type(number) is int:
    return [number + step for step in (*range(-5, 0), *range(1, 13))]
  return [number + 0.013 * step for step in (*range(-6, 0), *range(1, 7))]


def _forms(result) -> list:
  return [
    (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
    for leaf in pytree.tree_leaves(result)
  ]


def alternatives(call: Call, name: str) -> list:
  """Numbers by which CPU torch gives results of the same form."""
  on_cpu = call.on("cpu")
  try:
    expected = _forms(on_cpu.run())
  except Exception:
    return []  # an operation of jax alone
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
  """Whether every number takes a program of its own, where a few special ones may.

  None where too few numbers can be tried.
  """
  found = _counts(call, name)
  return all(found) if found else None


def _counts(call: Call, name: str) -> list[int]:
  """Programs that each of the `alternatives` takes after the first two."""
  found = []
  for number in alternatives(call, name):
    moved = call.with_number(name, number).on("jax")
    before = program_limit.count()
    with torchax.default_env():
      try:
        moved.run()
      except Exception:
        continue  # what jax refuses is for other tests
    found.append(program_limit.count() - before)
  return found[FEWEST - 1 :]


def places(calls) -> Iterator[tuple[Call, str]]:
  """Each operation with each of its numbers; of the operator itself those with floats.

  Its integers are varied where they arrive, as the schemas name them.
  """
  for call in calls:
    for name in call.numbers():
      if isinstance(call.func, OpOverload) or type(call.number(name)) is float:
        yield call, name
