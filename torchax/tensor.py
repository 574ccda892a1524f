"""`Tensor`: a `torch.Tensor` that holds a `jax.Array`.

torch sees a wrapper without memory on a hidden device, so that autograd runs on the
calling thread; Python sees `device="jax"`. Shape, strides and dtype are torch's own
records; the numbers are in a `Storage`, read through the view's `Chain`.
Operations arrive in `__torch_dispatch__` and go on in `dispatch/dispatcher.py`. The
environment is in `environment.py`; upstream's name `torchax.tensor.Environment` is
set from there.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.sharding import Sharding
from torch import Tensor as TorchTensor  # in the class here, `torch` is a method

from torchax.compat import jax_compat, torch_compat
from torchax.core import grad_mode, mappings, switches
from torchax.core.chains import WHOLE, Chain
from torchax.core.explanations import loses_gradient, no_numbers
from torchax.core.storage import Content, Rebindings, Storage
from torchax.core.storage import active as _active
from torchax.core.tracebacks import ending_at_the_user, hide
from torchax.core.view_reads import read_chain
from torchax.core.view_steps import StopGradientInfo
from torchax.devices import placement
from torchax.errors import MixedDeviceError, MutationError, OperatorNotFound
from torchax.saving import files, printing
from torchax.saving.untyped_storage import UntypedStorage

T = TypeVar("T", bound="Tensor")

META = torch.device("meta")
SUPPORTED_JAX_PLATFROM = ["cpu", "cuda", "gpu", "tpu"]

_make_wrapper = torch_compat.make_wrapper
_without_overrides = torch_compat.without_function_overrides
_is_compiling = torch.compiler.is_compiling
_is_scripting = torch_compat.is_tracing_for_torchscript
_suspended = switches.suspended.get
_is_conj, _is_neg = torch.Tensor.is_conj, torch.Tensor.is_neg
_set_class = object.__dict__["__class__"].__set__
_torch_dtypes = mappings.JAX_DTYPE_TO_TORCH


class Tensor(torch.Tensor):
  """A torch tensor whose numbers are a `jax.Array`.

  Args:
    elem: array of any shape; its dtype must have a torch counterpart.
    env: the `Environment` whose operator table is used.
    requires_grad: record operations for autograd.
  """

  # Values of `connect` and `also_instances_of`.
  _from_fake: ClassVar[Callable]
  _shard_gradient: ClassVar[Callable]
  _other_class: ClassVar[type | None] = None
  _is_of_other_class: ClassVar[Callable] = staticmethod(lambda tensor: False)

  @staticmethod
  def __new__(cls, elem: Array, env, requires_grad=False):
    return _make_wrapper(
      cls,
      elem.shape,
      dtype=mappings.j2t_dtype(elem.dtype),
      requires_grad=requires_grad,
    )

  def __init__(self, elem: Array, env, requires_grad=False):
    super().__init__()
    self._storage = Storage(elem)
    self._chain = WHOLE
    self._env = env

  @property
  def __class__(self):
    # Of Python, only an `isinstance` that does not hold by the type asks for this.
    return Tensor._other_class if Tensor._is_of_other_class(self) else type(self)

  @__class__.setter
  def __class__(self, cls) -> None:
    _set_class(self, cls)

  @classmethod
  def __torch_function__(cls, func, types, args=(), kwargs=None):
    """Run a torch function by the environment's table, if it has an entry there."""
    if _is_compiling():  # Dynamo reads this: its graph holds torch's own functions
      return super().__torch_function__(func, types, args, kwargs or {})
    if len(types) > 1 and any(map(_handles_functions, types)):
      return NotImplemented
    try:
      env = find_env(args, kwargs)
      handler = env.functions.get(func)
      with _without_overrides():
        # TorchScript records what torch's C++ dispatches: handlers pass by that.
        if handler is not None and env not in _suspended() and not _is_scripting():
          return handler(args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)
    except Exception as error:
      hide(error)
      raise

  @classmethod
  def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
    try:
      with _without_overrides():
        return find_env(args, kwargs).dispatch(func, types, args, kwargs)
    except Exception as error:
      hide(error)
      raise

  def __tensor_flatten__(self):
    """Makes torch move modules by swapping tensors, which keeps ties and identity.

    And makes Dynamo trace functions of jax tensors, on fake ones.
    """
    return ["_shell"], Content(self._storage, self._chain, self._env)

  @staticmethod
  def __tensor_unflatten__(inner_tensors, context, outer_size, outer_stride):
    shell = inner_tensors["_shell"]
    if torch_compat.is_fake(shell):
      return Tensor._from_fake(shell, outer_size, outer_stride)
    tensor = _make_wrapper(Tensor, outer_size, strides=outer_stride, dtype=shell.dtype)
    tensor._storage, tensor._chain = context.storage, context.chain
    tensor._env = context.env
    return tensor

  @property
  def _shell(self) -> TorchTensor:
    """A tensor without data of the same shape, strides and dtype.

    The same one every time: Dynamo asks whether two inputs are one tensor.
    """
    shell = self.__dict__.get("_kept_shell")
    layout = (self.shape, self.stride(), self.dtype)
    if shell is None or (shell.shape, shell.stride(), shell.dtype) != layout:
      with torch_compat.without_modes():
        shell = torch.empty_strided(*layout[:2], dtype=self.dtype, device=META)
      self._kept_shell = shell
    return shell

  @property
  def device(self) -> torch.device:  # type: ignore[override]
    try:
      return placement.device_of(self._storage.array)
    except Exception as error:
      hide(error)
      raise

  def get_device(self) -> int:
    """The index of the device; see `placement.device_of`."""
    index = self.device.index
    return -1 if index is None else index

  @property
  @ending_at_the_user
  def jax_device(self):
    """Where the array lies: a `jax.Device`, or a `Sharding` if on several."""
    return self._storage.read().device

  @property
  def _elem(self) -> Array:
    return self.jax()

  @_elem.setter
  def _elem(self, array: Array):
    self.replace_jax(array)

  def jax(self) -> Array:
    """The array; a view's is computed from its base. It does not alias the tensor."""
    try:
      array = self._storage.read(self)
      chain = self._chain
      return array if chain is WHOLE else read_chain(array, chain)
    except Exception as error:
      hide(error)
      raise

  def replace_jax(self, array: Array) -> None:
    """Replaces the numbers, as an in-place operation does: views and bases follow.

    Raises:
      ValueError: another shape.
    """
    if tuple(array.shape) != tuple(self.shape):
      raise ValueError(
        f"Expected an array of shape {tuple(self.shape)}, but got {tuple(array.shape)}."
      )
    array = jnp.asarray(array, mappings.t2j_dtype(self.dtype))
    if self._chain is not WHOLE:
      array = self._chain.write(self._storage.read(), array)
    self._storage.write(array)

  @ending_at_the_user
  def torch(self) -> TorchTensor:
    """A copy on the CPU."""
    return self._env.j2t_copy(self.jax())

  @ending_at_the_user
  def cpu(self, memory_format=None) -> TorchTensor:
    """A copy on the CPU; gradients flow back through it."""
    return self.to("cpu")

  @ending_at_the_user
  def to(self, *args, **kwargs) -> TorchTensor:
    """As `torch.Tensor.to`; to another device the data is copied."""
    return self._env._torch_Tensor_to((self, *args), kwargs)

  @ending_at_the_user
  def numpy(self, *, force: bool = False) -> np.ndarray:
    """A copy as a numpy array.

    Raises:
      RuntimeError: the tensor requires grad and `force` is False.
    """
    if self.requires_grad and not force:
      raise RuntimeError(
        "Can't call numpy() on a Tensor that requires grad. Use "
        "tensor.detach().numpy() or numpy(force=True)."
      )
    return mappings.numpy_copy(self.jax(), "`.numpy()`")

  @ending_at_the_user
  def __array__(self, dtype=None, copy=None):
    if copy is False:
      raise ValueError(
        "A jax tensor is copied to become a numpy array, but copy=False was asked for. "
        "Use np.asarray(tensor)."
      )
    return np.asarray(self.numpy(), dtype=dtype)

  def __array_wrap__(self, array, context=None, return_scalar=False):
    """What numpy computed of this tensor (`tensor + array`), on the tensor's device."""
    return super().__array_wrap__(array).to(self.device)

  def __dlpack_device__(self) -> tuple:
    """Where the array lies, in DLPack's terms."""
    array: Any = self.jax()  # JAX's annotations lack the method
    return array.__dlpack_device__()

  @ending_at_the_user
  def __dlpack__(self, *, copy: bool | None = None, **options):
    """A copy as a DLPack capsule: who takes it may write to it.

    Raises:
      BufferError: the tensor requires grad, or `copy` is False.
    """
    if self.requires_grad or copy is False:
      raise BufferError(
        "A jax tensor is exported as a copy without gradients. Call `.detach()` on one "
        "that requires grad, and leave `copy` out."
      )
    copied = jnp.copy(self.jax())
    if isinstance(copied, jax.core.Tracer):
      raise no_numbers("DLPack")
    return copied.__dlpack__(**options)

  @ending_at_the_user
  def __jax_array__(self) -> Array:
    if self.requires_grad and torch.is_grad_enabled():
      raise loses_gradient()
    return self.jax()

  @ending_at_the_user
  def tolist(self):
    """The numbers as nested Python lists.

    Raises:
      TracedStateError: inside a compiled function, where they have no values yet.
    """
    array = self.jax()
    if isinstance(array, jax.core.Tracer):
      raise no_numbers("`.tolist()`")
    return mappings.numpy_copy(array, "`.tolist()`").tolist()

  def type(self, dtype=None, non_blocking: bool = False) -> str | TorchTensor:  # type: ignore[override]
    """The name of the tensor's type, or the tensor in another dtype.

    Args:
      dtype: a torch.dtype keeps the device; a type of tensors or its name, such as
        `torch.FloatTensor` and "torch.jax.FloatTensor", says the device as well.
      non_blocking: accepted; JAX runs asynchronously in any case.
    """
    if dtype is None:
      return super().type().replace("torch.lazy.", "torch.jax.")
    if isinstance(dtype, str) and dtype.startswith("torch.jax."):
      on_cpu = getattr(torch, dtype.removeprefix("torch.jax."), None)
      if on_cpu is None:
        raise ValueError(f"invalid type: {dtype!r}. Pass a torch.dtype instead.")
      dtype = on_cpu.dtype
    return self.to(dtype) if isinstance(dtype, torch.dtype) else super().type(dtype)

  def new(self, *data_or_size) -> TorchTensor:  # type: ignore[override]
    """torch's legacy constructor: of a size, or of numbers, in this dtype on jax."""
    if not data_or_size:
      return self.new_empty(0)
    if all(isinstance(extent, int) for extent in data_or_size):
      return self.new_empty(data_or_size)
    (only,) = data_or_size
    return self.new_empty(only) if type(only) is torch.Size else self.new_tensor(only)

  def new_tensor(  # type: ignore[override]
    self, data, *, dtype=None, device=None, requires_grad=False, **layout
  ) -> TorchTensor:
    """A copy of `data` in this tensor's dtype on jax, unless told otherwise."""
    # C++ knows neither the index of the device nor the sharding.
    if not isinstance(data, torch.Tensor):
      data = torch.tensor(data, dtype=dtype or self.dtype, device="cpu", **layout)
    copied = data.detach().to(device or self.device, dtype or self.dtype, copy=True)
    if device is None and self._chain is WHOLE:
      arrays = copied._storage.array, self._storage.array
      copied._storage.array = placement.put_as(*arrays)
    return copied.requires_grad_(requires_grad)

  @ending_at_the_user
  def apply_jax(self, jax_function, *args, **kwargs):
    """`jax_function(array, *args)` as a tensor; tensors among `args` become arrays."""
    args, kwargs = self._env.t2j_iso((args, kwargs))
    return self._env.j2t_iso(jax_function(self.jax(), *args, **kwargs))

  @ending_at_the_user
  def apply_jax_(self, jax_function, *args, **kwargs) -> Tensor:
    """In-place `apply_jax`: the array becomes what the function returns."""
    args, kwargs = self._env.t2j_iso((args, kwargs))
    self.replace_jax(jax_function(self.jax(), *args, **kwargs))
    return self

  @ending_at_the_user
  def shard_(self, sharding: Sharding) -> Tensor:
    """Lays the array, and the gradient of a leaf, out over devices, in place.

    Raises:
      ShardingError: the spec of a `NamedSharding` does not fit the tensor.
    """
    self.apply_jax_(placement.lay_out, sharding)
    Tensor._shard_gradient(self)
    return self

  @property
  def data(self) -> TorchTensor:
    """The same numbers without autograd history; shares memory.

    Unlike `detach()`, changes of it in place are not counted: as in torch, a backward
    pass does not notice them.
    """
    if jax_compat.is_top_level():
      return like(self, self._storage, self._chain)
    return like(self, self._storage, self._chain.append(StopGradientInfo()))

  @data.setter
  def data(self, other: TorchTensor):
    if not isinstance(other, Tensor):
      raise MixedDeviceError(
        f"`tensor.data = other` expects a jax tensor, but got one on {other.device}. "
        'Call `other.to("jax")` first.'
      )
    boundary = _active.boundary
    if boundary is not None and self._storage.birth is not boundary:
      self._replace_outer(other)
      return
    torch_compat.set_metadata(self, other)
    rebind(self, other)

  def _replace_outer(self, other: Tensor) -> None:
    """Takes the numbers of a tensor that ends with the trace; not its memory."""
    if self.shape != other.shape or self.dtype != other.dtype:
      raise MutationError(
        f"`tensor.data = other` in a function being compiled, with a tensor of shape "
        f"{list(self.shape)} and {self.dtype} from outside of it, expects the same "
        f"shape and dtype, but got {list(other.shape)} and {other.dtype}."
      )
    self.replace_jax(grad_mode.with_derivative_of(self.jax(), other.jax()))

  def _is_view(self) -> bool:
    # Not one that a change of its shape in place has made (`functions/reshapes.py`).
    return super()._is_view() and "_has_hidden_base" not in self.__dict__

  def is_set_to(self, tensor: TorchTensor) -> bool:
    """True when both show the same places of the same storage."""
    if not isinstance(tensor, Tensor) or self._storage is not tensor._storage:
      return False
    # torch would copy before it looks, or the place is not known yet.
    if any(_is_conj(t) or _is_neg(t) or t._chain.is_traced for t in (self, tensor)):
      return False
    return (
      self.shape == tensor.shape
      and self.stride() == tensor.stride()
      and self.storage_offset() == tensor.storage_offset()
    )

  @ending_at_the_user
  def __repr__(self, *, tensor_contents=None) -> str:  # type: ignore[override]
    return printing.text_of(self)

  @ending_at_the_user
  def __format__(self, spec: str) -> str:
    if self.dim() or not (spec or printing.has_numbers(self)):
      return object.__format__(self, spec)
    return format(self.item(), spec)

  @ending_at_the_user
  def __deepcopy__(self, memo):
    if id(self) in memo:
      return memo[id(self)]
    if not self.is_leaf:
      raise RuntimeError(
        "Only Tensors created explicitly by the user (graph leaves) support the "
        "deepcopy protocol at the moment. Call `.detach()` first."
      )
    storage = memo.get(id(self._storage))
    if storage is None:
      # An array that both have would be lost to one where the other one is donated.
      storage = memo[id(self._storage)] = Storage(jnp.copy(self._storage.read()))
    copied = like(self, storage, self._chain)
    memo[id(self)] = copied
    if torch_compat.is_parameter(self):
      torch_compat.mark_as_parameter(copied)
    for name, value in self.__dict__.items():
      if name not in files.OWN:
        copied.__dict__[name] = copy.deepcopy(value, memo)
    if self.grad is not None:
      copied.grad = copy.deepcopy(self.grad, memo)
    copied.requires_grad_(self.requires_grad)
    if "_beside" in self.__dict__:
      Tensor._shard_gradient(copied)
    return copied

  def __copy__(self):
    copied = like(self, self._storage, self._chain)
    for name, value in self.__dict__.items():
      copied.__dict__.setdefault(name, value)
    return copied.requires_grad_(self.requires_grad)

  @ending_at_the_user
  def __reduce_ex__(self, protocol):
    """A CPU tensor to `torch.save`, a jax tensor to `pickle`."""
    return files.reduce(self)

  def untyped_storage(self) -> UntypedStorage:
    """What it shares with its views: the same object, address and size for all."""
    root = self._storage.root
    untyped = self.__dict__.get("_untyped")
    if untyped is None or untyped.storage is not root:
      untyped = self._untyped = UntypedStorage.of(root)
    return untyped

  def data_ptr(self) -> int:
    """A number in place of the address of the first element.

    Tensors that share memory have numbers as far apart as their elements; ranges of
    others do not overlap. There is nothing at this address.
    """
    if not self.numel():
      return 0
    offset: Any = self.storage_offset()
    return self._storage.root.address + offset * self.element_size()

  def as_subclass(self, cls: Any) -> Any:
    """As `torch.Tensor.as_subclass`; a plain tensor could not hold the array."""
    return self if isinstance(self, cls) else super().as_subclass(cls)


def connect(from_fake: Callable, shard_gradient: Callable) -> None:
  """Give tensors what is defined above them.

  Args:
    from_fake: (fake tensor, shape, strides) -> what torch's tracers see in place of a
      jax tensor.
    shard_gradient: (leaf) -> None; its gradient gets the sharding of the leaf.
  """
  Tensor._from_fake = staticmethod(from_fake)
  Tensor._shard_gradient = staticmethod(shard_gradient)


def also_instances_of(cls: type, applies: Callable[[Tensor], bool]) -> None:
  """Have `isinstance(tensor, cls)` hold where `applies(tensor)` is true."""
  Tensor._other_class, Tensor._is_of_other_class = cls, staticmethod(applies)


@functools.lru_cache(maxsize=1024)  # it keeps the classes
def _handles_functions(cls: Any) -> bool:
  """Whether a class that is not ours handles torch functions: then it goes first."""
  if issubclass(cls, Tensor | jax_compat.ArrayImpl | jax_compat.Tracer):
    return False
  if cls.__module__.startswith("torch.nested."):
    return False  # torch's own; they are refused by name
  plain: Any = TorchTensor
  handler = getattr(cls.__torch_function__, "__func__", None)
  return handler not in (None, plain.__torch_function__.__func__)


def is_traced(tensor: Any) -> bool:
  """True where the numbers of a tensor are not known yet."""
  return isinstance(tensor._storage.read(tensor), jax.core.Tracer)


def new_tensor(array: jax.Array, env) -> Tensor:
  """A tensor around an array: `Tensor(array, env)`, quicker."""
  dtype = _torch_dtypes.get(array.dtype)
  if dtype is None:
    dtype = mappings.j2t_dtype(array.dtype)  # raises what is wrong
  try:
    tensor = _make_wrapper(Tensor, array.shape, dtype=dtype)
  except TypeError as error:
    raise TypeError(
      "A torch tensor has sizes that are numbers, but got the shape "
      f"{array.shape}. For symbolic sizes, `torch.export` the module with "
      "`dynamic_shapes=` and use `torchax.export`."
    ) from error
  storage = Storage.__new__(Storage)
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
  """A tensor of the same class, shape and strides on a given storage."""
  return alias(type(tensor), tensor, tensor, storage, chain)


def alias(
  cls: type[T], source: Tensor, layout: torch.Tensor, storage: Storage, chain: Chain
) -> T:
  """A tensor of class `cls` that shows a storage in the layout of another tensor.

  A layout without marks of its own ("conjugate", "negative") has those of `source`.
  """
  if torch.is_inference_mode_enabled() and not source.is_inference():
    # torch counts the versions of a view with those of its base, which must be of
    # one kind: a view of a normal tensor is normal.
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
  """Lets `tensor` show what `source` shows; its shape has been taken care of."""
  tensor._storage, tensor._chain = source._storage, source._chain
  Rebindings.note()


def find_env(args, kwargs):
  """The environment of the first torchax tensor among the arguments."""
  first = args[0] if args else None
  if type(first) in (list, tuple) and first:  # `torch.cat`, `torch._foreach_add_`
    first = first[0]
  if isinstance(first, Tensor):
    return first._env
  for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
    if isinstance(leaf, Tensor):
      return leaf._env
  raise OperatorNotFound("torchax was called without one of its tensors.")


# Upstream defines these here; their home is further up, from where they are set.
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
