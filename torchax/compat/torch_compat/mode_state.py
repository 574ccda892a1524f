"""Thread-local modes of torch: queries, and contexts that disable or enable them."""

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchax.compat import private
from torchax.compat.patches import patch

# Context managers: operations treat tensors as plain; no modes are active.
without_dispatch = private.essential(
  "torch._C._DisableTorchDispatch",
  "views and changes in place, which the simplest module makes",
)
without_modes = private.find(
  "torch.utils._python_dispatch._disable_current_modes",
  "numbers that are read while torch captures a graph",
)

# Context manager: torch functions skip their overrides; dispatch still sees their
# operations.
without_function_modes = private.find(
  "torch._C.DisableTorchFunction", "backward passes and checkpoints"
)
# The same two for reads. Without them reads are correct, but modes see them.
without_modes_for_reads, without_function_modes_for_reads = (
  contextlib.nullcontext if isinstance(context, private.Unavailable) else context
  for context in (without_modes, without_function_modes)
)
_OVERRIDES = "functions of torch that are caught above their operations"
# Context managers that disable and re-enable `__torch_function__` of classes.
without_function_overrides = private.essential(
  "torch._C.DisableTorchFunctionSubclass", _OVERRIDES
)
with_function_overrides = private.find(
  "torch._C._EnableTorchFunction", _OVERRIDES, instead=contextlib.nullcontext
)


class DispatchMode(TorchDispatchMode):
  """Dispatch mode that Dynamo ignores.

  Otherwise Dynamo would wrap it, at 3 us an operation, or leave code uncompiled.
  """

  # The mode also receives higher-order operators, such as `torch.cond`.
  supports_higher_order_operators = True

  @classmethod
  def _should_skip_dynamo(cls) -> bool:
    return False

  @classmethod
  def ignore_compile_internals(cls) -> bool:
    return True


_MODES = "the short way of an operation where no other mode is active"


# The replacement equals no real depth: callers take the slow path, which is always
# correct.
dispatch_depth = private.find(
  "torch._C._len_torch_dispatch_stack", _MODES, instead=lambda: -1
)
_dispatch_mode_at = private.find(
  "torch._C._get_dispatch_stack_at", _MODES, instead=lambda index: None
)


def is_watched() -> bool:
  """Return True if a dispatch mode of the user sees operations first.

  Modes of torchax may be on top of it for a while, such as during a backward pass.
  """
  top = index = dispatch_depth() - 1
  while index >= 0 and isinstance(_dispatch_mode_at(index), DispatchMode):
    index -= 1
  return index == top >= 0 or index > 0


_FORWARD_AD = "the short way of an operation outside of forward-mode AD"


class _AnyLevel:
  # A valid level, so that callers take the slow path, which is always correct.
  _current_level = 0


_level = private.find(
  "torch.autograd.forward_ad._current_level", _FORWARD_AD, instead=None
)
_forward_ad = _AnyLevel if _level is None else torch.autograd.forward_ad


def forward_ad_is_on() -> bool:
  """Return True inside `torch.autograd.forward_ad.dual_level`."""
  return _forward_ad._current_level >= 0


_innermost_transform = private.find(
  "torch._C._functorch.peek_interpreter_stack", _FORWARD_AD, instead=object
)


def is_transforming() -> bool:
  """Return True inside a transform of `torch.func` or a level of forward-mode AD.

  Tensors may then be wrapped, or have a tangent that `requires_grad` does not show.
  """
  return _innermost_transform() is not None or forward_ad_is_on()


# The replacement reports hooks always: the path with hooks is always correct.
_saved_tensors_hooks = private.find(
  "torch._C._autograd._top_saved_tensors_default_hooks",
  "backward passes that save what they need in one piece",
  instead=lambda ignore_is_tracing: object(),
)


def has_saved_tensors_hooks() -> bool:
  """Return True if hooks pack saved tensors, as checkpoints and offloading do."""
  return _saved_tensors_hooks(True) is not None


_NO_GRAD = "torch.no_grad inside a JAX transformation"
_graph_task = private.find("torch._C._current_graph_task_id", _NO_GRAD)


def in_backward() -> bool:
  """Return True while this thread runs a backward pass."""
  return _graph_task() != -1


_may_forward = private.find("torch._C._is_fwd_grad_enabled", _NO_GRAD)
_allow_forward = private.find(
  "torch.autograd.forward_ad._set_fwd_grad_enabled",
  _NO_GRAD,
  instead=contextlib.nullcontext,
)


def in_function_forward() -> bool:
  """Return True in the forward pass of a `torch.autograd.Function`.

  There torch disables forward-mode AD too, unlike `torch.no_grad`. Inference mode
  disables both as well, so the result is False in it.
  """
  return not (_may_forward() or torch.is_inference_mode_enabled())


@contextlib.contextmanager
def enable_recording() -> Iterator[None]:
  """Enable recording by autograd inside the block; inner grad modes still apply."""
  is_inference = torch.is_inference_mode_enabled()
  recording = torch.inference_mode(False) if is_inference else torch.enable_grad()
  with recording, _allow_forward(True):
    yield


def attribute_holder() -> torch.Tensor:
  """Return an empty CPU tensor that can carry attributes, created outside of modes."""
  with without_function_modes_for_reads(), without_dispatch():
    return torch.empty(0, device="cpu")


_NEW_TENSORS = 'torch.tensor(…, device="jax")'
_set_only_lift_cpu_tensors = private.essential(
  "torch._C._set_only_lift_cpu_tensors", _NEW_TENSORS
)
_FakeTensorMode = private.find(
  "torch._subclasses.fake_tensor.FakeTensorMode", _NEW_TENSORS, instead=None
)


def move_new_tensors_from_cpu() -> None:
  """Make `torch.tensor` create a CPU tensor and then move it to its device.

  Otherwise it moves the numbers below Python dispatch, where they would be lost.
  torch's tracers choose the same order on machines without accelerators.
  """
  _set_only_lift_cpu_tensors(True)
  if _FakeTensorMode is not None:
    patch(_FakeTensorMode, "avoid_device_init", True, f"{_NEW_TENSORS} in a graph")


_ABOVE = "torch's derivatives of operations that JAX differentiates"
_keys_at_work = private.find("torch._C._ForceDispatchKeyGuard", _ABOVE)
# Keys at the start of a thread, read at import, when no operation is running.
_included, _excluded = (
  private.find(f"torch._C._dispatch_tls_local_{kind}_set", _ABOVE, instead=None)
  for kind in ("include", "exclude")
)
_first_keys = (_included(), _excluded()) if _included and _excluded else None
_is_included = private.find("torch._C._dispatch_tls_is_dispatch_key_included", _ABOVE)
_keys_of = private.find("torch._C.DispatchKeySet", _ABOVE)
_key_names = private.find("torch._C.DispatchKey", _ABOVE)
# torch includes these keys on entering the outermost mode.
_MODE_KEYS = ("Python", "PythonTLSSnapshot")


def at_top_level():
  """Return a context in which autograd records operations as at top level.

  It also works inside the handler of an operation or a transform of `torch.func`.
  """
  if _first_keys is None:
    private.require(_ABOVE)
  included, excluded = _first_keys
  for name in _MODE_KEYS:
    key = getattr(_key_names, name)
    if _is_included(key):
      included = included | _keys_of(key)
  return _keys_at_work(included, excluded)
