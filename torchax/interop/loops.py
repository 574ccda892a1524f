"""Control flow of `jax.lax` on torch functions, with random streams in the carry.

Each iteration draws the numbers of the unrolled loop, since the count of draws is part
of the carry. The length of a `while_loop` is unknown, so it draws from a child stream
and advances the current one by one draw. `cond` and `switch` advance the stream by the
draws of the branch that draws most.

A loop outside of a JAX transformation is compiled, once per body function. `maps.py`
has `jax_vmap` and `jax_shard_map`; `tracing/transform.py` is the common part.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
import numpy as np
import torch
from jax import lax

from torchax.compat import jax_compat
from torchax.compat.user_code import location_of, name_of
from torchax.core.partitions import is_tensor
from torchax.core.tracebacks import hide_library_frames
from torchax.errors import RngError
from torchax.interop import mismatches
from torchax.interop.jit import Jitted
from torchax.rng import Advance, fold_in, stream_operands
from torchax.tensor import Tensor
from torchax.tracing.transform import Transformed
from torchax.types import R

Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")
Operands = TypeVarTuple("Operands")

Index = int | torch.Tensor

CONDITION_DRAWS = (
  "The condition of while_loop draws random numbers. Draw in the body, and pass what "
  "the condition needs in the value."
)


@hide_library_frames
def scan(
  f: Callable[[Carry, X], tuple[Carry, Y]],
  init: Carry,
  xs: X = None,  # type: ignore[assignment]
  length: int | None = None,
  reverse: bool = False,
  unroll: int | bool = 1,
) -> tuple[Carry, Y]:
  """Apply `jax.lax.scan` to a torch function; differentiable.

  Args:
    f: function `(carry, x) -> (carry, y)` of trees of tensors. It may read captured
      tensors, and change them in place, such as running statistics.
    init: first carry.
    xs: tree of tensors of shape (length, …), or None.
    length: number of iterations; required without `xs`.
    reverse: iterate from the last x to the first.
    unroll: iterations in one step of the compiled loop.

  Returns:
    The last carry, and the stacked y's. Arguments are not changed in place.

  Raises:
    ValueError: there is neither `xs` nor `length`, or the lengths differ.
    TypeError: `f` does not return a pair, or changes the form of the carry.

  >>> def add(total, x):
  ...   return total + x, total
  >>> ones = torch.ones(3, device="jax")
  >>> scan(add, ones.sum(), ones)
  (tensor(6., device='jax:0'), tensor([3., 4., 5.], device='jax:0'))
  """
  length = _length(xs, length)
  options = (length, reverse, unroll)
  return run_loop(scan_in_trace, (f,), options, (init, xs))


@hide_library_frames
def fori_loop(
  lower: Index,
  upper: Index,
  body_fun: Callable[[torch.Tensor, Carry], Carry],
  init_val: Carry,
  *,
  unroll: int | bool | None = None,
) -> Carry:
  """Apply `jax.lax.fori_loop` to a torch function.

  With Python integers as bounds it is differentiable, and each iteration draws the
  numbers of a Python loop. With tensors as bounds it is a `while_loop`.

  Args:
    lower: first index, an int or a 0-d integer tensor.
    upper: end of the indices, exclusive.
    body_fun: function `(index, value) -> value`; the index is a 0-d int32 tensor.
    init_val: first value, a tree of tensors.
    unroll: iterations in one step of the compiled loop.

  Returns:
    The last value.

  >>> fori_loop(0, 3, lambda i, value: 2 * value + i, torch.ones(2, device="jax"))
  tensor([12., 12.], device='jax:0')
  """
  if isinstance(lower, int) and isinstance(upper, int):
    if upper <= lower:
      return init_val
    return run_loop(_fori, (body_fun,), (lower, upper, unroll or 1), (init_val,))
  state = (_as_index(lower), _as_index(upper), init_val)
  return run_loop(_fori_while, (body_fun,), (), state)


@hide_library_frames
def while_loop(
  cond_fun: Callable[[Carry], torch.Tensor],
  body_fun: Callable[[Carry], Carry],
  init_val: Carry,
) -> Carry:
  """Apply `jax.lax.while_loop` to torch functions.

  It is not differentiable in reverse mode. The body draws from a child stream; the
  current stream advances by one draw.

  Args:
    cond_fun: function `value -> condition`, a 0-d bool tensor. It must not draw.
    body_fun: function `value -> value`, with the same structure, shapes and dtypes.
    init_val: first value, a tree of tensors.

  Returns:
    The last value.

  Raises:
    RngError: the condition draws.
    TypeError: the condition is not a 0-d bool, or the body changes the value's form.

  >>> double = lambda x: 2 * x
  >>> while_loop(lambda x: x.sum() < 100, double, torch.ones(2, device="jax"))
  tensor([64., 64.], device='jax:0')
  """
  return run_loop(while_in_trace, (cond_fun, body_fun), (), (init_val,))


@hide_library_frames
def cond(
  pred: bool | torch.Tensor,
  true_fun: Callable[[*Operands], R],
  false_fun: Callable[[*Operands], R],
  *operands: *Operands,
) -> R:
  """Apply `jax.lax.cond` to torch functions; differentiable.

  Both branches draw from the same position of the stream. It advances by the draws of
  the branch that draws more.

  Args:
    pred: bool, or 0-d bool tensor.
    true_fun: function of the operands.
    false_fun: function of the operands, whose results have the same shapes and dtypes.
    operands: trees of tensors.

  Returns:
    The result of the selected branch.

  Raises:
    TypeError: `pred` is not 0-d, or the results of the branches differ in form.

  >>> x = torch.tensor([-1.0, 2.0], device="jax")
  >>> cond(x.sum() > 0, torch.neg, torch.exp, x)
  tensor([ 1., -2.], device='jax:0')
  """
  if isinstance(pred, torch.Tensor) and pred.dim():
    raise TypeError(
      f"The condition of cond is a bool or a tensor of shape [], but it has the shape "
      f"{list(pred.shape)}. Reduce it: `.any()`, `.all()`."
    )
  index = pred.to(torch.int32) if isinstance(pred, Tensor) else _as_index(int(pred))
  return run_loop(_switch, (false_fun, true_fun), ("cond",), (index, operands))


@hide_library_frames
def switch(
  index: Index, branches: Sequence[Callable[[*Operands], R]], *operands: *Operands
) -> R:
  """Apply `jax.lax.switch` to torch functions; differentiable. See `cond`.

  Args:
    index: index of the branch, an int or 0-d integer tensor, clamped to the valid
      range.
    branches: functions of the operands.
    operands: trees of tensors.

  Returns:
    The result of the selected branch.

  Raises:
    ValueError: there are no branches.
    TypeError: the results of the branches differ in form.

  >>> switch(1, [torch.neg, lambda x: 3 * x], torch.ones(2, device="jax"))
  tensor([3., 3.], device='jax:0')
  """
  branches = tuple(branches)
  if not branches:
    raise ValueError("switch expects at least one branch, but got none.")
  return run_loop(_switch, branches, ("switch",), (_as_index(index), operands))


def _as_index(value) -> torch.Tensor:
  if isinstance(value, Tensor):
    return value.to(torch.int32)
  return torch.tensor(value, dtype=torch.int32).to("jax")


def _length(xs: Any, length: int | None) -> int:
  """Return the number of iterations of a scan.

  Raises:
    ValueError: there is no length, or more than one.
  """
  tensors = jax.tree.leaves(xs, is_leaf=is_tensor)
  for number, leaf in enumerate(tensors):
    if not np.ndim(leaf):
      raise ValueError(f"scan goes over the first dimension, but x {number} has none.")
  lengths: set[int] = {leaf.shape[0] for leaf in tensors}
  if length is not None:
    lengths.add(length)
  if len(lengths) != 1:
    raise ValueError(
      "scan expects xs with one common length, or length=, but got lengths "
      f"{sorted(lengths)}."
    )
  return lengths.pop()


# In a trace --------------------------------------------------------------------------


def scan_in_trace(functions, args, length: int, reverse: bool, unroll, kind="scan"):
  init, xs = args

  def lower(call, rng, captured, args):
    init, xs = args
    advances: list[Advance] = []
    forms: list = [None, None]

    def body(carry, x):
      counts, states, value = carry
      streams = stream_operands.with_counts(rng, counts)
      result = call(0, streams, loop.with_states(captured, states), (value, x))
      before, (value, y) = value, _pair(result.out, functions[0])
      forms[:] = mismatches.describe_tree(before), mismatches.describe_tree(value)
      _require_no_seed(kind, result.advance)
      advances.append(result.advance)
      counts = stream_operands.counts_after(counts, result.advance.draws)
      return (counts, result.states, value), y

    start = stream_operands.counts_of(rng), loop.states_of(captured), init
    with mismatches.rewording_type_errors(
      lambda: mismatches.carry_message(kind, functions[0], *forms)
    ):
      (_, states, value), ys = lax.scan(
        body, start, xs, length=length, reverse=reverse, unroll=unroll
      )
    return (value, ys), states, advances[-1].repeat(length, "iteration")

  loop = Transformed(kind, functions, lower, times=length)
  return loop((init, xs))


def _pair(out, body: Callable):
  if isinstance(out, tuple | list) and len(out) == 2:
    return out
  kind = "one tensor" if isinstance(out, jax.Array) else type(out).__name__
  raise TypeError(
    f"The body of scan returns (carry, y), a pair; y may be None. `{name_of(body)}` "
    f"returned {kind}."
  )


def _fori(functions, args, lower: int, upper: int, unroll):
  (body,) = functions
  indices = torch.arange(lower, upper, dtype=torch.int32).to("jax")

  def step(value, index):
    return body(index, value), None

  step.__name__ = name_of(body)
  options = (upper - lower, False, unroll, "fori_loop")
  return scan_in_trace((step,), (*args, indices), *options)[0]


def _fori_while(functions, args):
  (body,) = functions

  def step(state):
    index, upper, value = state
    return index + 1, upper, body(index, value)

  step.__name__ = name_of(body)
  return while_in_trace(
    (lambda state: state[0] < state[1], step), (args,), "fori_loop"
  )[2]


def while_in_trace(functions, args, kind="while_loop"):
  def lower(call, rng, captured, args):
    # The loop uses one draw of each stream that its body draws from, as a child key.
    keyed = loop.traced.keyed
    draws = {owner: s.peek(kind) for owner, s in keyed.drawn_from(loop.known).items()}
    keys = {owner: fold_in(*operands) for owner, operands in draws.items()}
    child = keyed.children(rng, keys)
    advances: list[Advance] = []
    forms: list = [None, None, None]

    def condition(carry):
      counts, states, value = carry
      streams = stream_operands.with_counts(child, counts)
      result = call(0, streams, loop.with_states(captured, states), (value,))
      if any(result.advance.draws):
        raise RngError(CONDITION_DRAWS)
      forms[2] = mismatches.describe_tree(result.out)
      return result.out

    def body(carry):
      counts, states, value = carry
      streams = stream_operands.with_counts(child, counts)
      result = call(1, streams, loop.with_states(captured, states), (value,))
      forms[:2] = mismatches.describe_tree(value), mismatches.describe_tree(result.out)
      _require_no_seed(kind, result.advance)
      loop.require_known(result.advance)
      advances.append(result.advance)
      counts = stream_operands.counts_after(counts, result.advance.draws)
      return counts, result.states, result.out

    start = stream_operands.counts_of(child), loop.states_of(captured), args[0]
    with mismatches.rewording_type_errors(
      lambda: mismatches.loop_message(kind, functions, *forms)
    ):
      _, states, value = lax.while_loop(condition, body, start)
    return value, states, advances[-1].log_only("while_loop")

  loop = Transformed(kind, functions, lower, times=None)
  value = loop(args)
  for stream in loop.traced.keyed.drawn_from(loop.known).values():
    stream.record_draw("while_loop")
  return value


def _switch(functions, args, kind):
  def lower(call, rng, captured, args):
    index, operands = args
    advances: dict[int, Advance] = {}
    forms: dict = {}

    def branch(number, operands):
      result = call(number, rng, captured, operands)
      _require_no_seed("a branch", result.advance)
      advances[number] = result.advance
      forms[number] = mismatches.describe_tree(result.out)
      return result.out, result.states

    branches = [functools.partial(branch, n) for n in range(len(functions))]
    if len(branches) == 1:
      out, states = branches[0](operands)
    else:
      names = list(map(name_of, functions))
      with mismatches.rewording_type_errors(
        lambda: mismatches.branch_mismatch_message(kind, names, forms)
      ):
        out, states = lax.switch(index, branches, operands)
    return out, states, Advance.of_branches([advances[n] for n in range(len(branches))])

  return Transformed(kind, functions, lower)(args)


def _require_no_seed(name: str, advance: Advance) -> None:
  if advance.seedings:
    raise RngError(
      f"{name} seeds the random stream, which would start over in every turn. Seed "
      "before it, or draw in `with env.rng_scope(key):`."
    )


# Compiled, outside of traces ---------------------------------------------------------

# First function -> compiled loops. They hold functions weakly, so a loop with a body
# that was defined for one call is freed together with the body.
_compiled: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class _Loop:
  """Compiled loop, a function of the loop's arguments."""

  def __init__(self, lower: Callable, functions: tuple, options: tuple):
    self.__name__ = lower.__name__.removeprefix("_").removesuffix("_in_trace")
    self._lower = lower
    self._references = tuple(map(_weak, functions))
    self.options = options
    self.jitted = Jitted(self._trace, {})
    self.jitted.traced.location = location_of(functions[0])
    for function in functions:
      owner = getattr(function, "__self__", None)
      if isinstance(owner, torch.nn.Module):
        self.jitted.traced.guards.guard_on_module(owner)

  def matches(self, lower: Callable, functions: tuple, options: tuple) -> bool:
    """Return True if this is the same loop over the same functions."""
    return (
      self._lower is lower
      and self.options == options
      and tuple(reference() for reference in self._references) == functions
    )

  def _trace(self, *args):
    functions = tuple(reference() for reference in self._references)
    return self._lower(functions, args, *self.options)


def _weak(function: Callable):
  if hasattr(function, "__self__") and hasattr(function, "__func__"):
    return weakref.WeakMethod(function)  # each access creates a new method object
  return weakref.ref(function)


def run_loop(lower: Callable, functions: tuple, options: tuple, args: tuple) -> Any:
  """Run a loop as part of the trace in progress, or compiled if there is none."""
  for function in functions:
    if not callable(function):
      raise TypeError(f"Expected a function, but got {type(function).__name__}.")
  if not jax_compat.is_top_level():
    return lower(functions, args, *options)
  first = functions[0]
  owner = first.__self__ if isinstance(_weak(first), weakref.WeakMethod) else first
  loops = _compiled.setdefault(owner, [])
  for loop in loops:
    if loop.matches(lower, functions, options):
      return loop.jitted.call(None, args, {}, alive=functions)
  loops.append(_Loop(lower, functions, options))
  return loops[-1].jitted.call(None, args, {}, alive=functions)
