"""`Environment`: configuration, operator table, random state and conversions.

An operation on jax tensors runs in their environment, a factory in the one that is on
in this thread or task. By default both are `default_env()`. Operators are chosen in
`dispatch/dispatcher.py`.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from torchax import amp, rng
from torchax.compat import torch_compat
from torchax.config import Configuration
from torchax.core import active_environments, deferred, mappings
from torchax.core.tracebacks import hide_library_frames
from torchax.devices import placement
from torchax.dispatch import debug, device_plans
from torchax.dispatch.conversions import Conversions
from torchax.dispatch.dispatcher import Dispatcher
from torchax.dispatch.modes import XLADispatchMode, XLAFunctionMode, as_jax
from torchax.dispatch.torch_functions import FunctionTable
from torchax.dispatch.transfer import Move, arguments_of_to
from torchax.errors import MixedDeviceError, OperatorNotFound, UnsupportedDtypeError
from torchax.properties import RuntimeProperty, _None, _PropertyHolder
from torchax.registry import operators
from torchax.registry.names import aten
from torchax.registry.operator_table import OperatorTable
from torchax.registry.operators import Kind, Operator, is_aten
from torchax.rng.stream import RngStream
from torchax.tensor import Tensor

_is_scripting = torch_compat.is_tracing_for_torchscript

TENSOR_CONSTRUCTORS = {
  torch.ones,
  torch.zeros,
  torch.empty,
  torch.empty_strided,
  torch.full,
  torch.arange,
  torch.eye,
  torch.linspace,
  torch.logspace,
  torch.rand,
  torch.randn,
  torch.randint,
  torch.randperm,
  torch.tril_indices,
  torch.triu_indices,
  torch.tensor,
  torch.as_tensor,
  torch.asarray,
  torch.scalar_tensor,
}


_on_creation: list[Callable[["Environment"], None]] = []


def on_creation(hook: Callable[["Environment"], None]) -> None:
  """Call `hook(env)` for each environment created later."""
  _on_creation.append(hook)


class _Entered(threading.local):
  """Modes that this thread has entered, one list per entry."""

  stack: tuple = ()


class Environment(Conversions, contextlib.ContextDecorator):
  """Context in which torch code runs on JAX; usually `default_env()`.

  It is on in the thread and task that turned it on. Each environment has its own random
  streams: draws and seeds of others do not change its numbers.

  Args:
    configuration: switches; see `Configuration`.
    seed: seed of its random streams, in [-2**63, 2**64); by default the seed of torch's
      generator. `torch.manual_seed` re-seeds all environments, like all devices.

  Attributes:
    config: its `Configuration`.
    streams: its random streams.

  Raises:
    SeedError, ValueError: `seed` is not an integer, or out of range.

  >>> import torch, torchax
  >>> one, other = (torchax.Environment(seed=7) for _ in range(2))
  >>> with one:
  ...   first = torch.rand(3, device="jax")
  >>> with other:
  ...   print(torch.equal(torch.rand(3, device="jax"), first))
  True
  """

  def __init__(
    self, configuration: Configuration | None = None, seed: int | None = None
  ):
    self.config = configuration or Configuration()
    by_site = rng.is_by_site(self.config.rng_addressing)
    self.streams = rng.Streams(seed, self.config.prng_impl, by_site)
    self._dispatcher = Dispatcher(self)
    self.functions = FunctionTable(self)
    self._ops = OperatorTable(
      lambda: (operators.all_aten_ops, operators.all_torch_functions), self._drop_plans
    )
    self._decomps = OperatorTable(
      lambda: (operators.decompositions,),
      self._drop_plans,
      functools.partial(Operator, kind=Kind.TENSORS),
    )
    self._given_modes: dict[str, Any] = {}
    self._entered = _Entered()
    self._property = _PropertyHolder(lambda: [RuntimeProperty(None, None, None)])
    for hook in _on_creation:
      hook(self)

  # Turning it on and off ------------------------------------------------------------

  @property
  def enabled(self) -> bool:
    """True if it is on in this thread or task, and not disabled.

    >>> with torchax.Environment() as env:
    ...   with env.disabled():
    ...     print(env.enabled)
    ...   print(env.enabled)
    False
    True
    """
    is_on = (
      self in active_environments.on.get()
      or self in active_environments.on_thread.environments
    )
    return is_on and self not in active_environments.suspended.get()

  def enable_torch_modes(self) -> None:
    """Turn the environment on for the rest of this thread; calls nest.

    >>> env = torchax.Environment()
    >>> env.enable_torch_modes()
    >>> env.enabled
    True
    >>> env.disable_torch_modes()
    """
    active_environments.on_thread.environments += (self,)
    self._enter_modes()

  def disable_torch_modes(self, *exc: Any) -> None:
    """Undo one `enable_torch_modes` of this thread.

    Args:
      *exc: class, exception and traceback for the modes, as for `__exit__`.

    Raises:
      RuntimeError: the environment is not enabled on this thread.

    >>> env = torchax.Environment()
    >>> env.enable_torch_modes()
    >>> env.disable_torch_modes()
    >>> env.enabled
    False
    """
    before = active_environments.on_thread.environments
    active_environments.on_thread.environments = active_environments.without(
      before, self
    )
    if active_environments.on_thread.environments == before:
      raise RuntimeError(
        "The torchax environment is not enabled on this thread: disable follows enable."
      )
    self._exit_modes(*exc)

  def _enter_modes(self) -> None:
    """Enter the modes that this environment needs; by default none."""
    modes = [*self._given_modes.values()]
    if self.config.treat_cuda_as_jax_device and "function" not in self._given_modes:
      modes.append(XLAFunctionMode(self))
    if self.config.eager_mode is not None:
      modes.append(deferred.eager_mode(self.config.eager_mode))
    for mode in modes:
      mode.__enter__()
    self._entered.stack += (modes,)

  def _exit_modes(self, *exc) -> None:
    if not self._entered.stack:
      return  # entered by another thread
    *outer, modes = self._entered.stack
    self._entered.stack = tuple(outer)
    for mode in reversed(modes):
      mode.__exit__(*(exc or (None, None, None)))

  @property
  def _function_mode(self):
    """Mode for torch functions; an assigned mode is entered at the next `__enter__`."""
    return self._given_modes.get("function") or XLAFunctionMode(self)

  @_function_mode.setter
  def _function_mode(self, mode) -> None:
    self._given_modes["function"] = mode

  @property
  def _dispatch_mode(self):
    """Mode for ATen operations; see `_function_mode`."""
    return self._given_modes.get("dispatch") or XLADispatchMode(self)

  @_dispatch_mode.setter
  def _dispatch_mode(self, mode) -> None:
    self._given_modes["dispatch"] = mode

  @contextlib.contextmanager
  def disabled(self) -> Iterator[None]:
    """Run plain torch inside the block, even if the environment is entered there.

    >>> env = torchax.default_env()
    >>> with env, env.disabled():
    ...   torch.ones(1)
    tensor([1.])
    """
    active_environments.push(active_environments.suspended, self)
    try:
      yield
    finally:
      active_environments.drop(active_environments.suspended, self)

  def __enter__(self) -> "Environment":
    active_environments.push(active_environments.on, self)
    self._enter_modes()
    return self

  def __exit__(self, *exc) -> None:
    active_environments.drop(active_environments.on, self)
    self._exit_modes(*exc)

  # Operations -----------------------------------------------------------------------

  def load_ops(self) -> None:
    """Do nothing: operators are looked up at their first use. Upstream calls this."""

  def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run one ATen operation on jax tensors."""
    if _is_scripting():
      with torch_compat.pause_torchscript():
        return self.dispatch(func, types, args, kwargs)
    if self.config.debug_print_each_op or self.config.debug_accuracy_for_each_op:
      return debug.dispatch(self, self._dispatcher, func, args, kwargs or {})
    return self._dispatcher(func, args, kwargs)

  def plan_for(self, func: Any) -> Any:
    """Return the plan for an overload; raise OperatorNotFound if there is none."""
    return self._dispatcher.plan_for(func)

  def shapes(self, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result shapes and dtypes of a lowering; see `Dispatcher.shapes`."""
    return self._dispatcher.shapes(func, args, kwargs)

  def draw(self, func, args):
    """Run a random operation; return its result, and its draw for `redraw`."""
    draws: list = []
    run = functools.partial(self._dispatcher.draw, draws)
    result = debug.dispatch(self, run, func, args, {})
    return result, draws[-1]

  def redraw(self, func, draw, args, kwargs=None):
    """Run a random operation with the key of a `draw`, for gradients that need it."""
    return device_plans.unwrap(self._dispatcher.plan_for(func)).redraw(
      draw, args, kwargs
    )

  def override_op_definition(
    self,
    op_to_override: Any,
    op_impl: Callable[..., Any],
    is_view_op: bool = False,
    is_jax_function: bool = False,
  ) -> None:
    """Replace the lowering of an operation in this environment.

    The former operator is `env._ops[op].replaced`; `env._ops[op] = …` restores it.

    Args:
      op_to_override: ATen overload or packet, or a torch function.
      op_impl: function of jax tensors, which may call torch operations. It runs below
        autograd for an ATen operation, above it for a torch function.
      is_view_op: upstream's flag for an `op_impl` that aliases or changes its
        arguments. It has no effect here.
      is_jax_function: `op_impl` takes arrays instead. It is compiled, and JAX
        differentiates it if it replaces a torch function.

    >>> env = Environment()
    >>> double = lambda x: 2 * x
    >>> env.override_op_definition(aten.sin, double, is_jax_function=True)
    >>> torch.sin(env.to_xla(torch.ones(1)))
    tensor([2.], device='jax:0')
    """
    previous = self._ops.get(op_to_override)
    self._ops[op_to_override] = Operator(
      op_to_override,
      op_impl,
      is_jax_function=is_jax_function,
      is_user_defined=True,
      is_view_op=is_view_op,
      replaced=previous,
    )

  def _drop_plans(self, operation) -> None:
    """Drop the plans made for the former operators."""
    self._dispatcher.clear()
    self.functions.clear()

  def _get_op_or_decomp(self, func) -> Operator:
    """Return the operator or decomposition of an operation; raise if there is none."""
    operator = None if is_aten(func) else self._ops.get(func)
    operator = operator or self._dispatcher.find_operator(func)
    if operator is None:
      raise self._dispatcher.not_found(func)
    return operator

  # Random numbers -------------------------------------------------------------------

  def __repr__(self) -> str:
    count = 0 if rng.is_unopened(self.streams) else self.rng.state.count
    set_otherwise = ", ".join(
      f"{field.name}={getattr(self.config, field.name)!r}"
      for field in dataclasses.fields(self.config)
      if getattr(self.config, field.name) != field.default
    )
    return (
      f"Environment(device={str(placement.torch_device())!r}, "
      f"seed={self.streams.seed}, count={count}, "
      f"config=Configuration({set_otherwise}), mesh={self._mesh})"
    )

  @property
  def rng(self) -> RngStream:
    """Current stream of its operations, in this thread or task.

    >>> with torchax.rng_scope(3):
    ...   x = torch.rand(2, device="jax")
    ...   torchax.default_env().rng.state.count
    1
    """
    return rng.current(self.streams)

  def rng_scope(self, value: Any) -> contextlib.AbstractContextManager[RngStream]:
    """Draw from another stream inside the block; see `torchax.rng.rng_scope`.

    Args:
      value: a seed, a key, an `RngState`, or an `RngStream`.

    >>> env = torchax.default_env()
    >>> with env.rng_scope(3):
    ...   x = torch.rand(2, device="jax")
    >>> with env.rng_scope(jax.random.key(3)):
    ...   torch.equal(torch.rand(2, device="jax"), x)
    True
    """
    return rng.rng_scope(value, self.streams)

  @hide_library_frames
  def manual_seed(self, key: Any) -> None:
    """Re-seed this environment only; see `torchax.rng.manual_seed`.

    Args:
      key: a seed, a 0-d integer tensor, or a typed key.

    Raises:
      SeedError, ValueError: `key` is none of these, or out of range.

    >>> env = torchax.Environment()
    >>> env.manual_seed(7)
    >>> env.rng.state
    RngState(threefry2x32, key=0:7, count=0)
    """
    impl = self.config.prng_impl if isinstance(key, int) else None
    rng.manual_seed(key, impl, self.streams)

  @property
  def prng_key(self) -> jax.Array:
    """Typed key for the rest of the current stream.

    Reading it re-keys the stream; `env.rng` can be read without that. Setting it
    re-seeds the stream: after `k = env.prng_key; a = f(); env.prng_key = k; b = f()`,
    a equals b.

    >>> env = torchax.Environment(seed=7)
    >>> env.prng_key = jax.random.key(5)
    >>> env.rng.state
    RngState(threefry2x32, key=0:5, count=0)
    """
    return self.rng.rebase()

  @prng_key.setter
  def prng_key(self, key) -> None:
    stream = self.rng
    state = rng.as_state(key, self.streams.impl)
    if stream.by_site and state.sites is None:
      state = dataclasses.replace(state, sites={})
    stream.reseed(state)

  def get_and_rotate_prng_key(
    self, generator: torch.Generator | None = None
  ) -> jax.Array:
    """Return the key of the next draw of the current stream, or of `generator`.

    Args:
      generator: generator to draw from; None for the current stream.

    Returns:
      Typed key of shape (), for one call of `jax.random`.

    >>> env = torchax.default_env()
    >>> with env.rng_scope(3):
    ...   key = env.get_and_rotate_prng_key()
    ...   env.rng.state.count
    1
    """
    if generator is not None:
      key, count = rng.generator_operands(generator, "get_and_rotate_prng_key")
      return rng.fold_in(key, count)
    return self.rng.next_key("get_and_rotate_prng_key")

  @property
  def param(self) -> RuntimeProperty:
    """Current properties; `param.prng` is `prng_key`.

    >>> env = torchax.Environment()
    >>> with torch.autocast("jax", dtype=torch.bfloat16):
    ...   env.param.autocast_dtype
    torch.bfloat16
    """
    return dataclasses.replace(
      self._property.content[-1],
      prng=self.prng_key,
      autocast_dtype=amp.dtype_in_force(),
    )

  @property
  def _mesh(self):
    """Current mesh, `param.mesh`; an assignment lasts to the end of the block."""
    return self._property.content[-1].mesh

  @_mesh.setter
  def _mesh(self, mesh) -> None:
    self._property.content[-1].mesh = mesh

  @contextlib.contextmanager
  def override_property(
    self, *, mesh: Any = _None, prng: Any = _None, autocast_dtype: Any = _None
  ) -> Iterator[None]:
    """Override properties inside the block.

    Args:
      mesh: device mesh.
      prng: seed, key or state to draw from.
      autocast_dtype: dtype of autocast; None turns autocast off.

    Raises:
      TypeError: `autocast_dtype` is neither None nor supported by autocast.

    >>> with default_env().override_property(prng=7):
    ...   default_env().rng.state
    RngState(threefry2x32, key=0:7, count=0)
    """
    with contextlib.ExitStack() as scopes:
      if autocast_dtype is not _None:
        scopes.enter_context(amp.restore_autocast(autocast_dtype))
      if prng is not _None:
        scopes.enter_context(self.rng_scope(prng))
      properties = RuntimeProperty.override(self._property.content[-1], mesh=mesh)
      scopes.enter_context(self._property.overridden(properties))
      yield

  # Devices --------------------------------------------------------------------------

  def _should_use_torchax_tensor(self, device) -> bool:
    """Return True if tensors for this device are created on jax."""
    if device is None:
      device = torch.get_default_device()
    kind = torch.device(device).type
    if kind == "cuda":
      return self.enabled and self.config.treat_cuda_as_jax_device
    return kind in ("jax", torch_compat.HIDDEN_DEVICE.type)

  def _is_same_device(self, the_tensor: torch.Tensor, new_device) -> bool:
    if new_device is None:
      return True
    to_jax = self._should_use_torchax_tensor(new_device)
    if not (to_jax and isinstance(the_tensor, Tensor)):
      return isinstance(the_tensor, Tensor) == to_jax
    index = torch.device(new_device).index
    return index is None or index == the_tensor.device.index

  def _to_copy(self, the_tensor: torch.Tensor, new_dtype, new_device) -> torch.Tensor:
    """Copy to another dtype or device; gradients flow through the copy."""
    if self._is_same_device(the_tensor, new_device):
      return aten._to_copy.default(the_tensor, dtype=new_dtype)
    to_jax = self._should_use_torchax_tensor(new_device)
    if not to_jax and torch.device(new_device).type not in ("cpu", "meta"):
      raise MixedDeviceError(
        f'`.to` of a jax tensor expects "jax", "cpu" or "meta", but got {new_device}.'
      )
    return Move.apply(the_tensor, new_dtype, as_jax(new_device), self)

  def _torch_Tensor_to(self, args, kwargs):
    """Run `Tensor.to`, with all its signatures."""
    tensor, *rest = args
    device, dtype, _, copy = arguments_of_to(rest, kwargs)
    is_same = self._is_same_device(tensor, device) and (
      dtype is None or mappings.t2j_dtype(dtype) == mappings.t2j_dtype(tensor.dtype)
    )
    return tensor if is_same and not copy else self._to_copy(tensor, dtype, device)

  def _handle_tensor_constructor(self, func, args, kwargs):
    """Run a factory function, on jax if its device means jax."""
    device = kwargs.get("device") or torch.get_default_device()
    if not self._should_use_torchax_tensor(device):
      return func(*args, **kwargs)
    return func(*args, **{**kwargs, "device": as_jax(device)})


_default_env: Environment | None = None
_default_env_lock = threading.Lock()


def default_env() -> Environment:
  """Return the default environment of this process; the first call creates it.

  >>> default_env() is default_env()
  True
  """
  global _default_env
  if _default_env is None:
    with _default_env_lock:
      if _default_env is None:
        environment = Environment()
        environment.streams = rng.default_streams
        _default_env = environment
  return _default_env


def env_on() -> Environment:
  """Return the innermost environment on in this thread or task, or the default one."""
  active = active_environments.on.get() or active_environments.on_thread.environments
  return active[-1] if active else default_env()


def _streams_on() -> rng.Streams:
  active = active_environments.on.get() or active_environments.on_thread.environments
  return active[-1].streams if active else rng.default_streams


rng.scope.find_streams_by(_streams_on)


__all__ = [
  "Environment",
  "OperatorNotFound",
  "RuntimeProperty",
  "TENSOR_CONSTRUCTORS",
  "UnsupportedDtypeError",
  "XLADispatchMode",
  "XLAFunctionMode",
  "default_env",
]
