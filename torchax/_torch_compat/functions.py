"""`torch.autograd.Function`: how functions with a gradient of their own are applied."""

import functools

import torch

from torchax import private
from torchax._torch_compat.graphs import keep_from_dynamo
from torchax._torch_compat.modes import with_function_overrides

_QUICKER = "calls of functions with gradients, which are quicker with it"
are_transforms_active = private.find(
  "torch._C._are_functorch_transforms_active", _QUICKER, instead=lambda: True
)


def apply_function(function: type[torch.autograd.Function], *args):
  """`function.apply(*args)`, for arguments that no transform of torch has wrapped.

  `apply` looks at each argument for such wrappers, which takes as long as all the rest.
  """
  if are_transforms_active():
    return function.apply(*args)
  return super(torch.autograd.Function, function).apply(*args)


_HOOKS = "functions of torch that hooks and backward passes of a user call"
_run_backward = private.find(
  "torch.autograd._engine_run_backward", _HOOKS, instead=None
)


def keep_overrides_in_backward() -> None:
  """Has what a backward pass calls be handled by classes, as around it.

  torch turns that off while it runs `backward` or `grad` of tensors whose class handles
  functions: hooks, checkpoints and backward formulas of a user would run without.
  """

  if _run_backward is None:
    return

  @functools.wraps(_run_backward)
  def _engine_run_backward(*args, **kwargs):
    with with_function_overrides():
      return _run_backward(*args, **kwargs)

  private.walk("torch.autograd")._engine_run_backward = _engine_run_backward


_FUNCTIONS = "the backward of a torch.autograd.Function inside a JAX transformation"
_function_class = private.find(
  "torch.autograd.function._SingleLevelFunction", _FUNCTIONS, instead=None
)


def intercept_applied_functions(handler) -> None:
  """Has `handler(apply, args)` called for each `torch.autograd.Function.apply(*args)`.

  `apply` is what torch does, bound to the function. Transforms of `torch.func` apply
  functions of their own in its place.
  """
  if _function_class is None:
    return

  def apply(cls, *args, **kwargs):
    of_torch = super(_function_class, cls).apply
    return of_torch(*args, **kwargs) if kwargs else handler(of_torch, args)

  keep_from_dynamo(apply, handler, with_calls=False)
  _function_class.apply = classmethod(apply)
  # Before torch 2.15, `Function` has an `apply` in Python that calls this one.
  if not isinstance(vars(torch.autograd.Function).get("apply"), classmethod):
    torch.autograd.Function.apply = classmethod(apply)


def handing_out_by(scope, function: type[torch.autograd.Function]):
  """What applies the function, with `scope()` around looks at `ctx.saved_tensors`."""

  def saved_tensors(ctx):
    with scope():
      return super(node, ctx).saved_tensors

  members = {"__module__": function.__module__, "__qualname__": function.__qualname__}
  same = type(function)(function.__name__, (function,), members)
  node = same._backward_cls
  node.saved_tensors = property(saved_tensors)
  return super(_function_class, same).apply


class OwnFunction(torch.autograd.Function):
  """Is a function of this library: its forward pass has the gradient for JAX, too."""
