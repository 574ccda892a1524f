"""Features of torch that do not go together with jax tensors, caught where they begin.

They would fail late, in words about meta tensors, or write files without numbers. Each
says in one sentence what to use instead; for tensors of other devices nothing changes.
"""

import functools
from collections.abc import Callable

import torch
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from torchax.compat import torch_compat
from torchax.environment import default_env
from torchax.tensor import Tensor
from torchax.view import View

_SCRIPT_FILE = (
  "A TorchScript file holds numbers of the CPU, and this module's are on jax: script "
  "or trace the module on the CPU and save that, or write a program with "
  "`torchax.export`, and weights with `torch.save(module.state_dict(), file)`."
)
_SCRIPT_MOVE = (
  "A scripted module cannot be moved to jax, because its C++ half keeps its tensors: "
  "move the module first and script or trace it then, or use `torch.compile(module, "
  'backend="jax")` in place of TorchScript.'
)
_MAKE_FX = (
  "make_fx wraps the tensors that it is given, which jax tensors do not let it do: its "
  "graph would be a constant, the result for these numbers. Trace with tensors on the "
  'CPU and move the graph module with `.to("jax")`; or capture the function by '
  "`torch.export.export`, compile it by `torchax.compile`, or see what it is made of "
  "by `jax.make_jaxpr(torchax.interop.jax_view(f))`."
)


def _is_on_jax(module: torch.nn.Module) -> bool:
  tensors = (*module.parameters(), *module.buffers())
  return any(isinstance(tensor, Tensor) for tensor in tensors)


def _refuse(owner, name: str, applies: Callable[..., bool], message: str) -> None:
  """Makes a method raise NotImplementedError where `applies(*args, **kwargs)`."""
  method = getattr(owner, name)

  @functools.wraps(method)
  def guarded(*args, **kwargs):
    if applies(*args, **kwargs):
      raise NotImplementedError(message)
    return method(*args, **kwargs)

  setattr(owner, name, guarded)


def _goes_to_jax(module, *args, **kwargs) -> bool:
  asked = (*args, *kwargs.values())
  devices = (torch.device(a) for a in asked if isinstance(a, str | torch.device))
  return any(device.type == "jax" for device in devices) and not _is_on_jax(module)


def _without_environment(function: Callable) -> Callable:
  """TorchScript records ATen operations, of which the environment would skip some."""

  @functools.wraps(function)
  def traced(*args, **kwargs):
    # Nor do its own numbers pass a mode: they would arrive as Python's.
    with default_env().disabled(), torch_compat.without_modes():
      return function(*args, **kwargs)

  return traced


def _of_other_tensors(make_fx: Callable) -> Callable:
  """`make_fx` whose tracers refuse jax tensors."""

  @functools.wraps(make_fx)
  def made(*args, **kwargs):
    trace = make_fx(*args, **kwargs)

    @functools.wraps(trace)
    def traced(*given, **named):
      leaves = pytree.tree_leaves((given, named))
      if any(type(leaf) in (Tensor, View) for leaf in leaves):
        raise NotImplementedError(_MAKE_FX)
      return trace(*given, **named)

    return traced

  return made


def register() -> None:
  """Puts the checks in place."""
  # Modules that were traced are of the first class alone.
  for scripted in (torch.jit.ScriptModule, torch.jit.RecursiveScriptModule):
    for name in ("save", "save_to_buffer"):
      _refuse(scripted, name, lambda m, *a, **k: _is_on_jax(m), _SCRIPT_FILE)
  _refuse(torch.jit.ScriptModule, "to", _goes_to_jax, _SCRIPT_MOVE)
  for name in ("trace", "trace_module"):
    setattr(torch.jit, name, _without_environment(getattr(torch.jit, name)))
  make_fx = _of_other_tensors(proxy_tensor.make_fx)
  for module in (proxy_tensor, torch_compat.eager_transforms):
    # `func.linearize` wants the one that Dynamo finds by its name.
    if module is not None:
      module.make_fx = make_fx
