"""`Environment`: configuration, operator table, random state and conversions.

An operation on jax tensors belongs to their environment, a factory to the one that is
on in this thread or task; by default both are the one of `default_env()`.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_pytree

from torchax import amp, rng
from torchax.compat import torch_compat
from torchax.config import Configuration
from torchax.core import mappings, switches
from torchax.core.tracebacks import ending_at_the_user
from torchax.devices import placement
from torchax.dispatch import debug, device_plans, host_operations
from torchax.dispatch.dispatcher import Dispatcher
from torchax.dispatch.modes import XLADispatchMode, XLAFunctionMode, as_jax
from torchax.dispatch.torch_functions import FunctionTable
from torchax.dispatch.transfer import Move, arguments_of_to
from torchax.errors import MixedDeviceError, OperatorNotFound, UnsupportedDtypeError
from torchax.properties import RuntimeProperty, _None, _PropertyHolder
from torchax.registry import operators
from torchax.registry.names import aten
from torchax.registry.operator_table import OperatorTable, is_aten
from torchax.registry.operators import Kind, Operator
from torchax.rng.stream import RngStream
from torchax.tensor import Tensor, new_tensor
from torchax.view import View

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
  """Call `hook(env)` with each environment that is made from now on."""
  _on_creation.append(hook)


class _Entered(threading.local):
  """The modes that this thread has entered, a list for each time."""

  stack: tuple = ()


def _operators() -> tuple:
  return operators.all_aten_ops, operators.all_torch_functions


def _decompositions() -> tuple:
  return (operators.decompositions,)


def _decomposition(operation, function) -> Operator:
  return Operator(operation, function, kind=Kind.TENSORS)


class Environment(contextlib.ContextDecorator):
  """Runs torch code on JAX; usually the one of `default_env()`.

  It is on in the thread and task that has turned it on. Its random streams are its own:
  what other environments draw, and their seeds, do not change its numbers.

  Args:
    configuration: switches; see `Configuration`.
    seed: of its random streams, in [-2**63, 2**64); by default that of torch's own
      generator. `torch.manual_seed` re-seeds all environments, as all devices of torch.

  Attributes:
    streams: its random streams.

  Raises:
    SeedError, ValueError: not a seed.

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
    self._ops = OperatorTable(_operators, self._changed)
    self._decomps = OperatorTable(_decompositions, self._changed, _decomposition)
    self._given_modes: dict[str, Any] = {}
    self._entered = _Entered()
    self._property = _PropertyHolder(lambda: [RuntimeProperty(None, None, None)])
    for hook in _on_creation:
      hook(self)

  # Turning it on and off ------------------------------------------------------------

  @property
  def enabled(self) -> bool:
    """True where it is on in this thread or task, and not suspended."""
    is_on = self in switches.on.get() or self in switches.on_thread.environments
    return is_on and self not in switches.suspended.get()

  def enable_torch_modes(self) -> None:
    """Turns the environment on for the rest of this thread; calls nest."""
    switches.on_thread.environments += (self,)
    self._enter_modes()

  def disable_torch_modes(self, *exc) -> None:
    """Undoes one `enable_torch_modes` of this thread.

    Raises:
      RuntimeError: the environment is not on for the rest of the thread.
    """
    before = switches.on_thread.environments
    switches.on_thread.environments = switches.without(before, self)
    if switches.on_thread.environments == before:
      raise RuntimeError(
        "The torchax environment is not enabled on this thread: disable follows enable."
      )
    self._exit_modes(*exc)

  def _enter_modes(self) -> None:
    """Enters the modes that this environment needs; there are none by default."""
    modes = [*self._given_modes.values()]
    if self.config.treat_cuda_as_jax_device and "function" not in self._given_modes:
      modes.append(XLAFunctionMode(self))
    for mode in modes:
      mode.__enter__()
    self._entered.stack += (modes,)

  def _exit_modes(self, *exc) -> None:
    if not self._entered.stack:
      return  # on in the context of another thread
    *rest, modes = self._entered.stack
    self._entered.stack = tuple(rest)
    for mode in reversed(modes):
      mode.__exit__(*(exc or (None, None, None)))

  @property
  def _function_mode(self):
    """Mode for torch functions, of programs written for upstream.

    One that is set is entered wherever the environment is turned on from then on.
    """
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
    """Plain torch inside the block, whatever happens in it."""
    switches.push(switches.suspended, self)
    try:
      yield
    finally:
      switches.drop(switches.suspended, self)

  def __enter__(self) -> "Environment":
    switches.push(switches.on, self)
    self._enter_modes()
    return self

  def __exit__(self, *exc) -> None:
    switches.drop(switches.on, self)
    self._exit_modes(*exc)

  # Operations -----------------------------------------------------------------------

  def load_ops(self) -> None:
    """Kept for upstream's callers: operators are found when they are first used."""

  def dispatch(self, func, types, args, kwargs):
    """Runs one ATen operation on jax tensors."""
    if self.config.debug_print_each_op or self.config.debug_accuracy_for_each_op:
      return debug.dispatch(self, self._dispatcher, func, args, kwargs or {})
    return self._dispatcher(func, args, kwargs)

  def plan_for(self, func):
    """What runs for an overload; raises OperatorNotFound if nothing does."""
    return self._dispatcher.plan_for(func)

  def shapes(self, func, args, kwargs):
    """What a lowering gives for arrays of given shapes; see `Dispatcher.shapes`."""
    return self._dispatcher.shapes(func, args, kwargs)

  def draw(self, func, args):
    """Runs a random operation; returns its result, and its draw for `redraw`."""
    draws: list = []
    run = functools.partial(self._dispatcher.draw, draws)
    result = debug.dispatch(self, run, func, args, {})
    return result, draws[-1]

  def redraw(self, func, draw, args, kwargs=None):
    """Runs a random operation with the key of an earlier draw (`draw`).

    For gradients that need the numbers of the forward pass again.
    """
    return device_plans.inner(self._dispatcher.plan_for(func)).redraw(
      draw, args, kwargs
    )

  def override_op_definition(
    self, op_to_override, op_impl, is_view_op=False, is_jax_function=False
  ) -> None:
    """Uses another lowering in this environment, from now on.

    What ran before is `env._ops[op].replaced`, and `env._ops[op] = …` puts it back.

    Args:
      op_to_override: ATen overload or packet, or a torch function.
      op_impl: function of jax tensors, which may call torch operations; below autograd
        for an ATen operation, above it for a torch function.
      is_view_op: `op_impl` may alias or change its arguments. Tensors come as they are
        either way: this is upstream's flag.
      is_jax_function: `op_impl` takes arrays instead; then it is compiled, and JAX
        differentiates it for a torch function.
    """
    known = self._ops.get(op_to_override)
    self._ops[op_to_override] = Operator(
      op_to_override,
      op_impl,
      is_jax_function=is_jax_function,
      is_user_defined=True,
      is_view_op=is_view_op,
      replaced=known,
    )

  def _changed(self, operation) -> None:
    """Drops what was prepared for the operators of before."""
    self._dispatcher.forget()
    self.functions.forget()

  def _get_op_or_decomp(self, func) -> Operator:
    """The operator that runs for an operation, or its decomposition.

    Raises:
      OperatorNotFound: neither exists.
    """
    operator = None if is_aten(func) else self._ops.get(func)
    operator = operator or self._dispatcher.find(func)
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
    """The stream that its operations draw from now, in this thread or task."""
    return rng.current(self.streams)

  def rng_scope(self, value: Any) -> contextlib.AbstractContextManager[RngStream]:
    """Draws from a seed, key or state inside the block; see `torchax.rng.rng_scope`."""
    return rng.rng_scope(value, self.streams)

  @ending_at_the_user
  def manual_seed(self, key) -> None:
    """Re-seeds this environment alone; see `torchax.rng.manual_seed`.

    Args:
      key: a seed, a 0-d integer tensor, or a typed key.
    """
    impl = self.config.prng_impl if isinstance(key, int) else None
    rng.manual_seed(key, impl, self.streams)

  @property
  def prng_key(self) -> jax.Array:
    """A typed key for the rest of the current stream, which goes on from it.

    Setting it re-seeds the current stream, so `k = env.prng_key; a = f();
    env.prng_key = k; b = f()` gives a == b. Look at `env.rng` to change nothing.
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
    """The key of the next draw of the current stream, or of the generator."""
    if generator is not None:
      key, count = rng.generator_operands(generator, "get_and_rotate_prng_key")
      return rng.fold_in(key, count)
    return self.rng.next_key("get_and_rotate_prng_key")

  @property
  def param(self) -> RuntimeProperty:
    """The properties in force; `param.prng` is `prng_key`."""
    return dataclasses.replace(
      self._property.content[-1],
      prng=self.prng_key,
      autocast_dtype=amp.dtype_in_force(),
    )

  @property
  def _mesh(self):
    """The mesh in force, `param.mesh`; setting it counts for the block around it."""
    return self._property.content[-1].mesh

  @_mesh.setter
  def _mesh(self, mesh) -> None:
    self._property.content[-1].mesh = mesh

  @contextlib.contextmanager
  def override_property(
    self, *, mesh=_None, prng=_None, autocast_dtype=_None
  ) -> Iterator[None]:
    """Replaces properties inside the block: the mesh, the key to draw from, autocast.

    Raises:
      TypeError: `autocast_dtype` is neither None nor a dtype that autocast takes.
    """
    with contextlib.ExitStack() as scopes:
      if autocast_dtype is not _None:
        scopes.enter_context(amp.resumed(autocast_dtype))
      if prng is not _None:
        scopes.enter_context(self.rng_scope(prng))
      properties = RuntimeProperty.override(self._property.content[-1], mesh=mesh)
      scopes.enter_context(self._property.overridden(properties))
      yield

  # Conversions ----------------------------------------------------------------------

  def admit(self, tensor: torch.Tensor, name: str, cpu_ok: bool = False) -> jax.Array:
    """The array for a tensor of another device among an operation's arguments.

    Raises:
      MixedDeviceError: unless it is a 0-d CPU tensor, as torch allows.
    """
    scalar_ok = self.config.allow_mixed_math_with_scalar_tensor and not tensor.dim()
    if tensor.device.type == "cpu" and (cpu_ok or scalar_ok):
      host_operations.note(tensor)
      return mappings.t2j(tensor)
    if self.config.debug_mixed_tensor:
      debug.log_mixed(name, tensor)
    way = 'Move it with `.to("jax")`, or the others with `.cpu()`.'
    if tensor.device.type == "meta":
      way = "There are no numbers to move: make it on jax."
    raise MixedDeviceError(
      f"{name} expects all tensors on jax, but one of shape {list(tensor.shape)} and "
      f"{tensor.dtype} is on {tensor.device}. {way}"
    )

  def t2j_iso(self, torchtensors):
    """Jax tensors in a tree as their arrays; nothing is copied.

    Raises:
      MixedDeviceError: a tensor of another device, unless 0-d on the CPU.
    """

    def convert(value):
      if isinstance(value, Tensor):
        return value.jax()
      if isinstance(value, torch.Tensor):
        return self.admit(value, "t2j_iso")
      if isinstance(value, torch.dtype):
        return mappings.t2j_dtype(value)
      return value

    return torch_pytree.tree_map(convert, torchtensors)

  def j2t_iso(self, jaxarray):
    """Arrays in a tree as jax tensors; nothing is copied."""
    return torch_pytree.tree_map(
      lambda value: new_tensor(value, self) if isinstance(value, jax.Array) else value,
      jaxarray,
    )

  def v2t_iso(self, views):
    """Views in a tree as tensors with memory of their own."""
    return torch_pytree.tree_map(
      lambda value: value.torch() if isinstance(value, View) else value, views
    )

  def t2j_copy(self, args):
    """CPU tensors in a tree as new arrays."""

    def convert(value):
      if isinstance(value, Tensor):
        return value.jax()
      return mappings.t2j(value) if isinstance(value, torch.Tensor) else value

    return torch_pytree.tree_map(convert, args)

  def j2t_copy(self, args):
    """Arrays and tensors in a tree as new CPU tensors."""
    return torch_pytree.tree_map(
      lambda value: (
        mappings.j2t(value) if isinstance(value, jax.Array | torch.Tensor) else value
      ),
      args,
    )

  def to_xla(self, torchvalues):
    """CPU tensors in a tree as new jax tensors; a module is moved."""
    return torch_pytree.tree_map(self._move_one_value, torchvalues)

  def _move_one_value(self, val):
    if isinstance(val, torch.nn.Module):
      return val.to("jax")
    if isinstance(val, Tensor) or not isinstance(val, torch.Tensor):
      return val
    return self.moved(val)

  def moved(self, tensor: torch.Tensor, device=None, dtype=None) -> Tensor:
    """A CPU tensor as a new jax tensor, on the device of an index if it names one."""
    array = self.array_of(tensor, placement.target_of(device), dtype)
    return new_tensor(array, self)

  @staticmethod
  def array_of(tensor: torch.Tensor, target, dtype=None) -> jax.Array:
    """The array of a CPU tensor; `target` as from `placement.target_of`."""
    host_operations.note(tensor)
    return placement.make(lambda: mappings.t2j(tensor, dtype=dtype), target)

  # Devices --------------------------------------------------------------------------

  def _should_use_torchax_tensor(self, device) -> bool:
    """True when tensors of this device are made on jax."""
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
    """A copy in another dtype, on another device; gradients flow through it."""
    if self._is_same_device(the_tensor, new_device):
      return aten._to_copy.default(the_tensor, dtype=new_dtype)
    to_jax = self._should_use_torchax_tensor(new_device)
    if not to_jax and torch.device(new_device).type not in ("cpu", "meta"):
      raise MixedDeviceError(
        f'A jax tensor moves to "jax", "cpu" and "meta", but got {new_device}.'
      )
    return Move.apply(the_tensor, new_dtype, as_jax(new_device), self)

  def _torch_Tensor_to(self, args, kwargs):
    """`Tensor.to` with all the forms of its arguments."""
    tensor, *rest = args
    device, dtype, _, copy = arguments_of_to(rest, kwargs)
    is_same = self._is_same_device(tensor, device) and (
      dtype is None or mappings.t2j_dtype(dtype) == mappings.t2j_dtype(tensor.dtype)
    )
    return tensor if is_same and not copy else self._to_copy(tensor, dtype, device)

  def _handle_tensor_constructor(self, func, args, kwargs):
    """Runs a factory function on jax if its device says so."""
    device = kwargs.get("device") or torch.get_default_device()
    if not self._should_use_torchax_tensor(device):
      return func(*args, **kwargs)
    return func(*args, **{**kwargs, "device": as_jax(device)})


_default_env: Environment | None = None
_default_env_lock = threading.Lock()


def default_env() -> Environment:
  """The environment of this process; made on the first call."""
  global _default_env
  if _default_env is None:
    with _default_env_lock:
      if _default_env is None:
        environment = Environment()
        environment.streams = rng.default_streams
        _default_env = environment
  return _default_env


def env_on() -> Environment:
  """The environment that is on in this thread or task; by default, the default one."""
  found = switches.on.get() or switches.on_thread.environments
  return found[-1] if found else default_env()


def _streams_on() -> rng.Streams:
  found = switches.on.get() or switches.on_thread.environments
  return found[-1].streams if found else rng.default_streams


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
