"""Derivative of a `torch.autograd.Function` under JAX: its own backward.

JAX would differentiate the forward pass. If a function is applied in a trace, its
backward is traced right after it and becomes the derivative of the results
(`core/linear_maps.py`). Tensors saved for the backward behave as in torch: derivatives
of higher order flow through arguments and results. `register` makes torch call this
module for every `Function.apply`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.extend import core

from torchax import rng
from torchax.compat import jax_compat, torch_compat
from torchax.core import grad_mode
from torchax.core.linear_maps import with_derivative
from torchax.core.storage import active
from torchax.dispatch.autograd import (
  conjugate,
  gradient_of,
  set_gradient,
  without_gradients,
)
from torchax.tensor import Tensor, new_tensor


def _apply(apply: Any, args: tuple):
  """Return `apply(*args)`, with the function's own backward as derivative."""
  if jax_compat.is_top_level() or torch_compat.is_tracing():
    return apply(*args)
  # A nested function is part of the outer function's derivative.
  if torch_compat.in_function_forward() or torch.is_inference_mode_enabled():
    return apply(*args)
  is_stopped = grad_mode.is_stopped()
  plain = (torch_compat.OwnFunction, torch_compat.MODULE_HOOKS)
  if not is_stopped and not issubclass(apply.__self__, plain):
    indices = [
      index
      for index, arg in enumerate(args)
      if isinstance(arg, Tensor) and grad_mode.may_derive(arg.jax())
    ]
    if indices and not torch_compat.are_transforms_active():
      return _Call(args, indices).run(apply.__self__)
  with grad_mode.forward_pass(is_stopped):
    return apply(*args)


class _ReplaceArrays(torch_compat.OwnFunction):
  """Identity for torch's autograd that replaces the arrays of its tensors."""

  @staticmethod
  def forward(ctx, arrays, *tensors):
    return tuple([new_tensor(a, t._env) for a, t in zip(arrays, tensors)])

  @staticmethod
  def backward(ctx, *gradients):
    return None, *gradients


def _replace_arrays(arrays, tensors) -> tuple[Tensor, ...]:
  return torch_compat.apply_function(_ReplaceArrays, arrays, *tensors)


@contextlib.contextmanager
def _requiring_gradients(tensors: Sequence[Tensor]) -> Iterator[None]:
  """Let torch's autograd record operations on the tensors, in this context only."""
  changed = [t for t in tensors if not (t.requires_grad or t.is_inference())]
  for tensor in changed:
    tensor.requires_grad_()
  try:
    yield
  finally:
    for tensor in changed:
      tensor.requires_grad_(False)


@contextlib.contextmanager
def _without_new_gradients() -> Iterator[None]:
  """Enclose a traced backward pass, which may add to the `.grad` of parameters."""
  boundary = active.boundary
  if boundary is None:
    yield
    return
  with without_gradients(boundary.leaves()):
    try:
      yield
    finally:
      for leaf in boundary.leaves():  # also those that it is the first to use
        gradient = gradient_of(leaf)
        if gradient is not None and gradient._storage.birth is boundary:
          set_gradient(leaf, None)


def _argument_of(saved):
  """Return the argument that a saved tensor is a copy of, unless it has changed.

  Adjoint methods differentiate a second call of a closure by such arguments, which the
  closure reads directly.
  """
  source = getattr(saved, "_copied_from", None)
  if source is None:
    return saved
  argument, version = source
  return argument if argument._version == version else saved


class _Call:
  """Call of a function with arguments that JAX differentiates.

  Args:
    args: arguments of the function.
    indices: positions of the arguments that JAX may differentiate.
  """

  def __init__(self, args: tuple, indices: Sequence[int]):
    self.args = args
    self.indices = indices
    self.tensors = [args[index] for index in indices]
    self.arrays = [tensor.jax() for tensor in self.tensors]
    # JAX must not differentiate the forward pass.
    self.stopped = list(map(lax.stop_gradient, self.arrays))
    self.env = self.tensors[0]._env
    self.is_recorded = torch.is_grad_enabled() and any(
      isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
    )

  def run(self, function: type[torch.autograd.Function]):
    """Return the result of `function`, with its backward as derivative."""
    sources, inputs, out = self._forward(function)
    leaves = list(out) if isinstance(out, tuple) else [out]
    indices = [
      index
      for index, leaf in enumerate(leaves)
      if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    recorded = [leaves[i] for i in indices]
    if recorded:
      for index, result in zip(indices, self._results(sources, recorded)):
        leaves[index] = result
    self._copy_writes_back(inputs, indices, recorded, leaves)
    return tuple(leaves) if isinstance(out, tuple) else leaves[0]

  def _forward(self, function):
    apply = torch_compat.apply_with_saved_scope(
      grad_mode.accessing_saved_tensors, _argument_of, function
    )
    with torch_compat.at_top_level(), torch.enable_grad():
      sources = [new_tensor(array, self.env) for array in self.stopped]
      for source in sources:
        source.requires_grad_()
      if self.is_recorded:
        pairs = zip(self.tensors, sources)
        recorded = [t if t.requires_grad else source for t, source in pairs]
        sources = _replace_arrays(self.stopped, recorded)
      # Not the sources themselves: torch forbids writes to a leaf.
      inputs = _replace_arrays(self.stopped, sources)
      args = list(self.args)
      for index, tensor in zip(self.indices, inputs):
        args[index] = tensor
      with grad_mode.forward_pass(is_stopped=True), grad_mode.accessing_saved_tensors():
        out = apply(*args)
    for index, (tensor, input) in enumerate(zip(self.tensors, inputs)):
      if input.jax() is not self.stopped[index]:
        continue
      # For a view, JAX would lose the second derivative by the saved values.
      if tensor.requires_grad or tensor.jax() is self.arrays[index]:
        input._copied_from = tensor, tensor._version
    return sources, inputs, out

  def _results(self, sources, recorded) -> Sequence[Tensor]:
    raw = [tensor.jax() for tensor in recorded]
    with _requiring_gradients(self.tensors):
      backward = _Backward.trace(sources, recorded, self.is_recorded, self.env)
    rest = backward.bind_constants([*raw, *self.stopped], [*raw, *self.arrays])
    outputs = list(map(lax.stop_gradient, raw))
    arrays = with_derivative(backward, outputs, self.arrays, rest)
    if self.is_recorded:
      return _replace_arrays(arrays, recorded)
    return [new_tensor(array, self.env) for array in arrays]

  def _copy_writes_back(self, inputs, indices, recorded, leaves) -> None:
    """Repeat the writes of the forward pass to `inputs` on the arguments themselves."""
    marked = {id(tensor): index for index, tensor in zip(indices, recorded)}
    for tensor, input, before in zip(self.tensors, inputs, self.stopped):
      index = marked.get(id(input))
      if index is not None:
        tensor.copy_(leaves[index])
        leaves[index] = tensor
      elif input.jax() is not before:
        with torch.no_grad():
          tensor.copy_(input)


class _Backward:
  """Traced backward of a function: the transpose of its derivative.

  Args:
    constants: arrays of the forward pass that the backward reads.
    run: `(constants, cotangents of the results) -> cotangents of the arguments`.
  """

  def __init__(self, constants: list, run: Callable):
    self._constants = constants
    self._run = run
    self._indices: list[int] = []

  @classmethod
  def trace(cls, sources, recorded, retains: bool, env) -> "_Backward":
    """Trace torch's gradient of `recorded` with respect to `sources`."""

    def backward(*cotangents):
      with torch_compat.at_top_level(), rng.using_enclosing():
        seeds = [new_tensor(array, env) for array in conjugate(cotangents)]
        found = torch.autograd.grad(
          recorded, sources, seeds, retain_graph=retains, allow_unused=True
        )
        return conjugate(
          [
            jnp.zeros_like(source.jax()) if gradient is None else gradient.jax()
            for source, gradient in zip(sources, found)
          ]
        )

    avals = [jax.typeof(tensor.jax()) for tensor in recorded]
    try:
      with _without_new_gradients():
        closed = jax.make_jaxpr(backward)(*avals)
    except Exception as error:
      # Raise only if a derivative is asked for.
      failure = error

      def fail(constants, cotangents):
        raise failure

      return cls([], fail)
    jaxpr = jax_compat.without_constants(closed)

    def run(constants, cotangents):
      return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*cotangents)

    return cls(list(closed.consts), run)

  def bind_constants(self, *known: list) -> list:
    """Map the constants to positions among the residuals.

    Args:
      *known: the first residuals; each list has other copies of the same arrays.

    Returns:
      The constants that are not known, which extend the residuals.
    """
    indices: dict[int, int] = {}
    for copies in known:
      for position, array in enumerate(copies):
        indices.setdefault(id(array), position)
    rest: list[Any] = []
    for constant in self._constants:
      index = indices.get(id(constant))
      if index is None:
        index = len(known[0]) + len(rest)
        rest.append(constant)
      self._indices.append(index)
    self._constants = []
    return rest

  def __call__(self, residuals, cotangents, wanted) -> list:
    # The residuals begin with the outputs.
    cotangents = [
      jnp.zeros_like(output) if cotangent is None else cotangent
      for cotangent, output in zip(cotangents, residuals)
    ]
    found = self._run([residuals[index] for index in self._indices], cotangents)
    return [gradient for gradient, want in zip(found, wanted) if want]


def register() -> None:
  """Intercept the application of every `torch.autograd.Function`."""
  torch_compat.keep_from_dynamo(_Call)
  torch_compat.intercept_applied_functions(_apply)
