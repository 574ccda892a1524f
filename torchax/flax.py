"""Flax linen modules as torch modules: `FlaxNNModule`.

The variables of a linen module become tensors of a torch module, under their linen
names: `params` become parameters, other collections (`batch_stats`, `cache`) buffers. A
call runs `apply` as one compiled function. The keys of its rng collections (`dropout`)
are drawn from the current stream and are operands of that function.

NNX modules hold their own state and need no wrapper; `docs/rng-design.md` shows how
they and other libraries get a key from the stream.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from torchax import rng
from torchax.compat import extras
from torchax.core.partitions import Partition, is_array
from torchax.core.program_limit import ProgramCache
from torchax.dispatch import autograd
from torchax.dispatch.programs import MOST_PROGRAMS
from torchax.environment import Environment, default_env
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.conversions import arrays_of, tensors_of

PARAMS = "params"

# linen names the collection in the error message only.
_MISSING_RNG = re.compile(r'needs PRNG for "(?P<collection>.+)"')


class _Variables(torch.nn.Module):
  """One level of a linen module's variables, as a torch module without a forward."""

  @property
  def forward(self):
    # torch then looks for a submodule `forward`, a name that linen modules may use.
    raise AttributeError("forward")


class _Call(NamedTuple):
  """Static part of a call of `apply`; key of the compiled functions."""

  variables: Any  # tree structure
  arguments: Partition  # without its arrays
  mutable: Any
  # Names and PRNG implementations of the keys.
  rngs: tuple[tuple[str, str], ...] = ()


class FlaxNNModule(torch.nn.Module):
  """Torch module that holds a Flax linen module.

  Parameters and buffers have the names and layouts of linen's variables, such as
  `params.Dense_0.kernel` and `batch_stats.BatchNorm_0.mean`. They are jax tensors, with
  support for optimizers, `state_dict`, `jax_jit` and `torch.func`. linen's partitioning
  boxes are removed.

  Each rng collection that a call needs takes one key from the current stream, in the
  order of linen's requests. So `torch.manual_seed` determines the keys, each call has
  new ones, and a deterministic call draws nothing.

  `train()` and `eval()` select whether calls update buffers. Pass linen's own flags,
  such as `train` or `deterministic`, as arguments: `model(x, train=model.training)`.

  Args:
    env: environment whose stream provides the keys.
    flax_module: a `flax.linen.Module`.
    sample_args: example inputs, jax tensors or arrays, for `flax_module.init`. Its key
      for `params` is `env.prng_key`; other collections get keys of the stream. The
      stream advances, so another module gets other parameters.
    sample_kwargs: example inputs by keyword.

  Raises:
    ImportError: Flax is not installed.
    TypeError: `flax_module` is not a linen module, its `__call__` does not accept the
      sample arguments, or a variable is not an array.
    ValueError: the name of a variable contains a dot.

  >>> import flax.linen as nn, torchax
  >>> env = torchax.default_env()
  >>> x = torch.ones(2, 3, device="jax")
  >>> model = FlaxNNModule(env, nn.Dense(4), (x,))
  >>> model(x).shape, [name for name, _ in model.named_parameters()]
  (torch.Size([2, 4]), ['params.bias', 'params.kernel'])
  """

  def __init__(
    self,
    env: Environment,
    flax_module: Any,
    sample_args: tuple,
    sample_kwargs: dict[str, Any] | None = None,
  ):
    super().__init__()
    linen, meta, _ = _flax()
    if not isinstance(flax_module, linen.Module):
      raise TypeError(
        "FlaxNNModule expects a flax.linen.Module, but got "
        f"{type(flax_module).__name__}. An NNX module is called as it is, with "
        "`nnx.Rngs(env.get_and_rotate_prng_key())`."
      )
    sample_kwargs = dict(sample_kwargs or {})
    _check_sample(flax_module, sample_args, sample_kwargs)
    self._env = env
    self._flax_module = flax_module
    self._compiled: ProgramCache[_Call, autograd.ArrayFunction]
    self._compiled = ProgramCache(MOST_PROGRAMS)
    self._collections: dict[tuple, tuple[str, ...]] = {}
    args, kwargs = arrays_of((tuple(sample_args), sample_kwargs))
    asked = _asked_for(lambda keys: flax_module.init(keys, *args, **kwargs), (PARAMS,))
    params_key = self._env.prng_key  # as in `flax_module.init(env.prng_key, …)`
    keys = {name: self._draw(name) for name in (PARAMS, *asked)} | {PARAMS: params_key}
    variables = meta.unbox(flax_module.init(keys, *args, **kwargs))
    for collection, nested in variables.items():
      if collection == PARAMS or not _is_sown(nested):
        self._add(self, collection, nested, collection)
    self._modules.setdefault(PARAMS, _Variables())
    self._names = tuple(self._modules)  # of the collections

  # Variables -------------------------------------------------------------------------

  def _encode_nested_dict(self, nested_dict: Mapping, path: str = PARAMS):
    """Create a module whose parameters or buffers are the arrays of a nested dict.

    Args:
      nested_dict: dicts of dicts of arrays.
      path: dotted name of the dict; arrays below `params` become parameters.
    """
    module = _Variables()
    for name, value in nested_dict.items():
      self._add(module, name, value, f"{path}.{name}")
    return module

  def _decode_nested_dict(self, child_module: Any) -> dict[str, Any]:
    """Invert `_encode_nested_dict`: return a module's tensors as a nested dict."""
    children = child_module._modules.items()
    return {
      **{name: self._decode_nested_dict(child) for name, child in children},
      **child_module._parameters,
      **child_module._buffers,
    }

  def _add(self, module: torch.nn.Module, name: str, value, path: str) -> None:
    if "." in name:
      raise ValueError(
        f"torch separates the names of modules by dots, but the linen variable {path} "
        f"has one in {name!r}. Give it another name."
      )
    # Not `add_module`: it rejects names of methods, such as `forward`, which linen
    # modules may have.
    if isinstance(value, Mapping):
      module._modules[name] = self._encode_nested_dict(value, path)
    elif not isinstance(value, jax.Array | np.ndarray) or rng.is_typed_key(value):
      raise TypeError(
        f"The linen variable {path} is of type {type(value).__name__}. A torch module "
        "holds variables that are nested dicts of arrays."
      )
    elif path.partition(".")[0] == PARAMS:
      tensor = new_tensor(jax.numpy.asarray(value), self._env)
      trained = tensor.is_floating_point() or tensor.is_complex()
      module._parameters[name] = torch.nn.Parameter(tensor, requires_grad=trained)
    else:
      module._buffers[name] = new_tensor(jax.numpy.asarray(value), self._env)

  def _write(self, module: Any, updates: Mapping, path: str) -> None:
    """Update buffers in place from the results of `apply`."""
    for name, value in updates.items():
      here = f"{path}.{name}"
      if isinstance(value, Mapping) and name in module._modules:
        self._write(module._modules[name], value, here)
        continue
      buffer = module._buffers.get(name)
      if buffer is None or buffer.shape != value.shape:
        raise RuntimeError(
          f"The call made the linen variable {here}, which the sample arguments did "
          "not make, or not with this shape. Pass sample arguments that do."
        )
      buffer.copy_(value.detach())

  # Calls -----------------------------------------------------------------------------

  def forward(
    self, *args: Any, rngs: Any = None, mutable: Any = None, **kwargs: Any
  ) -> Any:
    """Call `flax_module.apply` with the module's tensors as variables.

    Args:
      *args: arguments of the linen module. Jax tensors and arrays are operands of the
        compiled function; other values are static and trigger a compilation each. Pass
        a number that changes with each call as a 0-d tensor.
      rngs: keys by collection, as for `apply`; by default keys of the stream.
      mutable: collections that may change, as for `apply`; the result is then
        (out, updates), and buffers in the updates are written. By default all buffers
        may change in `train()` and none in `eval()`.
      **kwargs: keyword arguments, like `args`; `method` and `capture_intermediates` are
        arguments of `apply`.

    Returns:
      The result of `apply`, with arrays as tensors; gradients flow through it.

    Raises:
      RuntimeError: the call creates a variable that the sample arguments did not.
      TracedDrawError: the call draws inside a raw JAX transformation.
      TypeError: a static argument is not hashable.

    >>> import flax.linen as nn
    >>> x = torch.ones(4, device="jax")
    >>> model = FlaxNNModule(default_env(), nn.Dropout(0.5, deterministic=False), (x,))
    >>> keys = {"dropout": jax.random.key(0)}
    >>> torch.equal(model(x, rngs=keys), model(x, rngs=keys))
    True
    """
    keys = _given_keys(rngs)
    returns_updates = mutable is not None and mutable is not False
    if mutable is None:
      mutable = self.training and tuple(name for name in self._names if name != PARAMS)
    tensors, call = self._flatten(args, kwargs, mutable)
    for name in self._missing(call, tensors, keys):
      keys[name] = self._draw(name)
    out, updates = self._run(call, tensors, keys)
    with torch.no_grad():
      for collection, values in (updates or {}).items():
        if collection != PARAMS and collection in self._names:
          self._write(self._modules[collection], values, collection)
    return (out, updates) if returns_updates else out

  def _flatten(self, args, kwargs, mutable) -> tuple[list[Tensor], _Call]:
    """Return the tensors of a call, variables first, and its static part."""
    variables, structure = jax.tree.flatten(
      {name: self._decode_nested_dict(self._modules[name]) for name in self._names},
      is_leaf=lambda value: isinstance(value, torch.Tensor),
    )
    tensors = [self._operand(tensor) for tensor in variables]
    arguments = Partition((args, kwargs), is_array)
    tensors += map(self._operand, arguments.dynamic)
    if isinstance(mutable, list | set | frozenset):
      mutable = tuple(sorted(mutable))
    call = _Call(structure, arguments.without_arrays(), mutable or False)
    _require_hashable(call)
    return tensors, call

  def _operand(self, value) -> Tensor:
    if isinstance(value, Tensor):
      if value.requires_grad:
        return value
      # A new tensor: buffers change in place after the call, while autograd saves it.
      return new_tensor(value.jax(), self._env)
    if isinstance(value, torch.Tensor):
      return new_tensor(self._env.admit(value, "FlaxNNModule"), self._env)
    return new_tensor(jax.numpy.asarray(value), self._env)

  def _missing(self, call: _Call, tensors, own_keys) -> tuple[str, ...]:
    """Return the rng collections that a call needs and the user did not pass."""
    arrays = [tensor.jax() for tensor in tensors]
    shapes = tuple([(array.shape, array.dtype) for array in arrays])
    where = (call, shapes, tuple(own_keys))
    missing = self._collections.get(where)
    if missing is None:
      missing = _asked_for(
        lambda keys, *arrays: _apply(self._flax_module, call, keys, arrays),
        tuple(own_keys),
        *arrays,
      )
      self._collections[where] = missing
    return missing

  def _draw(self, collection: str) -> jax.Array:
    return self._env.rng.next_key(f"flax.linen rng {collection!r}")

  def _run(self, call: _Call, tensors: list[Tensor], keys: dict[str, jax.Array]):
    """Return the outputs and the updates of collections, recorded by autograd."""
    impls = tuple((name, str(jax.random.key_impl(key))) for name, key in keys.items())
    call = call._replace(rngs=impls)
    function = self._compiled.get(call)
    if function is None:
      # True: modules are expensive, so the gradient reuses the forward pass's values.
      function = autograd.ArrayFunction(_function(self._flax_module, call), True)
      self._compiled[call] = function
    data = [new_tensor(jax.random.key_data(key), self._env) for key in keys.values()]
    operands = data + tensors
    if not operands:
      return tensors_of(function.value())
    return autograd.call(function, operands)

  # Copies ----------------------------------------------------------------------------

  def __getstate__(self):
    # Compiled functions cannot be pickled, and each process has its own environment.
    fresh = {"_compiled": ProgramCache(MOST_PROGRAMS), "_collections": {}, "_env": None}
    return self.__dict__ | fresh

  def __setstate__(self, state):
    super().__setstate__(state)
    self._env = default_env()

  def extra_repr(self) -> str:
    """Return the class name of the linen module."""
    return type(self._flax_module).__name__


def _asked_for(function: Callable, own: tuple[str, ...], *arrays) -> tuple[str, ...]:
  """Return the rng collections that a function of (keys, *arrays) needs beyond `own`.

  Evaluates it abstractly until linen no longer reports a missing collection. So a
  deterministic call, or one that fails, draws nothing.
  """
  _, _, errors = _flax()
  required: tuple[str, ...] = ()

  def with_placeholders(*arrays):
    return function({name: rng.as_key(0) for name in (*own, *required)}, *arrays)

  while True:
    try:
      jax.eval_shape(with_placeholders, *arrays)
      return required
    except errors.InvalidRngError as error:
      missing = _MISSING_RNG.search(str(error))
      if missing is None or missing["collection"] in (*own, *required):
        raise
      required = (*required, missing["collection"])


def _function(module, call: _Call) -> Callable:
  """Return `apply` as a pure function of key data and arrays."""

  def function(*arrays):
    # Keys are passed as their data, because autograd cannot take keys.
    keys = {
      name: rng.as_key(data, impl) for (name, impl), data in zip(call.rngs, arrays)
    }
    return _apply(module, call, keys, arrays[len(keys) :])

  return function


def _apply(module, call: _Call, keys, arrays):
  """Call `module.apply`; return (out, updates)."""
  count = call.variables.num_leaves
  variables = jax.tree.unflatten(call.variables, arrays[:count])
  args, kwargs = call.arguments.unflatten(arrays[count:])
  out = module.apply(
    variables, *args, rngs=keys or None, mutable=call.mutable, **kwargs
  )
  return (out, {}) if call.mutable is False else out


def _flax():
  modules = ("flax.linen", "flax.core.meta", "flax.errors")
  return tuple(extras.load(module, "FlaxNNModule") for module in modules)


def _check_sample(flax_module, args, kwargs) -> None:
  """Raise TypeError unless the module's signature accepts the sample arguments."""
  if not isinstance(args, tuple | list):
    raise TypeError(
      "sample_args expects a tuple of example inputs, such as `(x,)`, but got "
      f"{type(args).__name__}."
    )
  method = kwargs.get("method", "__call__")
  method = getattr(flax_module, method, None) if isinstance(method, str) else None
  if method is None:
    return
  # Arguments of `init`.
  known = ("method", "mutable", "capture_intermediates")
  inputs = {name: value for name, value in kwargs.items() if name not in known}
  try:
    inspect.signature(method).bind(*args, **inputs)
  except TypeError as error:
    name = type(flax_module).__name__
    raise TypeError(
      f"The sample arguments do not fit {name}{inspect.signature(method)}: {error}."
    ) from None


def _is_sown(nested) -> bool:
  """Return True if a module only sows into a collection; its values are then tuples."""
  if isinstance(nested, Mapping):
    return any(map(_is_sown, nested.values()))
  return isinstance(nested, tuple)


def _given_keys(rngs) -> dict[str, jax.Array]:
  """Return the user's keys by collection; as in linen, a single key is for `params`."""
  if rngs is None:
    return {}
  if not isinstance(rngs, Mapping):
    rngs = {PARAMS: rngs}
  return {name: rng.as_key(key) for name, key in rngs.items()}


def _require_hashable(call: _Call) -> None:
  try:
    hash(call)
  except TypeError as error:
    raise TypeError(
      "Arguments of FlaxNNModule that are no tensors are static and must be hashable: "
      f"{error}. Pass arrays as tensors."
    ) from None
