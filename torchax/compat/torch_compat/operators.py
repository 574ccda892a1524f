"""Operators of torch: classes, builtin functions and decompositions."""

import functools
import types
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from torchax.compat import private

if TYPE_CHECKING:
  from torch.library import OpOverload
else:
  OpOverload = type(torch.ops.aten.add.Tensor)
OpOverloadPacket: type = type(torch.ops.aten.add)
# Class of operators such as `torch.cond`, which take functions as arguments.
HigherOrderOperator = private.find(
  "torch._ops.HigherOrderOperator",
  "graphs with branches and loops",
  instead=private.NoInstances,
)

# Builtin functions, as `__torch_function__` receives them.
linear = F.linear
scaled_dot_product_attention = F.scaled_dot_product_attention
one_hot = F.one_hot


def undispatched_attention(*args, **kwargs):
  """Call `F.multi_head_attention_forward` without `__torch_function__` dispatch.

  Its handler calls this, and would otherwise recurse. The functions that it calls are
  dispatched as usual.
  """
  function = F.multi_head_attention_forward
  scope = {**function.__globals__, "has_torch_function": lambda tensors: False}
  undispatched = types.FunctionType(
    function.__code__, scope, function.__name__, function.__defaults__
  )
  undispatched.__kwdefaults__ = function.__kwdefaults__
  return undispatched(*args, **kwargs)


lstm, gru, rnn_tanh, rnn_relu = torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu

_DECOMPOSITIONS = "torch's decompositions of operations without a lowering"
# torch's own decompositions, by overload.
decomposition_table: dict = private.find(
  "torch._decomp.decomposition_table", _DECOMPOSITIONS, instead={}
)
_all_names = private.find(
  "torch._C._dispatch_get_all_op_names", "the table of all in-place operations"
)


def aten_packets() -> list:
  """Return the overload packets of all ATen operations, sorted by name."""
  names = _all_names()
  packets = {name[6:].partition(".")[0] for name in names if name.startswith("aten::")}
  # Some are not attributes of `torch.ops.aten`.
  return [
    getattr(torch.ops.aten, n) for n in sorted(packets) if hasattr(torch.ops.aten, n)
  ]


_composite_key = private.find(
  "torch._C.DispatchKey.CompositeImplicitAutograd", _DECOMPOSITIONS
)
_explicit_key = private.find(
  "torch._C.DispatchKey.CompositeExplicitAutograd", _DECOMPOSITIONS
)
_has_kernel = private.find(
  "torch._C._dispatch_has_kernel", _DECOMPOSITIONS, instead=lambda name: True
)
_has_kernel_for_key = private.find(
  "torch._C._dispatch_has_kernel_for_dispatch_key", _DECOMPOSITIONS
)
# Attribute of every overload.
_run_kernel = private.find("torch.ops.aten.add.Tensor._op_dk", _DECOMPOSITIONS)
_can_decompose = private.find(
  "torch._ops.OpOverload._can_decompose", _DECOMPOSITIONS, instead=lambda func: False
)


def _has_kernel_with(func, key: str) -> bool:
  if not isinstance(func, OpOverload):
    return False
  name = func.name()
  # Overloads only for TorchScript have no kernels; the second query needs some.
  return _has_kernel(name) and _has_kernel_for_key(name, key)


def is_composite(func) -> bool:
  """Return True for a CompositeImplicitAutograd overload, such as `reshape`."""
  return _has_kernel_with(func, "CompositeImplicitAutograd")


def is_custom(func) -> bool:
  """Return True for a user's overload for all devices (`torch.library.custom_op`)."""
  if getattr(func, "namespace", "aten") in ("aten", "prims"):
    return False
  return _has_kernel_with(func, "CompositeExplicitAutograd")


def composite_kernel(func):
  """Return the C++ kernel of a composite overload.

  `func.decompose` would prefer a Python decomposition, which may draw or compute
  differently.
  """
  if isinstance(_run_kernel, private.Unavailable):
    return _run_kernel
  return functools.partial(func._op_dk, _composite_key)


def composite_decomposition(func):
  """Return torch's own function that decomposes an overload, or None."""
  if isinstance(func, OpOverload) and func.namespace == "prims":
    # torch's reference implementations call prims.
    return getattr(func, "impl_aten", None)
  if is_composite(func):
    return composite_kernel(func)
  if is_custom(func) and not isinstance(_run_kernel, private.Unavailable):
    return functools.partial(func._op_dk, _explicit_key)
  if isinstance(func, OpOverload) and _can_decompose(func):
    return func.decompose
  return None
