"""Modules as compiled (`JittableModule`) or functional (`extract_jax`) programs.

`jit.py` compiles the methods; `wrapper.py` is the base class of compiled modules.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from torchax import rng
from torchax.compat import torch_compat
from torchax.core.tracebacks import hide, hide_library_frames
from torchax.environment import Environment, default_env
from torchax.interop.jit import Jitted
from torchax.interop.jit_options import for_method
from torchax.interop.views import jax_view
from torchax.interop.wrapper import ModuleWrapper, with_hooks


def extract_all_buffers(
  m: torch.nn.Module,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
  """Return the parameters and the buffers of a module, each by qualified name.

  Plain tensor attributes count as buffers.

  Args:
    m: module on any device.

  Returns:
    The parameters and the buffers, each with all its names.

  >>> params, buffers = extract_all_buffers(torch.nn.BatchNorm1d(2))
  >>> sorted(params), sorted(buffers)
  (['bias', 'weight'], ['num_batches_tracked', 'running_mean', 'running_var'])
  """
  params: dict[str, torch.Tensor] = dict(m.named_parameters(remove_duplicate=False))
  buffers = dict(m.named_buffers(remove_duplicate=False))
  for prefix, module in m.named_modules(remove_duplicate=False):
    for name, value in vars(module).items():
      if isinstance(value, torch.Tensor):
        buffers[f"{prefix}.{name}" if prefix else name] = value
  return params, buffers


def set_all_buffers(
  m: torch.nn.Module,
  params: dict[str, torch.Tensor],
  buffers: dict[str, torch.Tensor],
) -> None:
  """Replace tensors of a module by qualified name.

  Args:
    m: module, changed in place.
    params: new tensors by qualified name.
    buffers: more new tensors; they win if a name is in both dicts.

  Raises:
    KeyError: the module has no tensor of a given name.

  >>> layer = torch.nn.Linear(2, 1)
  >>> set_all_buffers(layer, {"bias": torch.nn.Parameter(torch.ones(1))}, {})
  >>> layer.bias.tolist()
  [1.0]
  """
  for qualified, value in {**params, **buffers}.items():
    prefix, _, name = qualified.rpartition(".")
    module = m.get_submodule(prefix)
    own: dict[str, Any] = vars(module)
    tables = (own["_parameters"], own["_buffers"], own)
    for table in tables:
      if name in table:
        table[name] = value
        break
    else:
      raise KeyError(f"{type(m).__name__} has no tensor named {qualified!r}.")


def extract_jax(
  mod: torch.nn.Module, env: Environment | None = None, *, dedup_parameters: bool = True
) -> tuple[dict[str, jax.Array], Callable[..., Any]]:
  """Split a module into its arrays and a pure JAX function of them.

  Args:
    mod: module on jax, or on the CPU, whose tensors are copied to jax.
    env: environment; `default_env()` if None.
    dedup_parameters: return a tensor with several names under its first name only.

  Returns:
    The arrays by qualified name, and a function `(arrays, args=(), kwargs=None, *,
    rng=None)` for any JAX transformation. `args` is a tuple, or a single argument as in
    `torch.func.functional_call`. `rng` is a key, an `RngState` or a seed to
    draw from (`docs/rng.md`); without it a draw inside a transformation raises.
    The function does not return updates of buffers. A transformation traces the
    module in its current mode: call `train()` or `eval()` before.

  >>> arrays, f = extract_jax(torch.nn.Dropout(0.5))
  >>> x = jax.numpy.ones(3)
  >>> bool((f(arrays, (x,), rng=1) == jax.jit(f)(arrays, (x,), rng=1)).all())
  True
  """
  env = env or default_env()
  params, buffers = extract_all_buffers(mod)
  tensors = {**params, **buffers}
  kept = _unique(tensors) if dedup_parameters else tensors
  arrays = {name: env.t2j_copy(tensor.detach()) for name, tensor in kept.items()}

  def call(states, args, kwargs):
    with torch_compat.reparametrize(mod, states):
      return mod(*args, **kwargs)

  called = jax_view(call)

  @hide_library_frames
  def jax_func(states, args=(), kwargs=None, *, rng=None):
    args = args if isinstance(args, list | tuple) else (args,)
    return called(states, args, kwargs or {}, rng=rng)

  return arrays, jax_func


class JittableModule(ModuleWrapper):
  """Module whose methods run compiled, with its tensors as operands.

  Every call reads the current parameters and buffers, so it sees changes by an
  optimizer or `load_state_dict`. Buffers that the module updates, such as BatchNorm's
  running statistics, are updated. `train()` and `eval()` compile separately. Hooks are
  compiled; adding or removing one triggers recompilation.

  Attributes are read from and set on the inner module. A copy and an unpickled wrapper
  recompile on their first call.

  Args:
    m: module on jax.
    extra_jit_args: keyword arguments of `jax.jit`.
    dedup_parameters: list a tensor with several names once in `params`, `buffers`.

  >>> model = JittableModule(torch.nn.Linear(2, 1).to("jax"))
  >>> model(torch.ones(3, 2, device="jax")).shape
  torch.Size([3, 1])
  >>> list(model.params)
  ['weight', 'bias']
  """

  def __init__(
    self,
    m: torch.nn.Module,
    extra_jit_args: dict[str, Any] | None = None,
    dedup_parameters: bool = True,
  ):
    super().__init__(m)
    vars(self).update(
      _extra_jit_args=dict(extra_jit_args or {}),
      _dedup_parameters=dedup_parameters,
      _names=set(),
    )
    self._restore()

  _derived = ("_jitted", "_user_dicts")

  def _restore(self) -> None:
    vars(self).update(_jitted={}, _user_dicts={})

  def _forget(self) -> None:
    self._jitted.clear()

  def _method(self, name: str) -> Callable | None:
    return functools.partial(self.jittable_call, name) if name in self._names else None

  @property
  def params(self) -> dict[str, torch.Tensor]:
    """Parameters by name; a shared one under its first name if deduplicated.

    The value is a plain dict, for tree functions of JAX and torch. The wrapper's next
    use assigns new tensors in it to the inner module. A tensor that replaces a
    parameter becomes a parameter.

    >>> model = JittableModule(torch.nn.Linear(2, 1).to("jax"))
    >>> model.params = {"bias": torch.ones(1, device="jax")}
    >>> model(torch.zeros(2, device="jax"))
    tensor([1.], device='jax:0', grad_fn=<_CompiledCallBackward>)
    """
    return self._user_dict("params", self._read_params)

  @params.setter
  def params(self, tensors: dict[str, torch.Tensor]) -> None:
    self.params.update(tensors)
    self._take_changes()

  @property  # type: ignore[override]
  def buffers(self) -> dict[str, torch.Tensor]:
    """Buffers and plain tensor attributes by name; see `params`.

    >>> JittableModule(torch.nn.BatchNorm1d(2).to("jax")).buffers["running_var"]
    tensor([1., 1.], device='jax:0')
    """
    return self._user_dict("buffers", self._read_buffers)

  @buffers.setter
  def buffers(self, tensors: dict[str, torch.Tensor]) -> None:
    self.buffers.update(tensors)
    self._take_changes()

  def _read_params(self) -> dict[str, torch.Tensor]:
    is_unique = self._dedup_parameters
    return dict(self._model.named_parameters(remove_duplicate=is_unique))

  def _read_buffers(self) -> dict[str, torch.Tensor]:
    buffers = extract_all_buffers(self._model)[1]
    return _unique(buffers) if self._dedup_parameters else buffers

  def _user_dict(self, kind: str, read: Callable) -> dict[str, torch.Tensor]:
    self._take_changes()
    tensors, _ = self._user_dicts.get(kind, ({}, {}))
    current = read()
    tensors.clear()
    tensors.update(current)
    self._user_dicts[kind] = (tensors, current)
    return tensors

  def _take_changes(self) -> None:
    """Assign new tensors in `params` and `buffers` to the inner module.

    Raises:
      KeyError: the module has no tensor of a given name.
    """
    for tensors, before in list(self._user_dicts.values()):
      changed = {k: v for k, v in tensors.items() if before.get(k) is not v}
      if changed:
        _replace(vars(self)["_modules"]["_model"], changed, before)
        tensors.update(before)

  def __getattr__(self, name: str):
    if "_user_dicts" in vars(self):
      self._take_changes()
    return super().__getattr__(name)

  def state_dict(self, *args, **kwargs):
    """Call `torch.nn.Module.state_dict` after taking over `params` and `buffers`."""
    self._take_changes()
    return super().state_dict(*args, **kwargs)

  def named_parameters(
    self, *args: Any, **kwargs: Any
  ) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Call `torch.nn.Module.named_parameters` after taking over `params`."""
    self._take_changes()
    return super().named_parameters(*args, **kwargs)

  def forward(self, *args: Any, **kwargs: Any) -> Any:
    """Run the module's `forward`, compiled.

    Args:
      *args, **kwargs: arguments of the module.

    Returns:
      The module's result.
    """
    return self.jittable_call("forward", *args, **kwargs)

  @hide_library_frames
  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Call `jax.jit(…).lower` on `forward`; run nothing, advance no stream.

    Args:
      *args, **kwargs: arguments of `forward`; only shapes and dtypes of tensors matter.

    >>> model = JittableModule(torch.nn.Tanh())
    >>> "stablehlo.tanh" in model.lower(torch.ones(3, device="jax")).as_text()
    True
    """
    return self.jitted("forward").lower(*args, **kwargs)

  @hide_library_frames
  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """Call `jax.jit(…).trace` on `forward`; run nothing, advance no stream.

    Args:
      *args, **kwargs: arguments of `forward`; only shapes and dtypes of tensors matter.

    >>> model = JittableModule(torch.nn.Tanh())
    >>> [e.primitive.name for e in model.trace(torch.ones(3, device="jax")).jaxpr.eqns]
    ['tanh']
    """
    return self.jitted("forward").trace(*args, **kwargs)

  def functional_call(
    self,
    method_or_name: str | Callable,
    params: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    *args: Any,
    **kwargs: Any,
  ) -> Any:
    """Call a method with the given tensors in place of the module's own.

    Args:
      method_or_name: name of a method, or function whose first argument is the module.
      params: tensors by name; the module's own are used for missing names.
      buffers: tensors by name, likewise; in-place updates change them.
      *args, **kwargs: arguments of the method.

    Returns:
      The method's result. The call is not compiled, except inside `jax_jit`.

    >>> model = JittableModule(torch.nn.Linear(2, 1).to("jax"))
    >>> zeros = {name: torch.zeros_like(p) for name, p in model.params.items()}
    >>> model.functional_call("forward", zeros, {}, torch.ones(2, device="jax")).item()
    0.0
    """
    if isinstance(method_or_name, str):
      method = getattr(self._model, method_or_name)
    else:
      method = functools.partial(method_or_name, self._model)
    with torch_compat.reparametrize(self._model, {**params, **buffers}):
      return method(*args, **kwargs)

  def jittable_call(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a method of the module, compiled.

    Args:
      method_name: name of a method.
      *args, **kwargs: its arguments.

    Returns:
      The method's result.

    Raises:
      AttributeError: the module has no such method.

    >>> model = JittableModule(torch.nn.ReLU())
    >>> model.jittable_call("forward", torch.tensor([-1.0, 2.0], device="jax"))
    tensor([0., 2.], device='jax:0')
    """
    try:
      self._take_changes()
      return self.jitted(method_name)(*args, **kwargs)
    except Exception as error:
      hide(error)
      raise

  def jitted(self, name: str) -> Jitted:
    """Return the compiled form of the method `name`.

    Args:
      name: name of the method.

    Raises:
      AttributeError: the module has no such method.

    >>> model = JittableModule(torch.nn.ReLU())
    >>> model.jitted("forward").__name__
    'forward'
    """
    if name not in self._jitted:
      self.make_jitted(name)
    return self._jitted[name]

  def make_jitted(self, key: str) -> None:
    """Create the compiled form of the method `key`.

    Args:
      key: name of the method; later calls of the wrapper's method run it compiled.

    Raises:
      AttributeError: the module has no such method.

    >>> class Model(torch.nn.Module):
    ...   def twice(self, x):
    ...     return 2 * x
    >>> model = JittableModule(Model())
    >>> model.make_jitted("twice")
    >>> model.twice(torch.ones(2, device="jax"))
    tensor([2., 2.], device='jax:0')
    """
    method: Callable
    if key == "forward":
      method = types.MethodType(_forward, self._model)
    else:
      method = with_hooks(self._model, key)
    self._names.add(key)
    others = [with_hooks(self._model, name) for name in {"forward", *self._names}]
    options = for_method(with_hooks(self._model, key), others, self._extra_jit_args)
    self._jitted[key] = Jitted(method, options)


def _forward(module: torch.nn.Module, *args, **kwargs):
  """Run `forward` with the module's hooks, and record draws at the module's site."""
  with rng.inside(module):
    return with_hooks(module, "forward")(*args, **kwargs)


_forward.__name__ = "forward"  # for programs and messages


def _replace(module: torch.nn.Module, changed: dict, before: dict) -> None:
  """Replace tensors of a module, each under all its names.

  Args:
    module: the module.
    changed: new tensors by name.
    before: old tensors by name; updated in place to the new ones.
  """
  params, buffers = extract_all_buffers(module)
  tensors = {**params, **buffers}
  for name, tensor in changed.items():
    old = tensors.get(name)
    is_plain = not isinstance(tensor, torch.nn.Parameter) and tensor.grad_fn is None
    if isinstance(old, torch.nn.Parameter) and is_plain:
      tensor = torch.nn.Parameter(tensor.detach(), requires_grad=old.requires_grad)
    names = [other for other, value in tensors.items() if value is old] or [name]
    set_all_buffers(module, dict.fromkeys(names, tensor), {})
    before[name] = tensor


def _unique(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
  first: dict[int, str] = {}
  for name, tensor in tensors.items():
    first.setdefault(id(tensor), name)
  return {name: tensors[name] for name in first.values()}
