"""`torch_call`: functions of CPU tensors inside compiled functions, by callbacks.

XLA calls Python with the values (`jax.pure_callback`), and torch computes on the CPU.
The derivative is such a function too: it repeats the forward pass and runs autograd.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchax.compat.user_code import name_of
from torchax.core import mappings
from torchax.core.partitions import Partition
from torchax.environment import default_env
from torchax.errors import ConversionError, MutationError, RngError
from torchax.interop.views import TorchFunction, torch_view
from torchax.tensor import Tensor
from torchax.types import TorchCallable


def torch_call(f: TorchCallable, example: Any) -> TorchFunction:
  """Make a function of CPU tensors callable with tensors on jax, compiled or not.

  Each call copies the arguments to the CPU and the results back. XLA may leave out a
  call whose result is unused, and repeat a call, so `f` must be pure. In the backward
  pass `f` runs again, and autograd gives the gradients of its arguments, of any order.
  `jax_vmap` calls `f` for each row.

  Args:
    f: function or module of CPU tensors and constants. It must not compute on jax.
      Integers are int32 unless x64 mode is on.
    example: tree of tensors with the shapes and dtypes of the results, on any device
      ("meta" needs no memory). If shapes depend on arguments: a function of meta
      tensors that returns this tree, such as `f` itself if it has no native code.

  Returns:
    A function of the arguments of `f`, with tensors on jax. `jax_view` of it is a
    function of arrays, for `jax.jit`.

  Raises:
    TypeError: `f` is not callable, or `example` contains other values than tensors.
    JaxRuntimeError: in a call. The message has the error of `f`; or ConversionError
      for results unlike `example` and for captured tensors that require gradients,
      RngError if `f` draws, MutationError if it changes an argument.

  >>> def native_sinc(x):
  ...   return torch.from_numpy(np.sinc(x.numpy()))
  >>> sinc = torch_call(native_sinc, torch.empty(2, device="meta"))
  >>> double = torchax.interop.jax_jit(lambda x: 2 * sinc(x))
  >>> double(torch.tensor([0.0, 0.5], device="jax"))
  tensor([2.0000, 1.2732], device='jax:0')
  >>> cube = torch_call(lambda x: x**3, torch.empty((), device="meta"))
  >>> float(jax.jit(jax.grad(torchax.interop.jax_view(cube)))(2.0))
  12.0
  """
  if not callable(f):
    raise TypeError(
      f"torch_call expects a function of tensors, but got {type(f).__name__}."
    )
  is_function = callable(example) and not isinstance(example, torch.Tensor)
  if not is_function:
    example = _form_of(example)

  def on_arrays(*args, **kwargs):
    arguments = Partition((args, kwargs), lambda leaf: isinstance(leaf, jax.Array))

    def of_tensors(tensors):
      args, kwargs = arguments.unflatten(tensors)
      return f(*args, **kwargs)

    form = example
    if is_function:
      args, kwargs = arguments.unflatten(_like(arguments.dynamic))
      with default_env().disabled(), torch.no_grad():
        form = _form_of(example(*args, **kwargs))
    native = _Native(of_tensors, name_of(f), form)
    return form.unflatten(native(*arguments.dynamic))

  on_arrays.__name__ = name_of(f)
  return torch_view(on_arrays)


def _form_of(example) -> Partition:
  """Return the structure of the results, with an example of each.

  Raises:
    TypeError: a leaf is no tensor.
  """
  form = Partition(example)
  if not all(form.is_dynamic):
    kind = next(type(leaf) for leaf in form.leaves if leaf is not None)
    raise TypeError(
      "torch_call expects an example of the results, a tree of tensors, but it has a "
      f'{kind.__name__}. Pass `torch.empty(shape, dtype=dtype, device="meta")`.'
    )
  form.dynamic = [
    torch.empty(x.shape, dtype=x.dtype, device="meta") for x in form.dynamic
  ]
  return form


def _like(arrays: Iterable[jax.Array]) -> list[torch.Tensor]:
  return [
    torch.empty(x.shape, dtype=mappings.j2t_dtype(x.dtype), device="meta")
    for x in arrays
  ]


@dataclasses.dataclass(frozen=True)
class _Native:
  """JAX function that runs a function of CPU tensors.

  Attributes:
    function: list of tensors -> tree of tensors.
    name: name of the user's function.
    form: structure of the results, with example tensors.
  """

  function: Callable
  name: str
  form: Partition

  def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    plain, recorded = (
      jax.custom_vjp(functools.partial(self._callback, records))
      for records in (False, True)
    )
    for call in (plain, recorded):  # `recorded` too, for second derivatives
      call.defvjp(lambda *arrays: (recorded(*arrays), arrays), self._backward)
    return plain(*map(jnp.asarray, arrays))

  def _callback(self, records: bool, *arrays) -> tuple[jax.Array, ...]:
    shapes = tuple(
      jax.ShapeDtypeStruct(x.shape, mappings.t2j_dtype(x.dtype))
      for x in self.form.dynamic
    )

    def on_host(*arrays):
      tensors = [mappings.torch_of(np.asarray(array)) for array in arrays]
      return tuple(map(mappings.values_for_jax, self._run(records, tensors)))

    return jax.pure_callback(on_host, shapes, *arrays, vmap_method="sequential")

  def _backward(self, arrays, cotangents):
    inputs = tuple(
      n for n, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)
    )
    gradients: list = [None] * len(arrays)
    outputs = tuple(n for n, x in enumerate(cotangents) if x.dtype != jax.dtypes.float0)
    gradient = _Native(
      _Gradient(self.function, inputs, outputs),
      f"the gradient of {self.name}",
      Partition(_like(arrays[n] for n in inputs)),
    )
    # torch's gradients of complex numbers are the conjugates of JAX's.
    found = gradient(*arrays, *[jnp.conj(cotangents[n]) for n in outputs])
    for n, value in zip(inputs, found):
      gradients[n] = jnp.conj(value)
    return tuple(gradients)

  # On the host ------------------------------------------------------------------------

  def _run(self, records: bool, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results; raise if the function is not pure, or unlike the example."""
    with (
      default_env().disabled(),
      torch.inference_mode(False),
      torch.set_grad_enabled(records),
    ):
      state = torch.get_rng_state()
      results = Partition(self.function(tensors))
      if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        raise RngError(
          f"torch_call expects a pure function, but {self.name} draws from torch's "
          "generator of the CPU, so a repeated call would have other numbers. Draw "
          "before the call, and pass the numbers."
        )
    for number, tensor in enumerate(tensors):
      if tensor._version:
        raise MutationError(
          f"torch_call expects a pure function, but {self.name} changes its tensor "
          f"argument {number} in place, which would be lost. Change a copy "
          "(`.clone()`), and return it."
        )
    if any(tensor.requires_grad for tensor in results.dynamic):
      raise ConversionError(
        f"torch_call gives gradients of arguments only, but {self.name} captures "
        "tensors that require gradients. Pass them as arguments; or, if they are "
        "constants, call `.requires_grad_(False)`."
      )
    expected, found = _describe(self.form), _describe(results)
    if expected != found:
      raise ConversionError(
        f"torch_call expects results like the example, {expected}, but {self.name} "
        f"returned {found}. Pass an example with these shapes and dtypes."
      )
    return results.dynamic


@dataclasses.dataclass(frozen=True)
class _Gradient:
  """Gradient of a function of CPU tensors, itself such a function.

  It takes the arguments of the function, then the gradients of its results.

  Attributes:
    function: list of tensors -> tree of tensors.
    inputs: positions of the arguments that have gradients.
    outputs: positions of the results whose gradients are given.
  """

  function: Callable
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]

  def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    count = len(tensors) - len(self.outputs)
    arguments, cotangents = tensors[:count], tensors[count:]
    is_recorded = any(tensor.requires_grad for tensor in tensors)
    for n in self.inputs:
      if not arguments[n].requires_grad:
        arguments[n] = arguments[n].detach().requires_grad_()
    with torch.enable_grad():
      results = Partition(self.function(arguments)).dynamic
    pairs = [
      (results[n], cotangent)
      for n, cotangent in zip(self.outputs, cotangents)
      if results[n].requires_grad
    ]
    leaves = [arguments[n] for n in self.inputs]
    if not pairs:
      return list(map(torch.zeros_like, leaves))
    outputs, cotangents = zip(*pairs)
    return list(
      torch.autograd.grad(
        outputs, leaves, cotangents, create_graph=is_recorded, materialize_grads=True
      )
    )


def _describe(form: Partition) -> str:
  """Return the tree with a text for each leaf; 64-bit dtypes as JAX stores them."""
  texts = [
    f"{mappings.j2t_dtype(mappings.t2j_dtype(x.dtype))} of shape {list(x.shape)}"
    + (" on jax" if isinstance(x, Tensor) else "")
    for x in form.dynamic
  ]
  return str(form.unflatten(texts))
