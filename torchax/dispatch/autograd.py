"""Gradients of functions of arrays, for torch's autograd.

Functions caught above ATen (`torch_functions.py`) are differentiated by `jax.vjp`,
compiled; their backward passes can be differentiated again. ATen operations do not use
this module: torch's backward formulas for them are ATen operations too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat import jax_compat, torch_compat
from torchax.compat.user_code import name_of
from torchax.core import deferred, explicit_axes, grad_mode
from torchax.core.chains import WHOLE, reader_of
from torchax.core.error_messages import donated_error
from torchax.core.recorder import ARRAYS
from torchax.core.static_values import StaticValue
from torchax.core.storage import active
from torchax.dispatch import compiling
from torchax.dispatch.batched_gradients import over_batches
from torchax.dispatch.operands import operand_of
from torchax.registry.operators import Operator
from torchax.tensor import Tensor, new_tensor

_grad: Any = torch.Tensor.grad

gradient_of: Callable[[Any], Any] = _grad.__get__
"""Return the `.grad` of a leaf; a trace does not record the access."""

set_gradient: Callable[[Any, Any], None] = _grad.__set__
"""Set the `.grad` of a leaf; a trace does not record the access."""


@contextlib.contextmanager
def without_gradients(leaves: Iterable[Tensor]) -> Iterator[None]:
  """Enclose a backward pass that may add to the `.grad` of leaves: each has none here.

  A backward that runs another one adds to `.grad`: reentrant checkpoints, and networks
  that recompute their activations.
  """
  before = [(leaf, gradient_of(leaf)) for leaf in leaves]
  try:
    for leaf, _ in before:
      set_gradient(leaf, None)
    yield
  finally:
    for leaf, gradient in before:
      set_gradient(leaf, gradient)


def is_inexact(array) -> bool:
  """Return True for floats and complex numbers, the dtypes with derivatives."""
  return jnp.issubdtype(array.dtype, jnp.inexact)


def conjugate(arrays):
  """Conjugate complex arrays: torch's gradient is the conjugate of JAX's cotangent."""
  return [
    a.conj() if jnp.issubdtype(a.dtype, jnp.complexfloating) else a for a in arrays
  ]


def without_held(residuals: Sequence, held: Sequence) -> tuple[list, tuple]:
  """Return the residuals that a program has to return.

  It would return copies of those that its caller holds.

  Args:
    residuals: residuals in a trace.
    held: operands and results of the trace. Scalars do not count: they may be Python
      numbers in a call.

  Returns:
    The other residuals, and for each residual its index in `held`, or None.
  """
  known = {id(each): n for n, each in enumerate(held) if getattr(each, "ndim", 0)}
  sources = tuple([known.get(id(residual)) for residual in residuals])
  return [r for r, n in zip(residuals, sources) if n is None], sources


def with_held(own: Sequence, sources: Sequence[int | None], held: Sequence) -> list:
  """Return all residuals of a call, from the results of `without_held`."""
  remaining = iter(own)
  found = [next(remaining) if n is None else held[n] for n in sources]
  # The caller may change a numpy array.
  return [jnp.array(r) if isinstance(r, np.ndarray) else r for r in found]


def run_backward(program: Callable, *operands):
  """Call the program of a backward pass.

  Raises:
    DonationError: the memory of a residual was donated.
  """
  try:
    return program(*operands)
  except (RuntimeError, ValueError) as error:
    if jax_compat.is_about_deletion(error):
      raise donated_error("A backward pass") from error
    raise


class _Compiled:
  """Function of arrays, with its program.

  Attributes:
    function: the function.
    program: see `compiling.jit_if_possible`.
    inlined: the function, for calls that become part of a jaxpr. Calls on equal types,
      as in the layers of a model, are traced once.
  """

  def __init__(self, function: Callable, operator: Operator | None = None):
    self.function = function
    self.program = compiling.jit_if_possible(function, operator)
    may_fail = operator is not None and operator.execution.compiled is None
    self.inlined = function if may_fail else jax.jit(function, inline=True)


def _named(function: Callable, name: str) -> Callable:
  """Return a function with a name, which its program has in logs and profiles."""

  def run(*args):
    return function(*args)

  run.__name__ = name
  return run


class ArrayFunction:
  """Pure function of arrays, with its compiled value and gradient.

  Args:
    function: `(*arrays) -> pytree of arrays`.
    saves_residuals: keep the residuals of the forward pass, for expensive functions;
      otherwise the gradient recomputes the forward pass, which takes less memory and
      fewer results.
    compiled: run the function under `jax.jit`; False if it is created for one call.
    operator: operator of the lowering that it calls, which may not compile.
    numbers: number of leading arguments that are numbers, without a gradient.
    backward: `(arrays, cotangents) -> gradients` of the arrays after the numbers; if
      None, JAX differentiates the function.
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
    may_fail = operator is not None and operator.execution.compiled is None
    self._run = deferred.run_at_once if may_fail else deferred.run
    self._function = function = explicit_axes.with_explicit_axes(function, compiled)
    self._value = _Compiled(function, operator)
    self._name = name_of(function).lstrip("_")
    linearize = _named(self._linearize_apart, f"{self._name}_with_residuals")
    self._linearized = _Compiled(linearize, operator)
    self._gradients: dict[tuple, ArrayFunction] = {}

  def value(self, *arrays):
    """Return the result; compiled unless JAX is tracing."""
    return self._call(self._value, arrays)

  def pull(self, pullback, cotangents: list) -> list:
    """Return the cotangents of the inputs; see `linearize`."""
    return run_backward(self._call, self._pulled, (pullback, cotangents))

  @functools.cached_property
  def _pulled(self) -> _Compiled:
    return _Compiled(_named(_pull_cotangents, f"gradient_of_{self._name}"))

  def _call(self, form: "_Compiled", operands: Sequence):
    """Call the form of a function that suits the trace in progress."""
    allowed = self._operator is None or self._operator.execution.compiled is not False
    if not (allowed and self._is_compiled):
      return form.function(*deferred.values(operands))
    if jax_compat.is_top_level():
      return self._run(form.program, operands)
    run = form.inlined if jax_compat.is_staging() else form.program.in_traces
    return run(*deferred.values(operands))

  def linearize(self, *arrays):
    """Return the result and its pullback: cotangents of outputs -> of inputs.

    Both lists of cotangents contain floating-point and complex leaves only.
    """
    out, own, form = self._call(self._linearized, arrays)
    treedef, sources = form.value
    leaves = with_held(own, sources, [*arrays, *jax.tree.leaves(out)])
    return out, jax.tree.unflatten(treedef, leaves)

  def _linearize_apart(self, *arrays):
    """Return the result, the residuals by `without_held`, and the pullback's form."""
    out, pullback = self._linearize(*arrays)
    leaves, treedef = jax.tree.flatten(pullback)
    own, sources = without_held(leaves, [*arrays, *jax.tree.leaves(out)])
    return out, own, StaticValue((treedef, sources))

  def _linearize(self, *arrays):
    indices = [n for n, a in enumerate(arrays) if n >= self._numbers and is_inexact(a)]

    def on_inexact(*inexact):
      given = list(arrays)
      for index, array in zip(indices, inexact):
        given[index] = array
      out = self._function(*given)
      return [leaf for leaf in jax.tree.leaves(out) if is_inexact(leaf)], out

    inexact = [arrays[n] for n in indices]
    results, pullback, out = jax.vjp(on_inexact, *inexact, has_aux=True)
    return out, explicit_axes.accept_any_sharding(pullback, results)

  def gradient(self, wanted: tuple[bool, ...]) -> "ArrayFunction":
    """Return the function `(*arrays, *cotangents) -> gradients` of wanted arguments."""
    gradient = self._gradients.get(wanted)
    if gradient is None:
      pullback = functools.partial(self._pullback, wanted)
      gradient = ArrayFunction(
        _named(pullback, f"gradient_of_{self._name}"),
        compiled=self._is_compiled,
        operator=self._operator,
        numbers=self._numbers,
      )
      self._gradients[wanted] = gradient
    return gradient

  def _pullback(self, wanted, *arrays):
    end = self._numbers + len(wanted)
    inputs, cotangents = arrays[:end], arrays[end:]
    if self._backward is not None:
      found = self._backward(inputs, cotangents)
      return [gradient for gradient, want in zip(found, wanted) if want]
    _, pullback = self._linearize(*inputs)
    gradients = iter(_pull_cotangents(pullback, list(cotangents)))
    inputs = inputs[self._numbers :]
    found = [next(gradients) if is_inexact(array) else None for array in inputs]
    return [gradient for gradient, want in zip(found, wanted) if want]


def _pull_cotangents(pullback, cotangents):
  return conjugate(pullback(conjugate(cotangents)))


def _operand(tensor: Tensor):
  """Return the array of a tensor for a program; `Pending` in the fused mode."""
  if tensor._chain is WHOLE:
    return operand_of(tensor)
  if active.boundary is None and deferred.is_recording():
    reader, operand = reader_of(tensor._storage.operand, tensor._chain)
    return deferred.run(reader, [operand])
  return tensor.jax()


class _Call(torch_compat.OwnFunction):
  """Call of an `ArrayFunction`, as recorded by autograd."""

  @staticmethod
  def forward(ctx, function, numbers, structure, *tensors):
    env = tensors[0]._env
    arrays, pullback = [*numbers, *map(_operand, tensors)], None
    if function.saves_residuals:
      out, pullback = function.linearize(*arrays)
    else:
      out = function.value(*arrays)
    leaves, treedef = jax.tree.flatten(out)
    structure.append(treedef)
    ctx.function, ctx.numbers, ctx.env = function, numbers, env
    ctx.shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    if pullback is None or torch_compat.has_saved_tensors_hooks():
      save(ctx, pullback, tensors)
    else:
      # Residuals do not change with the tensors, so those may be changed in place.
      save(ctx, (pullback, [(tensor, tensor._version) for tensor in tensors]))
    # `backward` creates the zeros it needs, on the devices of the results.
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
    pullback, tensors = load_saved(ctx)
    if tensors is None:
      pullback, versions = pullback
      tensors = _unchanged(versions)
    results = iter(_gradients(ctx, tensors, pullback, cotangents))
    wanted = ctx.needs_input_grad[3:]
    return None, None, None, *[next(results) if want else None for want in wanted]


def save(ctx, content, tensors: Sequence[Tensor] | None = None) -> None:
  """Save the inputs of a backward pass in its context.

  Args:
    ctx: context of a `torch.autograd.Function`.
    content: any object.
    tensors: tensors that hooks on saved tensors must see, such as a checkpoint's. If
      None, torch frees the content after the backward pass, as it frees saved tensors.
  """
  ctx.holds = tensors is None
  if tensors is None:
    # One tensor with an attribute is cheaper than one tensor per array.
    holder: Any = torch_compat.attribute_holder()
    holder.content = content
    ctx.save_for_backward(holder)
  else:
    ctx.content = content
    ctx.save_for_backward(*tensors)


def load_saved(ctx) -> tuple[Any, Sequence[Tensor] | None]:
  """Return the content and the tensors passed to `save`."""
  tensors = ctx.saved_tensors
  return (tensors[0].content, None) if ctx.holds else (ctx.content, tensors)


def _unchanged(versions: list[tuple[Tensor, int]]) -> list[Tensor]:
  """Return the tensors; raise if one has changed and is to be differentiated."""
  for tensor, version in versions:
    if torch.is_grad_enabled() and tensor._version != version:
      raise RuntimeError(
        f"A tensor of shape {list(tensor.shape)} has been modified by an inplace "
        "operation, and the derivative of a gradient needs it. Clone it before."
      )
  return [tensor for tensor, _ in versions]


def _gradients(ctx, tensors, pullback, cotangents) -> list[Tensor]:
  wanted = ctx.needs_input_grad[3:]
  function, numbers, env = ctx.function, ctx.numbers, ctx.env
  if torch.is_grad_enabled():  # create_graph: the gradient is differentiated again
    return call(function.gradient(wanted), [*tensors, *cotangents], numbers)
  arrays = [_operand(cotangent) for cotangent in cotangents]
  if not function.saves_residuals:
    gradient = function.gradient(wanted)
    found = gradient.value(*numbers, *map(_operand, tensors), *arrays)
    return [new_tensor(array, env) for array in found]
  remaining = iter(function.pull(pullback, arrays))
  found = [
    next(remaining) if t.is_floating_point() or t.is_complex() else None
    for t in tensors
  ]
  return [new_tensor(array, env) for array, want in zip(found, wanted) if want]


def call(function: ArrayFunction, tensors: list[Tensor], numbers: tuple = ()):
  """Run a function of arrays on tensors; autograd records it if a tensor needs a grad.

  Args:
    function: the function.
    tensors: its arguments after the numbers.
    numbers: its leading arguments; calls that differ only in these share one program.

  Returns:
    The function's pytree, with tensors for its arrays.
  """
  if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
    structure: list = []
    leaves = torch_compat.apply_function(_Call, function, numbers, structure, *tensors)
    return jax.tree.unflatten(structure[0], leaves)
  env = tensors[0]._env
  result = function.value(*numbers, *map(_operand, tensors))
  if type(result) in ARRAYS:  # fast path
    return new_tensor(result, env)
  result = grad_mode.stop_gradients(result)
  return jax.tree.map(lambda array: new_tensor(array, env), result)
