"""Public names for authors of lowerings, and in-place and `out=` operations.

The names are defined in `ops/register.py` and `ops/promotion.py`. `InplaceOp` and
`OutVariant` are for programs written for google/torchax; this package derives both
forms from the functional one and torch's schema.
"""

from collections.abc import Callable
from typing import Any

import torch

from torchax.dispatch.out import write_output
from torchax.ops.promotion import (
  convert_dtype,
  default_float,
  foreach_loop,
  maybe_convert_constant_dtype,
  promote,
  promote_int_input,
  result_dtype,
  to_float,
)
from torchax.ops.register import op
from torchax.registry.operators import Kind
from torchax.tensor import Tensor
from torchax.types import P

__all__ = [
  "InplaceOp",
  "Kind",
  "OutVariant",
  "P",
  "convert_dtype",
  "default_float",
  "foreach_loop",
  "maybe_convert_constant_dtype",
  "op",
  "promote",
  "promote_int_input",
  "result_dtype",
  "to_float",
]


class InplaceOp:
  """In-place variant of a functional operation on torchax tensors.

  In-place variants of ATen operations are derived; this is for functions of your own.

  Args:
    functional_op: a function of tensors, or of arrays if `is_jax_func`, that returns
      one result; other arguments are passed on.
    replace: give the tensor the shape and dtype of the result. Otherwise the result
      is copied into the tensor: broadcast, cast, and written through a view.
    position_to_mutate: position of the written tensor among the arguments.
    is_jax_func: see `functional_op`.

  >>> double_ = InplaceOp(lambda x: x * 2)
  >>> x = torch.ones(2, device="jax")
  >>> double_(x) is x, x
  (True, tensor([2., 2.], device='jax:0'))
  """

  def __init__(
    self,
    functional_op: Callable,
    replace: bool = False,
    position_to_mutate: int = 0,
    is_jax_func: bool = False,
  ):
    self.functional = functional_op
    self.replace = replace
    self.position_to_mutate = position_to_mutate
    self.is_jax_func = is_jax_func

  def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run the operation and return the tensor that was written to.

    Args:
      *args, **kwargs: arguments of the operation.

    Raises:
      TypeError: the argument to write to is not a jax tensor.
    """
    target = args[self.position_to_mutate]
    if not isinstance(target, Tensor):
      raise TypeError(
        f"The in-place function expects a jax tensor as argument "
        f"{self.position_to_mutate}, but got {type(target).__name__}. Move a tensor "
        'with `.to("jax")`.'
      )
    env = target._env
    if self.is_jax_func:
      args, kwargs = env.t2j_iso((args, kwargs))
    result = env.j2t_iso(self.functional(*args, **kwargs))
    if self.replace:
      target.data = result
      return target
    return target.copy_(result)


class OutVariant:
  """Form with `out=` of a functional operation on torchax tensors.

  Args:
    functional_op: a function of tensors that returns a tensor, or several.

  >>> double_out = OutVariant(lambda x: x * 2)
  >>> out = torch.empty(2, device="jax")
  >>> double_out(torch.ones(2, device="jax"), out=out)
  tensor([2., 2.], device='jax:0')
  """

  def __init__(self, functional_op: Callable):
    self.functional = functional_op

  def __call__(self, *args, out, **kwargs):
    """Run the operation, write its results to `out` and return `out`.

    Args:
      *args, **kwargs: arguments of the operation.
      out: jax tensor, or tuple of them, one per result.

    Raises:
      RuntimeError: the dtype of an output cannot hold its result.
    """
    results = self.functional(*args, **kwargs)
    name = getattr(self.functional, "__name__", str(self.functional))
    if isinstance(out, torch.Tensor):
      write_output(name, out, out._env.j2t_iso(results))
      return out
    for output, result in zip(out, results, strict=True):
      write_output(name, output, output._env.j2t_iso(result))
    return out
