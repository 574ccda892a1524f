"""`Tensor`: `torch.Tensor` that holds a `jax.Array`.

torch sees a wrapper subclass without memory on a hidden device, so autograd runs on the
calling thread; Python sees `device="jax"`. torch keeps shape, strides and dtype. The
values are in a `Storage`, read through the `Chain` of a view. `__torch_function__`
looks for a handler of a torch function in the environment; operations arrive at
`__torch_dispatch__`. Both call `Environment.dispatch`, which calls the dispatcher.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import torch
from jax import Array
from jax.sharding import Sharding
from torch import Tensor as TorchTensor  # in the class here, `torch` is a method

from torchax.compat import jax_compat, torch_compat
from torchax.core import active_environments, deferred, grad_mode, mappings
from torchax.core.chains import WHOLE, Chain, read_chain
from torchax.core.recorder import Pending
from torchax.core.storage import Deferred, Payload, Rebindings, Storage
from torchax.core.storage import active as _active
from torchax.core.tracebacks import hide, hide_library_frames
from torchax.core.view_steps import StopGradientInfo
from torchax.devices import placement
from torchax.errors import MixedDeviceError, MutationError, OperatorNotFound
from torchax.saving import printing, torch_files
from torchax.saving.array_protocols import ArrayProtocols
from torchax.saving.untyped_storage import UntypedStorage

T = TypeVar("T", bound="Tensor")

META = torch.device("meta")
SUPPORTED_JAX_PLATFROM = ["cpu", "cuda", "gpu", "tpu"]

_make_wrapper = torch_compat.make_wrapper
_without_overrides = torch_compat.without_function_overrides
_is_compiling = torch.compiler.is_compiling
_is_scripting = torch_compat.is_tracing_for_torchscript
_suspended = active_environments.suspended.get
_is_conj, _is_neg = torch.Tensor.is_conj, torch.Tensor.is_neg
_set_class = object.__dict__["__class__"].__set__
_torch_dtypes = mappings.JAX_DTYPE_TO_TORCH


class Tensor(ArrayProtocols):
  """Torch tensor whose values are a `jax.Array`.

  Args:
    elem: array of any shape; its dtype must have a torch counterpart.
    env: `Environment` that runs its operations.
    requires_grad: record operations for autograd.

  >>> isinstance(torch.ones(2, device="jax"), torchax.tensor.Tensor)
  True
  """

  # Set by `connect` and `also_instances_of`.
  _from_fake: ClassVar[Callable]
  _shard_gradient: ClassVar[Callable]
  _other_class: ClassVar[type | None] = None
  _is_of_other_class: ClassVar[Callable] = staticmethod(lambda tensor: False)

  def __new__(cls, elem: Array, env: Any = None, requires_grad: bool = False):
    if isinstance(elem, torch.Tensor):  # `type(weight)(tensor, requires_grad=True)`
      return torch.nn.Parameter(elem, requires_grad)
    dtype = mappings.j2t_dtype(elem.dtype)
    return _make_wrapper(cls, elem.shape, dtype=dtype, requires_grad=requires_grad)

  def __init__(self, elem: Array, env: Any = None, requires_grad: bool = False):
    super().__init__()
    if not isinstance(elem, Tensor):  # `torch.Tensor(tensor)` has made an alias
      self._storage, self._chain, self._env = Storage(elem), WHOLE, env

  @property
  def __class__(self):
    # Python reads this only in an `isinstance` check that the type itself fails.
    return Tensor._other_class if Tensor._is_of_other_class(self) else type(self)

  @__class__.setter
  def __class__(self, cls) -> None:
    _set_class(self, cls)

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    """Run a torch function by the environment's table, if it has an entry there."""
    if _is_compiling():  # Dynamo traces this; its graph holds torch's own functions
      return super().__torch_function__(func, types, args, kwargs or {})
    others = tuple(filter(handles_functions, types)) if len(types) > 1 else ()
    if others and not handles_functions(cls):
      return torch_compat.hand_over("__torch_function__", others, func, args, kwargs)
    try:
      env = find_env(args, kwargs)
      handler = env.functions.get(func)
      with _without_overrides():
        # TorchScript records calls in torch's C++ dispatcher, which handlers bypass.
        if handler is not None and env not in _suspended() and not _is_scripting():
          return handler(args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
    except Exception as error:
      hide(error)
      raise

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    if len(types) > 1 and (others := torch_compat.with_parts(types, Tensor)):
      return torch_compat.hand_over("__torch_dispatch__", others, func, args, kwargs)
    try:
      with _without_overrides():
        return find_env(args, kwargs).dispatch(func, types, args, kwargs)
    except Exception as error:
      hide(error)
      raise

  def __tensor_flatten__(self):
    """Flatten for Dynamo's fake tensors.

    Because of this method torch moves modules by swapping tensors, which keeps ties.
    """
    return ["_shell"], Payload(self._storage, self._chain, self._env)

  @classmethod
  def __tensor_unflatten__(cls, inner_tensors, context, outer_size, outer_stride):
    shell = inner_tensors["_shell"]
    if torch_compat.is_fake(shell):
      return cls._from_fake(shell, outer_size, outer_stride)
    tensor = _make_wrapper(Tensor, outer_size, strides=outer_stride, dtype=shell.dtype)
    tensor._storage, tensor._chain = context.storage, context.chain
    tensor._env = context.env
    return tensor

  @property
  def _shell(self) -> TorchTensor:
    """Meta tensor of the same layout, cached: Dynamo compares inputs by identity."""
    shell = self.__dict__.get("_kept_shell")
    layout = (self.shape, self.stride(), self.dtype)
    if shell is None or (shell.shape, shell.stride(), shell.dtype) != layout:
      with torch_compat.outside_transforms(), torch_compat.without_modes():
        shell = torch.empty_strided(*layout[:2], dtype=self.dtype, device=META)
      self._kept_shell = shell
    return shell

  @property
  def device(self) -> torch.device:  # type: ignore[override]
    try:
      return placement.device_of(self._storage.operand)
    except Exception as error:
      hide(error)
      raise

  def get_device(self) -> int:
    """Return the index of the device, or -1; see `placement.device_of`."""
    index = self.device.index
    return -1 if index is None else index

  @property
  @hide_library_frames
  def jax_device(self) -> Any:
    """The `jax.Device` of the array, or its `Sharding` if it is on several.

    >>> torch.ones(2, device="jax").jax_device == jax.devices()[0]
    True
    """
    return self._storage.read().device

  @property
  def _elem(self) -> Array:
    return self.jax()

  @_elem.setter
  def _elem(self, array: Array):
    self.replace_jax(array)

  def jax(self) -> Array:
    """Return the array, of the tensor's shape; it does not alias the tensor.

    >>> torch.ones(2, device="jax").jax().shape
    (2,)
    """
    deferred.end()  # the caller may donate the array
    try:
      array = self._storage.read(self)
      chain = self._chain
      return array if chain is WHOLE else read_chain(array, chain)
    except Exception as error:
      hide(error)
      raise

  def replace_jax(self, array: Array) -> None:
    """Replace the values in place; bases and other views see the change.

    Args:
      array: array of the tensor's shape; it is cast to the tensor's dtype.

    Raises:
      ValueError: `array` has another shape.

    >>> x = torch.zeros(2, device="jax")
    >>> x.replace_jax(jnp.arange(2))
    >>> x
    tensor([0., 1.], device='jax:0')
    """
    if tuple(array.shape) != tuple(self.shape):
      raise ValueError(
        f"replace_jax expects an array of shape {tuple(self.shape)}, but got "
        f"{tuple(array.shape)}."
      )
    array = mappings.to_dtype(array, self.dtype)
    if self._chain is not WHOLE:
      array = self._chain.write(self._storage.read(), array)
    self._storage.write(array)

  @hide_library_frames
  def torch(self) -> TorchTensor:
    """Return a copy on the CPU, without autograd history.

    >>> torch.ones(2, device="jax").torch()
    tensor([1., 1.])
    """
    return self._env.j2t_copy(self.jax())

  @hide_library_frames
  def cpu(self, memory_format: Any = None) -> TorchTensor:
    """Return a copy on the CPU; gradients flow back through it."""
    return self.to("cpu")

  @hide_library_frames
  def to(self, *args: Any, **kwargs: Any) -> TorchTensor:
    """Convert like `torch.Tensor.to`; another device gets a copy."""
    return self._env._torch_Tensor_to((self, *args), kwargs)

  def type(self, dtype: Any = None, non_blocking: bool = False) -> str | TorchTensor:  # type: ignore[override]
    """Return the name of the tensor's type, or the tensor in another dtype.

    Args:
      dtype: a torch.dtype, which keeps the device, or a tensor type or its name, which
        includes the device: `torch.FloatTensor`, "torch.jax.FloatTensor".
      non_blocking: ignored; JAX always runs asynchronously.
    """
    if dtype is None:
      return super().type().replace("torch.lazy.", "torch.jax.")
    if isinstance(dtype, str) and dtype.startswith("torch.jax."):
      on_cpu = getattr(torch, dtype.removeprefix("torch.jax."), None)
      if on_cpu is None:
        raise ValueError(f"invalid type: {dtype!r}. Pass a torch.dtype instead.")
      dtype = on_cpu.dtype
    return self.to(dtype) if isinstance(dtype, torch.dtype) else super().type(dtype)

  def new(  # type: ignore[override]
    self, *data_or_size: Any, size=None, device=None
  ) -> TorchTensor:
    """Create a tensor of this dtype and device from a size or values (legacy API).

    Args:
      *data_or_size: integers or a `torch.Size` for a tensor that is not initialized;
        one list or tensor for its values; none for `size`.
      size: a size; None for an empty tensor.
      device: the device; None for this tensor's.

    >>> torch.ones(2, device="jax").new([3, 4])
    tensor([3., 4.], device='jax:0')
    """
    if not data_or_size:
      return self.new_empty(size or 0, device=device)
    if all(isinstance(extent, int) for extent in data_or_size):
      return self.new_empty(data_or_size, device=device)
    (only,) = data_or_size
    create = self.new_empty if type(only) is torch.Size else self.new_tensor
    return create(only, device=device)

  def new_tensor(  # type: ignore[override]
    self, data, *, dtype=None, device=None, requires_grad=False, **layout
  ) -> TorchTensor:
    """Copy `data`; dtype, device and sharding default to this tensor's."""
    # C++ knows neither the index of the device nor the sharding.
    if not isinstance(data, torch.Tensor):
      data = torch.tensor(data, dtype=dtype or self.dtype, device="cpu", **layout)
    copied = data.detach().to(device or self.device, dtype or self.dtype, copy=True)
    # The transforms of `torch.func` wrap the copy.
    if device is None and self._chain is WHOLE and isinstance(copied, Tensor):
      arrays = copied._storage.array, self._storage.array
      copied._storage.array = placement.shard_like(*arrays)
    copied.requires_grad = requires_grad
    return copied

  @hide_library_frames
  def apply_jax(self, jax_function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a JAX function of the array as a tensor.

    Args:
      jax_function: function `(array, *args, **kwargs) -> tree of arrays`.
      *args, **kwargs: other arguments of it; tensors on jax in them become arrays.

    Raises:
      MixedDeviceError: an argument has a tensor on another device, except a 0-d one.

    >>> torch.ones(2, device="jax").apply_jax(jnp.cumsum)
    tensor([1., 2.], device='jax:0')
    """
    args, kwargs = self._env.t2j_iso((args, kwargs))
    return self._env.j2t_iso(jax_function(self.jax(), *args, **kwargs))

  @hide_library_frames
  def apply_jax_(self, jax_function: Callable, *args: Any, **kwargs: Any) -> Tensor:
    """Replace the array in place by a JAX function of it; return the tensor.

    Args:
      jax_function: function `(array, *args, **kwargs) -> array` that keeps the shape;
        its result is cast to the tensor's dtype.
      *args, **kwargs: other arguments of it; tensors on jax in them become arrays.

    Raises:
      MixedDeviceError: an argument has a tensor on another device, except a 0-d one.
      ValueError: the result has another shape.

    >>> torch.ones(2, device="jax").apply_jax_(jnp.cumsum)
    tensor([1., 2.], device='jax:0')
    """
    args, kwargs = self._env.t2j_iso((args, kwargs))
    self.replace_jax(jax_function(self.jax(), *args, **kwargs))
    torch.autograd.graph.increment_version(self)
    return self

  @hide_library_frames
  def shard_(self, sharding: Sharding) -> Tensor:
    """Shard the array, and the gradient of a leaf, in place; return the tensor.

    Args:
      sharding: `jax.sharding.Sharding` of the tensor's array.

    Raises:
      ShardingError: the spec of a `NamedSharding` does not fit the tensor.

    >>> mesh = jax.make_mesh((1,), ("x",))
    >>> sharding = jax.NamedSharding(mesh, jax.P("x"))
    >>> torch.ones(2, device="jax").shard_(sharding).jax().sharding.spec
    P('x',)
    """
    self.apply_jax_(placement.shard, sharding)
    Tensor._shard_gradient(self)
    return self

  @property
  def data(self) -> TorchTensor:
    """Alias without autograd history; in-place operations on it are not detected.

    Assigning a jax tensor gives this tensor its storage, shape and dtype.

    Raises:
      MixedDeviceError: the assigned tensor is neither on jax nor 0-d.
      MutationError: in a compiled function, it differs in shape or dtype from this
        tensor, which was created outside of it.

    >>> x = torch.ones(2, device="jax", requires_grad=True)
    >>> _ = x.data.mul_(3)
    >>> x
    tensor([3., 3.], device='jax:0', requires_grad=True)
    """
    if jax_compat.is_top_level():
      return like(self, self._storage, self._chain)
    return like(self, self._storage, self._chain.append(StopGradientInfo()))

  @data.setter
  def data(self, other: Any):
    if not isinstance(other, Tensor):
      if other.dim():  # operations take 0-d CPU tensors, too
        raise MixedDeviceError(
          f"`tensor.data = other` expects a jax tensor, but got one on {other.device}. "
          'Call `other.to("jax")` first.'
        )
      other = other.to(self.device)
    boundary = _active.boundary
    if boundary is not None and self._storage.birth is not boundary:
      self._replace_outer(other)
      return
    torch_compat.set_metadata(self, other)
    rebind(self, other)

  def _replace_outer(self, other: Tensor) -> None:
    """Copy the values of `other`, whose storage is invalid once the trace has ended."""
    if self.shape != other.shape or self.dtype != other.dtype:
      raise MutationError(
        f"`tensor.data = other` in a function being compiled, with a tensor of shape "
        f"{list(self.shape)} and {self.dtype} from outside of it, expects the same "
        f"shape and dtype, but got {list(other.shape)} and {other.dtype}."
      )
    self.replace_jax(grad_mode.with_derivative_of(self.jax(), other.jax()))

  def _is_view(self) -> bool:
    # False after an in-place change of shape (`functions/reshapes.py`), and for torch's
    # tracers: they would repeat the views on a base of symbolic sizes.
    is_view = super()._is_view() and "_has_hidden_base" not in self.__dict__
    return is_view and not torch_compat.is_tracing()

  def is_set_to(self, tensor: TorchTensor) -> bool:
    """Return True if both alias the same elements of one storage."""
    if not isinstance(tensor, Tensor) or self._storage is not tensor._storage:
      return False
    # torch would compare copies (conj, neg), or a traced offset is not known.
    if any(_is_conj(t) or _is_neg(t) or t._chain.is_traced for t in (self, tensor)):
      return False
    return (
      self.shape == tensor.shape
      and self.stride() == tensor.stride()
      and self.storage_offset() == tensor.storage_offset()
    )

  @hide_library_frames
  def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
    return printing.text_of(self)

  @hide_library_frames
  def __format__(self, spec: str) -> str:
    if self.dim() or not (spec or printing.has_numbers(self)):
      return object.__format__(self, spec)
    return format(self.item(), spec)

  @hide_library_frames
  def __deepcopy__(self, memo):
    if id(self) in memo:
      return memo[id(self)]
    if not self.is_leaf:
      raise RuntimeError(
        "Only Tensors created explicitly by the user (graph leaves) support the "
        "deepcopy protocol at the moment. Call `.detach()` first."
      )
    copied = like(self, copy.deepcopy(self._storage, memo), self._chain)
    memo[id(self)] = copied
    if torch_compat.is_parameter(self):
      torch_compat.mark_as_parameter(copied)
    for name, value in self.__dict__.items():
      if name not in torch_files.OWN:
        copied.__dict__[name] = copy.deepcopy(value, memo)
    if self.grad is not None:
      copied.grad = copy.deepcopy(self.grad, memo)
    copied.requires_grad = self.requires_grad
    if "_beside" in self.__dict__:
      Tensor._shard_gradient(copied)
    return copied

  def __copy__(self):
    copied = like(self, self._storage, self._chain)
    for name, value in self.__dict__.items():
      copied.__dict__.setdefault(name, value)
    copied.requires_grad = self.requires_grad
    return copied

  @hide_library_frames
  def __reduce_ex__(self, protocol):
    """Reduce to a CPU tensor for `torch.save`, to a jax tensor for `pickle`."""
    return torch_files.reduce(self)

  def untyped_storage(self) -> UntypedStorage:
    """Return the storage that the tensor shares with its views, one object for all."""
    root = self._storage.root
    untyped = self.__dict__.get("_untyped")
    if untyped is None or untyped.storage is not root:
      untyped = self._untyped = UntypedStorage.of(root)
    return untyped

  def data_ptr(self) -> int:
    """Return a number from the storage's own range; no address to dereference."""
    if not self.numel():
      return 0
    offset: Any = self.storage_offset()
    return self._storage.root.address + offset * self.element_size()


def connect(from_fake: Callable, shard_gradient: Callable, subclass: Callable) -> None:
  """Set functions of `Tensor` that are defined in higher layers.

  Args:
    from_fake: (fake tensor, shape, strides) -> tensor that replaces a jax tensor in
      torch's tracers.
    shard_gradient: (leaf) -> None; its gradient gets the sharding of the leaf.
    subclass: (tensor, cls) -> alias of the user's class.
  """
  Tensor._from_fake = staticmethod(from_fake)
  Tensor._shard_gradient = staticmethod(shard_gradient)
  Tensor.as_subclass = subclass  # type: ignore[method-assign]


def also_instances_of(cls: type, applies: Callable[[Tensor], bool]) -> None:
  """Make `isinstance(tensor, cls)` true for tensors with `applies(tensor)`."""
  Tensor._other_class, Tensor._is_of_other_class = cls, staticmethod(applies)


@functools.lru_cache(maxsize=1024)  # it keeps the classes alive
def handles_functions(cls: Any) -> bool:
  """Return True if a class has its own `__torch_function__`, which then goes first."""
  if issubclass(cls, jax_compat.ArrayImpl | jax_compat.Tracer):
    return False
  bases: tuple[Any, ...] = (TorchTensor, Tensor)
  plain = [None, *(base.__torch_function__.__func__ for base in bases)]
  return getattr(cls.__torch_function__, "__func__", None) not in plain


def is_traced(tensor: Any) -> bool:
  """Return True if the values of a tensor are tracers."""
  return isinstance(tensor._storage.read(tensor), jax.core.Tracer)


def new_tensor(array: jax.Array, env) -> Tensor:
  """Wrap an array in a tensor, like `Tensor(array, env)` but faster."""
  dtype = _torch_dtypes.get(array.dtype)
  if dtype is None:
    dtype = mappings.j2t_dtype(array.dtype)  # raises an error with the reason
  try:
    tensor = _make_wrapper(Tensor, array.shape, dtype=dtype)
  except TypeError as error:
    raise TypeError(
      "A torch tensor needs numbers as sizes, but got the shape "
      f"{array.shape}. For symbolic sizes, `torch.export` the module with "
      "`dynamic_shapes=` and use `torchax.export`."
    ) from error
  storage: Any = object.__new__(Deferred if type(array) is Pending else Storage)
  storage.array = array
  storage.version = 0
  storage.birth = boundary = _active.boundary
  if boundary is not None:
    boundary.born.append(weakref.ref(storage))
  tensor._storage = storage
  tensor._chain = WHOLE
  tensor._env = env
  return tensor


def like(tensor: Tensor, storage: Storage, chain: Chain) -> Tensor:
  """Create a tensor of the same class, shape and strides on a storage."""
  return alias(type(tensor), tensor, tensor, storage, chain)


def alias(
  cls: type[T], source: Tensor, layout: torch.Tensor, storage: Storage, chain: Chain
) -> T:
  """Create a tensor of class `cls` on a storage, in the layout of another tensor.

  If `layout` is not a tensor, it takes the bits "conjugate" and "negative" of `source`.
  """
  if torch.is_inference_mode_enabled() and not source.is_inference():
    # A view shares its base's version counter, and inference tensors have none: so a
    # view of a normal tensor is a normal tensor.
    with torch.inference_mode(False):
      return alias(cls, source, layout, storage, chain)
  other: Any = _make_wrapper(
    cls,
    layout.shape,
    strides=layout.stride(),
    storage_offset=layout.storage_offset(),
    dtype=layout.dtype,
  )
  other._storage, other._chain, other._env = storage, chain, source._env
  if chain.is_marked:
    marks = layout if isinstance(layout, torch.Tensor) else source
    if _is_conj(marks):
      torch_compat.set_conj(other, True)
    if _is_neg(marks):
      torch_compat.set_neg(other, True)
  return other


def rebind(tensor: Tensor, source: Tensor) -> None:
  """Make `tensor` an alias of `source`; its shape is already the same."""
  tensor._storage, tensor._chain = source._storage, source._chain
  Rebindings.count_one()


def find_env(args, kwargs):
  """Return the environment of the first torchax tensor in the arguments."""
  first = args[0] if args else None
  if type(first) in (list, tuple) and first:  # `torch.cat`, `torch._foreach_add_`
    first = first[0]
  if isinstance(first, Tensor):
    return first._env
  for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
    if isinstance(leaf, Tensor):
      return leaf._env
  raise OperatorNotFound("torchax was called without one of its tensors.")


# Upstream defines these names here. `torchax/__init__.py` sets them.
Environment: Any
RuntimeProperty: Any
XLADispatchMode: Any
XLAFunctionMode: Any
_PropertyHolder: Any
_None: Any
TENSOR_CONSTRUCTORS: Any
default_env: Any
_make_debug_msg: Any
_name_of_func: Any
debug_accuracy: Any
log_nested: Any
