"""Composites: operations that keep their names in an exported program.

A StableHLO composite is a name with a decomposition. A compiler that knows the name
uses its own kernel; any other compiler runs the decomposition. Users register torch
operations to lower to a composite, in eager mode and in exported programs.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from torchax.interop.views import jax_view
from torchax.registry.operators import Operator, register
from torchax.types import JaxCallable, TorchCallable

# Types of the attributes of a composite.
_ATTRIBUTES = (bool, int, float, str)


def register_jax_composite(
  composite_name: str, impl: JaxCallable, *ops: Any, **jit_args: Any
) -> JaxCallable:
  """Lower operations to a composite whose decomposition is a JAX function.

  Args:
    composite_name: name of the composite in StableHLO, such as `"vendor.softclip"`.
    impl: decomposition with the operation's signature, with arrays for tensors.
      Numbers and strings become attributes of the composite.
    *ops: torch operations (overloads or packets). Their lowerings are replaced.
    **jit_args: keyword arguments of the `jax.jit` that compiles the decomposition.

  Returns:
    The lowering, a function of arrays.

  >>> library = torch.library.Library("example", "DEF")
  >>> library.define("twice(Tensor x) -> Tensor")
  'twice'
  >>> twice = register_jax_composite(
  ...   "example.twice", lambda x: x + x, torch.ops.example.twice
  ... )
  >>> "stablehlo.composite" in jax.jit(twice).lower(jnp.ones(2)).as_text()
  True
  """
  lowering = _jit_composite_impl(composite_name, impl, **jit_args)
  for torch_op in ops:
    register(Operator(torch_op, lowering, is_user_defined=True))
  return lowering


def register_torch_composite(
  composite_name: str, impl: TorchCallable, *ops: Any, **jit_args: Any
) -> JaxCallable:
  """Lower operations to a composite whose decomposition is a torch function.

  Args:
    composite_name: see `register_jax_composite`.
    impl: function or module of tensors with the operation's signature. It must neither
      call the operation itself nor draw random numbers.
    *ops: see `register_jax_composite`.
    **jit_args: see `register_jax_composite`.

  Returns:
    The lowering, a function of arrays.

  >>> library = torch.library.Library("example_torch", "DEF")
  >>> library.define("twice(Tensor x) -> Tensor")
  'twice'
  >>> op = torch.ops.example_torch.twice
  >>> twice = register_torch_composite("example.twice", lambda x: x + x, op)
  >>> op(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """
  is_module = isinstance(impl, torch.nn.Module)
  signature = inspect.signature(impl.forward if is_module else impl)
  decomposition = jax_view(impl)

  def on_arrays(*args, **kwargs):
    return decomposition(*args, **kwargs)

  on_arrays.__signature__ = signature
  return register_jax_composite(composite_name, on_arrays, *ops, **jit_args)


def _jit_composite_impl(
  composite_name: str, jaxpr_impl: JaxCallable, **jit_args: Any
) -> JaxCallable:
  """Wrap a JAX function in a composite of this name.

  Args:
    composite_name: name of the composite in StableHLO.
    jaxpr_impl: decomposition.
    **jit_args: keyword arguments of the `jax.jit` that compiles it. `static_argnums`
      and `static_argnames` are ignored: every argument without arrays is static.

  Returns:
    A function of the same arguments. JAX has no rules for composites, so `jax.vmap` and
    differentiation apply to the decomposition.
  """
  options = {k: v for k, v in jit_args.items() if not k.startswith("static_arg")}
  signature = inspect.signature(jaxpr_impl)

  @functools.wraps(jaxpr_impl)
  def lowering(*args, **kwargs):
    bound = signature.bind(*args, **kwargs)
    named = _arguments_by_name(bound, signature)
    arrays, static = {}, {}
    for name, value in named.items():
      leaves = jax.tree.leaves(value)
      has_arrays = any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
      (arrays if has_arrays else static)[name] = value
    attributes = {k: v for k, v in static.items() if _is_attribute(v)}

    def decomposition(arrays, **_):
      return _call(jaxpr_impl, signature, {**arrays, **static})

    decomposition.__name__ = composite_name
    compiled = jax.jit(decomposition, static_argnames=tuple(attributes), **options)
    return _transformable(
      jax.lax.composite(compiled, composite_name), decomposition, attributes
    )(arrays)

  return lowering


def _arguments_by_name(bound: inspect.BoundArguments, signature) -> dict:
  """Return the arguments by name, with one entry per element of `*args`, `**kwargs`."""
  named = {}
  for name, value in bound.arguments.items():
    kind = signature.parameters[name].kind
    if kind is inspect.Parameter.VAR_POSITIONAL:
      named.update({f"{name}.{index}": part for index, part in enumerate(value)})
    elif kind is inspect.Parameter.VAR_KEYWORD:
      named.update(value)
    else:
      named[name] = value
  return named


def _call(function, signature, named: dict):
  named = dict(named)
  positional = []
  for name, parameter in signature.parameters.items():
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
      keys = [key for key in named if key.startswith(f"{name}.")]
      keys.sort(key=lambda key: int(key.rpartition(".")[2]))
      positional += map(named.pop, keys)
    elif name in named and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
      positional.append(named.pop(name))
  return function(*positional, **named)


def _transformable(composite, decomposition, attributes) -> Callable:
  """Make `jax.vmap` and differentiation of a composite use its decomposition."""

  @jax.custom_batching.custom_vmap
  def call(arrays):
    return composite(arrays, **attributes)

  @call.def_vmap
  def _rows(axis_size, is_batched, arrays):
    axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched[0])
    out = jax.vmap(decomposition, (axes,), axis_size=axis_size)(arrays)
    return out, jax.tree.map(lambda _: True, out)

  call = jax.custom_jvp(call)

  @call.defjvp
  def _derivative(primals, tangents):
    return jax.jvp(decomposition, primals, tangents)

  return call


def _is_attribute(value) -> bool:
  if isinstance(value, tuple):
    return bool(value) and {*map(type, value)} in ({int}, {float})
  return isinstance(value, _ATTRIBUTES)
