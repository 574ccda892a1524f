"""Gradients of functions on arrays, for torch's autograd.

Operations that torch differentiates itself need nothing from here: their backward
formulas are ATen operations. Functions caught above ATen are differentiated by
`jax.vjp`, compiled; their backward passes can be differentiated again.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.core import explicit_axes, grad_mode, programs
from torchax.core.programs import Program
from torchax.dispatch import compiling
from torchax.dispatch.batched_gradients import over_batches
from torchax.registry.operators import Operator
from torchax.tensor import Tensor, new_tensor


def is_inexact(array) -> bool:
  """True for floats and complex numbers, which alone have derivatives."""
  return jnp.issubdtype(array.dtype, jnp.inexact)


def conjugate(arrays):
  """torch's gradient of a complex number is the conjugate of JAX's cotangent."""
  return [
    a.conj() if jnp.issubdtype(a.dtype, jnp.complexfloating) else a for a in arrays
  ]


class ArrayFunction:
  """A pure function of arrays, with its compiled value and gradient.

  Args:
    function: `(*arrays) -> pytree of arrays`.
    saves_residuals: keep what the gradient needs from the forward pass, for functions
      that cost much; otherwise the gradient starts again from the arguments, which
      takes less memory and fewer results.
    compiled: run it under `jax.jit`; not for functions that are made for one call.
    operator: whose lowering it calls, which may turn out not to allow that.
    numbers: how many of its first arguments are numbers, which have no gradient.
    backward: `(arrays, cotangents) -> gradients` of the arrays that are no numbers,
      where a formula is known; else JAX differentiates the function.
  """

  def __init__(
    self,
    function: Callable,
    saves_residuals: bool = False,
    compiled: bool = True,
    operator: Operator | None = None,
    numbers: int = 0,
    backward: Callable | None = None,
  ):
    self.saves_residuals = saves_residuals
    self._is_compiled = compiled
    self._operator = operator
    self._numbers = numbers
    self._backward = backward
    self._function = function = explicit_axes.explicitly(function, compiled)
    self._compiled = compiling.compiled(function, operator)
    self._compiled_linearize = compiling.compiled(self._linearize, operator)
    self._gradients: dict[tuple, ArrayFunction] = {}

  def value(self, *arrays):
    """The result; compiled unless JAX is tracing."""
    return self.chosen(self._compiled, self._function)(*arrays)

  def chosen(self, compiled: Program, function: Callable) -> Callable:
    """What a call now goes through: a program, the same in a trace, or the function."""
    allowed = self._operator is None or self._operator.execution.compiled is not False
    if not (allowed and self._is_compiled):
      return function
    if jax_compat.is_top_level():
      return compiled
    return function if jax_compat.is_staging() else compiled.in_traces

  def linearize(self, *arrays):
    """The result, and its pull-back: cotangents of outputs -> of inputs.

    Both are lists of the floating-point and complex leaves alone.
    """
    return self.chosen(self._compiled_linearize, self._linearize)(*arrays)

  def _linearize(self, *arrays):
    places = [n for n, a in enumerate(arrays) if n >= self._numbers and is_inexact(a)]

    def on_inexact(*inexact):
      given = list(arrays)
      for place, array in zip(places, inexact):
        given[place] = array
      out = self._function(*given)
      return [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], out

    inexact = [arrays[n] for n in places]
    results, pull_back, out = jax.vjp(on_inexact, *inexact, has_aux=True)
    return out, explicit_axes.taking_any(pull_back, results)

  def gradient(self, wanted: tuple[bool, ...]) -> "ArrayFunction":
    """`(*arrays, *cotangents) -> gradients`, of the arguments that are wanted."""
    gradient = self._gradients.get(wanted)
    if gradient is None:
      pull_back = functools.partial(self._pull_back, wanted)
      gradient = ArrayFunction(
        pull_back,
        compiled=self._is_compiled,
        operator=self._operator,
        numbers=self._numbers,
      )
      self._gradients[wanted] = gradient
    return gradient

  def _pull_back(self, wanted, *arrays):
    end = self._numbers + len(wanted)
    inputs, cotangents = arrays[:end], arrays[end:]
    if self._backward is not None:
      found = self._backward(inputs, cotangents)
      return [gradient for gradient, want in zip(found, wanted) if want]
    _, pull_back = self._linearize(*inputs)
    gradients = iter(_pull(pull_back, list(cotangents)))
    inputs = inputs[self._numbers :]
    found = [next(gradients) if is_inexact(array) else None for array in inputs]
    return [gradient for gradient, want in zip(found, wanted) if want]


class WithNumbers:
  """An `ArrayFunction` with values for its numbers; a function of its other arguments.

  So what differs in numbers alone is compiled once, and autograd sees no more arguments
  than there are.

  Args:
    function: whose first arguments are numbers.
    numbers: their values.
  """

  def __init__(self, function: ArrayFunction, numbers: tuple):
    self.saves_residuals, self.chosen = function.saves_residuals, function.chosen
    self._function, self._numbers = function, numbers

  def value(self, *arrays):
    """As `ArrayFunction.value`."""
    return self._function.value(*self._numbers, *arrays)

  def linearize(self, *arrays):
    """As `ArrayFunction.linearize`."""
    return self._function.linearize(*self._numbers, *arrays)

  def gradient(self, wanted: tuple[bool, ...]) -> "WithNumbers":
    """As `ArrayFunction.gradient`."""
    return WithNumbers(self._function.gradient(wanted), self._numbers)


def _pull(pull_back, cotangents):
  return conjugate(pull_back(conjugate(cotangents)))


@functools.cache
def _compiled_pull() -> Callable:
  return programs.jit(_pull)


class _Call(torch_compat.OwnFunction):
  """One recorded call of an `ArrayFunction`."""

  @staticmethod
  def forward(ctx, function, structure, *tensors):
    env = tensors[0]._env
    arrays = [t.jax() for t in tensors]
    if function.saves_residuals:
      out, ctx.pull_back = function.linearize(*arrays)
    else:
      out = function.value(*arrays)
    leaves, treedef = jax.tree.flatten(out)
    structure.append(treedef)
    ctx.function, ctx.env = function, env
    ctx.shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    ctx.save_for_backward(*tensors)
    # `backward` makes zeros where they are needed, beside the results.
    ctx.set_materialize_grads(False)
    outputs = tuple([new_tensor(leaf, env) for leaf in leaves])
    exact = [o for o in outputs if not (o.is_floating_point() or o.is_complex())]
    if exact:
      ctx.mark_non_differentiable(*exact)
    return outputs

  @staticmethod
  @over_batches
  def backward(ctx, *grads):
    cotangents = [
      new_tensor(jnp.zeros(shape, dtype), ctx.env) if grad is None else grad
      for grad, (shape, dtype) in zip(grads, ctx.shapes)
      if jnp.issubdtype(dtype, jnp.inexact)
    ]
    results = iter(_gradients(ctx, ctx.saved_tensors, cotangents))
    wanted = ctx.needs_input_grad[2:]
    return None, None, *[next(results) if want else None for want in wanted]


def _gradients(ctx, tensors, cotangents) -> list[Tensor]:
  """The gradients of the arguments that need one."""
  wanted = ctx.needs_input_grad[2:]
  function, env = ctx.function, ctx.env
  if torch.is_grad_enabled():  # create_graph: the gradient is differentiated again
    return call(function.gradient(wanted), [*tensors, *cotangents])
  arrays = [c.jax() for c in cotangents]
  if not function.saves_residuals:
    gradient = function.gradient(wanted)
    found = gradient.value(*[t.jax() for t in tensors], *arrays)
    return [new_tensor(array, env) for array in found]
  pull = function.chosen(_compiled_pull(), _pull)
  remaining = iter(pull(ctx.pull_back, arrays))
  found = [
    next(remaining) if t.is_floating_point() or t.is_complex() else None
    for t in tensors
  ]
  return [new_tensor(array, env) for array, want in zip(found, wanted) if want]


def call(function: ArrayFunction | WithNumbers, tensors: list[Tensor]):
  """Runs a function of arrays on tensors; recorded by autograd if one needs it.

  Returns:
    The function's pytree with tensors for its arrays.
  """
  if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
    structure: list = []
    leaves = torch_compat.apply_function(_Call, function, structure, *tensors)
    return jax.tree.unflatten(structure[0], leaves)
  env = tensors[0]._env
  result = function.value(*[t.jax() for t in tensors])
  if type(result) is jax_compat.ArrayImpl:  # the common case, quicker
    return new_tensor(result, env)
  result = grad_mode.stopped(result)
  return jax.tree.map(lambda array: new_tensor(array, env), result)
