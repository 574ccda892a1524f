"""Calls of `torch.autograd.Function`, and batches of gradients.

Used by `dispatch` to record and differentiate functions with their own backward pass.
"""

import functools
from collections.abc import Sequence

import torch

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.compat.torch_compat import named_scopes
from torchax.compat.torch_compat.graphs import keep_from_dynamo
from torchax.compat.torch_compat.mode_state import with_function_overrides
from torchax.compat.torch_compat.wrappers import innermost

_QUICKER = "calls of functions with gradients, which are quicker with it"
are_transforms_active = private.find(
  "torch._C._are_functorch_transforms_active", _QUICKER, instead=lambda: True
)


def apply_function(function: type[torch.autograd.Function], *args):
  """Call `function.apply(*args)` for arguments that no transform of torch has wrapped.

  `apply` searches each argument for wrappers, which takes half of its time.
  """
  if are_transforms_active():
    return function.apply(*args)
  return super(torch.autograd.Function, function).apply(*args)


_HOOKS = "functions of torch that hooks and backward passes of a user call"
_run_backward = private.find(
  "torch.autograd._engine_run_backward", _HOOKS, instead=None
)


_ONE_ACCELERATOR = (
  "torch cannot run this backward pass, because its accelerator is jax in a process "
  "that imports torchax (https://github.com/pytorch/pytorch/issues/161129). If the "
  "model is on CUDA, move it to jax, which uses the GPU too: "
  'model.cpu().to("jax"). Or train it in a process that does not import torchax. If '
  "the gradient of a jax tensor is a wrapper subclass of torch.Tensor, such as a "
  "MaskedTensor, keep the tensors on the CPU."
)


def keep_overrides_in_backward() -> None:
  """Keep `__torch_function__` of classes enabled inside backward passes.

  torch disables it while it runs `backward` or `grad` of tensors whose class has it.
  Hooks, checkpoints and backward formulas of a user need it. The same function keeps
  the pass on the calling thread, for wrapper subclasses on jax, which has no thread of
  torch. It also explains an assertion of torch's engine, which knows one accelerator.
  """
  if _run_backward is None:
    return

  @functools.wraps(_run_backward)
  def _engine_run_backward(*args, **kwargs):
    try:
      one_thread = torch.autograd.set_multithreading_enabled(False)
      with one_thread, with_function_overrides(), named_scopes.of_backward(args[0]):
        return _run_backward(*args, **kwargs)
    except RuntimeError as error:
      if "opt_ready_stream && opt_parent_stream" not in str(error):
        raise
      raise RuntimeError(_ONE_ACCELERATOR) from error

  patch(torch.autograd, "_engine_run_backward", _engine_run_backward, _HOOKS)


_FUNCTIONS = "the backward of a torch.autograd.Function inside a JAX transformation"
_function_class = private.find(
  "torch.autograd.function._SingleLevelFunction", _FUNCTIONS, instead=None
)


def intercept_applied_functions(handler) -> None:
  """Replace `torch.autograd.Function.apply(*args)` by `handler(apply, args)`.

  `apply` is torch's own method, bound to the function. Transforms of `torch.func`
  apply other functions, which are not intercepted.
  """
  if _function_class is None:
    return

  def apply(cls, *args, **kwargs):
    of_torch = super(_function_class, cls).apply
    return of_torch(*args, **kwargs) if kwargs else handler(of_torch, args)

  keep_from_dynamo(apply, handler, with_calls=False)
  patch(_function_class, "apply", classmethod(apply), _FUNCTIONS)
  # Before torch 2.15, `Function` has an `apply` in Python that calls this one.
  if not isinstance(vars(torch.autograd.Function).get("apply"), classmethod):
    patch(torch.autograd.Function, "apply", classmethod(apply), _FUNCTIONS)


def apply_with_saved_scope(scope, replace, function: type[torch.autograd.Function]):
  """Return an `apply` of the function, with other saved tensors.

  Reading these enters `scope()` and returns `replace(tensor)` for each.
  """

  def saved_tensors(ctx):
    with scope():
      return tuple(map(replace, super(node, ctx).saved_tensors))

  members = {"__module__": function.__module__, "__qualname__": function.__qualname__}
  same = type(function)(function.__name__, (function,), members)
  node = same._backward_cls
  node.saved_tensors = property(saved_tensors)
  return super(_function_class, same).apply


class OwnFunction(torch.autograd.Function):
  """Base of torchax's own functions, whose forward pass JAX can differentiate too."""


MODULE_HOOKS = private.find(
  "torch.nn.modules._functions.BackwardHookFunction",
  "backward hooks of modules in compiled functions",
  instead=OwnFunction,
)
"""Function whose node torch looks for to hang a module's backward hooks on it."""


_BATCHES = "batches of gradients: `is_grads_batched` and `vectorize=True`"
_enter_batch = private.find("torch._C._vmapmode_increment_nesting", _BATCHES)
_leave_batch = private.find("torch._C._vmapmode_decrement_nesting", _BATCHES)
_dispatch_keys = private.find("torch._C._dispatch_keys", _BATCHES)
_parse_key = private.find("torch._C._parse_dispatch_key", _BATCHES)
_add_dim = private.find("torch._add_batch_dim", _BATCHES)
_remove_dim = private.find("torch._remove_batch_dim", _BATCHES)


def is_transformed(tensor: torch.Tensor | None) -> bool:
  """Return True if a transform of `torch.func` has wrapped a tensor."""
  return tensor is not None and innermost(tensor) is not tensor


class GradientBatch:
  """Unwrapped gradients of a batched backward pass (vmap of `torch.autograd`).

  Attributes:
    gradients: tensors, with the batch as the first dimension if they have one.
    is_batched: for each gradient, True if it has a batch dimension.
    size: size of the batch; None if no gradient is batched.
  """

  def __init__(self, gradients: Sequence[torch.Tensor | None]):
    self._level = _enter_batch() - 1
    _leave_batch()
    key = _parse_key("Batched")
    self.is_batched = [
      gradient is not None and _dispatch_keys(gradient).has(key)
      for gradient in gradients
    ]
    self.gradients = [
      _remove_dim(gradient, self._level, 1, 0) if is_batched else gradient
      for gradient, is_batched in zip(gradients, self.is_batched)
    ]
    sizes = [g.shape[0] for g, b in zip(self.gradients, self.is_batched) if b]
    self.size: int | None = sizes[0] if sizes else None

  def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
    """Batch a result by its first dimension."""
    return _add_dim(tensor, 0, self._level)
