"""`backward` and `torch.autograd.grad` with the environment on while they run.

For backward passes that run a part of the forward pass again, as a checkpoint does: it
has to take the same way. torch runs the handler of a function with its modes off,
and so it would run the whole backward pass. It does not look for handlers where it is
given the edges of the graph in place of tensors; so that is what it is given here.
"""

from collections.abc import Callable

import torch
from torch.autograd.graph import get_gradient_edge

from torchax import _torch_compat
from torchax.core.grad_mode import Recomputation
from torchax.tensor import Tensor


def _edges(tensors) -> list | None:
  """The graph's edges of jax tensors that need a gradient; None if others are there."""
  # torch finds the edge of a leaf by a view of it; one of its metadata is enough.
  with _torch_compat.without_function_modes(), _torch_compat.without_dispatch():
    if not all(isinstance(t, Tensor) and t.requires_grad for t in tensors):
      return None
    return [get_gradient_edge(tensor) for tensor in tensors]


def _leaf_edges(tensors) -> list | None:
  """The edges of leaves, which alone have a `.grad` to add to."""
  if not all(isinstance(tensor, Tensor) and tensor.is_leaf for tensor in tensors):
    return None
  return _edges(tensors)


def _seeds(tensors, gradients) -> list | None:
  """Gradients to start from, 1 for a scalar; None where torch has to complain."""
  if gradients is None:
    gradients = [None] * len(tensors)
  elif isinstance(gradients, torch.Tensor):
    gradients = [gradients]
  if len(gradients) != len(tensors):
    return None
  pairs = list(zip(tensors, gradients))
  if any(gradient is None and tensor.numel() != 1 for tensor, gradient in pairs):
    return None
  return [torch.ones_like(t) if g is None else g for t, g in pairs]


def _listed(tensors) -> list:
  return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


class _Handler:
  """Runs `run` in place of a torch function, where a recomputation is expected."""

  def __init__(self, func: Callable, env):
    self.func = func
    self.env = env

  def __call__(self, args, kwargs):
    return (self.run if Recomputation.expected else self.func)(*args, **kwargs)


class _Backward(_Handler):
  """`torch.autograd.backward`, and `Tensor.backward`, which is the same."""

  def run(
    self, tensors, gradients=None, retain_graph=None, create_graph=False, **options
  ):
    """Goes backward; `options` are `inputs` and what torch alone understands."""
    gradients = options.pop("grad_tensors", options.pop("gradient", gradients))
    inputs = options.pop("inputs", None)
    outputs = _listed(tensors)
    edges = None if options else _edges(outputs)
    seeds = None if edges is None else _seeds(outputs, gradients)
    targets = None if inputs is None else _leaf_edges(_listed(inputs))
    if seeds is None or (inputs is not None and not targets):
      if inputs is not None:
        options["inputs"] = inputs
      return self.func(tensors, gradients, retain_graph, create_graph, **options)
    with self.env.renewed():
      torch.autograd.backward(edges, seeds, retain_graph, create_graph, inputs=targets)


class _Grad(_Handler):
  """`torch.autograd.grad`."""

  def run(
    self,
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
  ):
    """The gradients of `outputs` with respect to `inputs`."""
    found, wanted = _listed(outputs), _listed(inputs)
    edges, targets = _edges(found), _edges(wanted)
    is_plain = only_inputs and not (is_grads_batched or materialize_grads)
    seeds = _seeds(found, grad_outputs) if is_plain and edges and targets else None
    if seeds is None:
      return self.func(
        outputs,
        inputs,
        grad_outputs,
        retain_graph,
        create_graph,
        only_inputs,
        allow_unused,
        is_grads_batched,
        materialize_grads,
      )
    with self.env.renewed():
      return torch.autograd.grad(
        edges, targets, seeds, retain_graph, create_graph, allow_unused=allow_unused
      )


def register_functions(env) -> None:
  """Adds both to an environment."""
  env.functions.add(torch.Tensor.backward, _Backward(torch.Tensor.backward, env))
  env.functions.add(torch.autograd.backward, _Backward(torch.autograd.backward, env))
  env.functions.add(torch.autograd.grad, _Grad(torch.autograd.grad, env))
