"""Views of torch values as JAX values, and of JAX values as torch values.

`jax_view` and `torch_view` convert trees of tensors, dtypes and functions without a
copy. Any JAX transformation accepts the view of a torch function; its random draws need
`rng=` there (`docs/rng.md`).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax import rng
from torchax.compat import jax_compat
from torchax.compat.user_code import name_of
from torchax.core import grad_mode, mappings
from torchax.core.boundary import Boundary
from torchax.core.partitions import Partition, is_tensor
from torchax.core.tracebacks import hide_library_frames
from torchax.dispatch import autograd
from torchax.environment import env_on
from torchax.errors import MixedDeviceError, MutationError
from torchax.interop.jit_options import signature_of
from torchax.tensor import Tensor, new_tensor
from torchax.tracing.conversions import adopt
from torchax.types import JaxCallable, JaxValue, R, TorchCallable, TorchValue

K = TypeVar("K")


def _jax_view(t: TorchValue) -> JaxValue:
  if isinstance(t, Tensor):
    return t.jax()
  if isinstance(t, torch.Tensor):
    raise MixedDeviceError(
      f"jax_view expects jax tensors, but got a tensor of shape {list(t.shape)} on "
      f'{t.device}. Call `.to("jax")` first.'
    )
  if isinstance(t, torch.dtype):
    return mappings.t2j_dtype(t)
  if adopt(t):
    return jax_view(t)
  if callable(t) and not isinstance(t, type):
    return JaxFunction(t)
  return t


def _torch_view(t: JaxValue) -> TorchValue:
  if isinstance(t, jax.Array):
    return t if rng.is_typed_key(t) else new_tensor(t, env_on())
  if isinstance(t, np.dtype):
    return mappings.j2t_dtype(t)
  if isinstance(t, type) and issubclass(t, np.generic):
    return mappings.j2t_dtype(jnp.dtype(t))
  if callable(t) and not isinstance(t, type | torch.Tensor):
    return TorchFunction(t)
  return t


@overload
def jax_view(t: torch.Tensor) -> jax.Array: ...


@overload
def jax_view(t: torch.dtype) -> np.dtype: ...


@overload
def jax_view(t: dict[K, torch.Tensor]) -> dict[K, jax.Array]: ...


@overload
def jax_view(t: list[torch.Tensor]) -> list[jax.Array]: ...


@overload
def jax_view(t: tuple[torch.Tensor, ...]) -> tuple[jax.Array, ...]: ...


@overload
def jax_view(t: Callable[..., torch.Tensor]) -> "JaxFunction[jax.Array]": ...


@overload
def jax_view(t: Callable[..., Any]) -> "JaxFunction[Any]": ...


@overload
def jax_view(t: Any) -> Any: ...


@hide_library_frames
def jax_view(t):
  """Convert tensors, torch dtypes and torch functions in a tree to JAX's.

  A converted function takes arrays and an extra keyword argument `rng=`: an `RngState`,
  a typed key or a seed to draw from. Without it the function draws from `env.rng`;
  inside a raw JAX transformation that raises TracedDrawError.

  Args:
    t: tensor on jax, torch dtype, torch function or module, or a tree of these. Other
      values stay as they are.

  Returns:
    The same tree with arrays, numpy dtypes and functions of arrays.

  Raises:
    MixedDeviceError: a tensor is not on jax.

  >>> f = jax_view(torch.nn.functional.relu)
  >>> jax.jit(f)(jnp.array([-1.0, 2.0]))
  Array([0., 2.], dtype=float32)
  """
  return jax.tree.map(_jax_view, t, is_leaf=is_tensor)


@overload
def torch_view(t: jax.Array) -> Tensor: ...


@overload
def torch_view(t: np.dtype) -> torch.dtype: ...


@overload
def torch_view(t: dict[K, jax.Array]) -> dict[K, torch.Tensor]: ...


@overload
def torch_view(t: list[jax.Array]) -> list[torch.Tensor]: ...


@overload
def torch_view(t: tuple[jax.Array, ...]) -> tuple[torch.Tensor, ...]: ...


@overload
def torch_view(t: Callable[..., jax.Array]) -> "TorchFunction[Tensor]": ...


@overload
def torch_view(t: Callable[..., Any]) -> "TorchFunction[Any]": ...


@overload
def torch_view(t: Any) -> Any: ...


def torch_view(t):
  """Convert arrays, JAX dtypes and JAX functions in a tree to torch's.

  Args:
    t: array, dtype, function of arrays, or a tree of these. Other values and typed
      random keys stay as they are.

  Returns:
    The same tree with tensors, torch dtypes and functions of tensors.

  >>> torch_view([jnp.ones(2), jnp.dtype("bfloat16")])
  [tensor([1., 1.], device='jax:0'), torch.bfloat16]
  """
  return jax.tree.map(_torch_view, t, is_leaf=is_tensor)


def jax_view_elem(v: TorchValue) -> JaxValue:
  """Convert one value, not a tree, as `jax_view` does.

  Args:
    v: tensor, dtype, function or other value.

  Returns:
    The JAX value.

  >>> jax_view_elem(torch.ones(2, device="jax"))
  Array([1., 1.], dtype=float32)
  """
  return _jax_view(v)


def torch_view_elem(v: JaxValue) -> TorchValue:
  """Convert one value, not a tree, as `torch_view` does.

  Args:
    v: array, dtype, function or other value.

  Returns:
    The torch value.

  >>> torch_view_elem(jnp.ones(2))
  tensor([1., 1.], device='jax:0')
  """
  return _torch_view(v)


def _view_arguments(tree: Any) -> Any:
  """Convert a tree as `torch_view` does, and its numpy arrays as `jax.jit` does."""

  def view(t):
    return _torch_view(jnp.asarray(t) if isinstance(t, np.ndarray) else t)

  return jax.tree.map(view, tree, is_leaf=is_tensor)


@overload
def call_torch(
  torch_func: Callable[..., torch.Tensor], *args: Any, **kwargs: Any
) -> jax.Array: ...


@overload
def call_torch(torch_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


@hide_library_frames
def call_torch(torch_func, *args, **kwargs):
  """Call a torch function with JAX values; return JAX values.

  Args:
    torch_func: function or module of tensors on jax.
    *args, **kwargs: its arguments, trees of arrays of JAX or numpy.

  Returns:
    The result, with arrays for tensors.

  Raises:
    MutationError: the call is inside a JAX transformation, and the function changed a
      tensor that is not an argument.

  >>> call_torch(torch.nn.functional.relu, jnp.array([-1.0, 2.0]))
  Array([0., 2.], dtype=float32)
  """
  with env_on():
    if jax_compat.is_top_level():
      return jax_view(torch_func(*_view_arguments(args), **_view_arguments(kwargs)))
    # Under a JAX transformation only a `torch.no_grad` inside the function applies, as
    # with `torch.func.grad`; the caller's is ignored.
    name = name_of(torch_func)
    boundary = Boundary(name=name, is_trace=False)
    with boundary.enter(), grad_mode.fresh_grad_mode():
      out = jax_view(torch_func(*_view_arguments(args), **_view_arguments(kwargs)))
  require_no_writes(boundary, name)
  return out


def require_no_writes(boundary: Boundary, name: str) -> None:
  """Raise MutationError if the function changed outer tensors."""
  written = boundary.changed_shadows()
  if written:
    raise MutationError(
      f"{name} changes {len(written)} tensor(s) that are not among its arguments (the "
      "first has shape "
      f"{list(written[0].storage.array.shape)}) inside a raw JAX transformation, which "
      "would lose the change. Use the wrapper in torchax.interop (`jax_jit`, …), or "
      "pass the tensors as arguments and return them."
    )


class JaxFunction(Generic[R]):
  """JAX function of a torch function, with its name, docstring and signature."""

  __wrapped__: Callable[..., Any]

  def __init__(self, function: TorchCallable):
    self.__name__ = type(function).__name__  # for callables without a name: modules
    functools.update_wrapper(self, function, updated=())

  @hide_library_frames
  def __call__(self, *args: Any, rng: Any = None, **kwargs: Any) -> R:
    function: Callable[..., Any] = self.__wrapped__
    if rng is None:
      return call_torch(function, *args, **kwargs)
    with env_on().rng_scope(rng):
      return call_torch(function, *args, **kwargs)

  def __repr__(self):
    return f"jax_view({self.__wrapped__!r})"


class TorchFunction(Generic[R]):
  """Torch function of a JAX function, with its name, docstring and signature."""

  __wrapped__: Callable[..., Any]

  def __init__(self, function: JaxCallable):
    self.__name__ = type(function).__name__  # for callables without a name: `jnp.add`
    functools.update_wrapper(self, function, updated=())

  @hide_library_frames
  def __call__(self, *args: Any, **kwargs: Any) -> R:
    return call_jax(self.__wrapped__, *args, **kwargs)

  def __repr__(self):
    return f"torch_view({self.__wrapped__!r})"


@overload
def call_jax(
  jax_func: Callable[..., jax.Array], *args: Any, **kwargs: Any
) -> Tensor: ...


@overload
def call_jax(jax_func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


@hide_library_frames
def call_jax(jax_func, *args, **kwargs):
  """Call a JAX function with torch values; return torch values.

  Where torch records gradients, JAX differentiates the function, so its results have
  gradients as those of any torch operation. The results of an executable, such as
  `jax.jit(f).lower(…).compile()`, have none.

  Args:
    jax_func: function of arrays, or an executable.
    *args, **kwargs: its arguments, trees of tensors on jax.

  Returns:
    The result, with tensors for arrays.

  Raises:
    MixedDeviceError: a tensor is not on jax.

  >>> x = torch.tensor([3.0, 4.0], device="jax", requires_grad=True)
  >>> call_jax(jnp.linalg.norm, x).backward()
  >>> x.grad
  tensor([0.6000, 0.8000], device='jax:0')
  """
  if torch.is_grad_enabled() and not isinstance(jax_func, jax.stages.Compiled):
    arguments = Partition(
      (args, kwargs), lambda leaf: isinstance(leaf, Tensor) and leaf.requires_grad
    )
    if arguments.dynamic:
      return _call_recorded(jax_func, arguments)
  out = jax_func(*jax_view(args), **jax_view(kwargs))
  return torch_view(grad_mode.stop_gradients(out))


def _is_array(leaf) -> bool:
  return isinstance(leaf, jax.Array) and not rng.is_typed_key(leaf)


def _call_recorded(jax_func: JaxCallable, arguments: Partition):
  partitions: list[Partition] = []

  def on_arrays(*arrays):
    args, kwargs = jax_view(arguments.unflatten(arrays))
    partitions[:] = [Partition(jax_func(*args, **kwargs), _is_array)]
    return partitions[0].dynamic

  # Compiling a JAX function is up to the user.
  function = autograd.ArrayFunction(on_arrays, saves_residuals=True, compiled=False)
  results = autograd.call(function, arguments.dynamic)
  return jax.tree.map(_torch_view, partitions[0].unflatten(results), is_leaf=is_tensor)


@overload
def j2t_autograd(
  fn: Callable[..., jax.Array], call_jax: Callable[..., Any] = call_jax
) -> Callable[..., Tensor]: ...


@overload
def j2t_autograd(
  fn: Callable[..., Any], call_jax: Callable[..., Any] = call_jax
) -> Callable[..., Any]: ...


def j2t_autograd(fn, call_jax=call_jax):
  """Convert a JAX function to a torch function with gradients.

  Args:
    fn: function of arrays.
    call_jax: function `(fn, *args, **kwargs)` that calls `fn` with torch values; by
      default `call_jax` of this module, which also records the gradient.

  Returns:
    A function of tensors with the arguments of `fn`.

  >>> square = j2t_autograd(lambda x: x * x)
  >>> x = torch.ones(2, device="jax", requires_grad=True)
  >>> square(x).sum().backward()
  >>> x.grad
  tensor([2., 2.], device='jax:0')
  """

  @hide_library_frames
  @functools.wraps(fn, updated=())
  def called(*args, **kwargs):
    return call_jax(fn, *args, **kwargs)

  return called


@overload
def functional_rng(
  torch_function: Callable[..., torch.Tensor],
) -> Callable[..., tuple[jax.Array, rng.RngState]]: ...


@overload
def functional_rng(
  torch_function: Callable[..., Any],
) -> Callable[..., tuple[Any, rng.RngState]]: ...


def functional_rng(torch_function):
  """Convert a torch function to a pure JAX function with explicit random state.

  Args:
    torch_function: function or module of tensors.

  Returns:
    A function `(state, *args, **kwargs) -> (out, state)` of an `RngState` (or typed
    key, or seed) and arrays. It returns arrays and the state after the draws. It
    neither reads nor changes `env.rng`.

  >>> dropout = functional_rng(torch.nn.Dropout(0.5))
  >>> out, state = dropout(jax.random.key(0), jnp.ones(3))
  >>> out.shape, state.count
  ((3,), 1)
  """

  @hide_library_frames
  @functools.wraps(torch_function, updated=())
  def pure(state, /, *args, **kwargs):
    with env_on().rng_scope(state) as stream:
      out = call_torch(torch_function, *args, **kwargs)
      return out, stream.state

  signature = signature_of(torch_function)
  if signature is not None:  # JAX finds arguments by number and name in the signature
    name = "state" if "state" not in signature.parameters else "rng_state"
    state = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    parameters = [state, *signature.parameters.values()]
    empty = inspect.Signature.empty
    pure.__signature__ = signature.replace(
      parameters=parameters, return_annotation=empty
    )
  return pure
