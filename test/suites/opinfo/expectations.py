"""Differences from CPU torch, one a row, with the reason.

`test_op_db.py` fails if an operator differs that is not listed here. `make test-opinfo`
also fails if a row was not needed.
"""

import dataclasses
import fnmatch

import torch

from torchax.errors import TracedStateError, UnsupportedDtypeError

CHECKS = ("forward", "jit", "gradient", "jax_gradient", "in_place", "out", "error")
GRADIENTS = ("gradient", "jax_gradient")


@dataclasses.dataclass(frozen=True)
class Difference:
  """Expected difference.

  Attributes:
    operators: names, with `*` for any characters.
    checks: names of `CHECKS`.
    reason: reason of the difference.
    raises: the error; AssertionError if numbers, shapes or dtypes differ.
    dtypes: dtypes that differ; all if empty.
    message: part of the error's text, or several parts that are alternatives.
    since: a version of torch whose tests have the operators; older ones may lack them.
  """

  operators: tuple[str, ...]
  checks: tuple[str, ...]
  reason: str
  raises: type[Exception] | tuple[type[Exception], ...] = AssertionError
  dtypes: tuple[torch.dtype, ...] = ()
  message: str | tuple[str, ...] = ""
  since: str = ""

  def names(self, operator: str) -> bool:
    return any(fnmatch.fnmatchcase(operator, pattern) for pattern in self.operators)

  def covers(self, operator: str, check: str, dtype: torch.dtype) -> bool:
    is_dtype = not self.dtypes or dtype in self.dtypes
    return check in self.checks and is_dtype and self.names(operator)

  def matches(self, problem: Exception) -> bool:
    """Return True if the problem is the expected one."""
    parts = (self.message,) if isinstance(self.message, str) else self.message
    return isinstance(problem, self.raises) and any(p in str(problem) for p in parts)


ALL = CHECKS[:-1]
ON_VALUES = "the shape of the result depends on data, which is not known in a trace"
ON_NUMBER = "torch's semantics ask for a number, which is not known in a trace"

DIFFERENCES: tuple[Difference, ...] = (
  Difference(
    ("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"),
    ALL,
    "sparse layouts: torchax holds dense tensors and says so",
    UnsupportedDtypeError,
  ),
  Difference(
    ("chalf",),
    ALL,
    "JAX has no complex numbers of half precision",
    UnsupportedDtypeError,
  ),
  Difference(
    ("argwhere", "bincount", "masked_select", "nonzero", "unique*"),
    ("jit", "jax_gradient"),
    ON_VALUES,
    TracedStateError,
    message="unknown inside a JAX transformation",
  ),
  Difference(
    (
      *("item", "allclose", "equal", "narrow", "nn.functional.one_hot"),
      *("repeat_interleave", "tensor_split"),
    ),
    ("jit", "jax_gradient"),
    ON_NUMBER,
    TracedStateError,
  ),
  Difference(
    ("float_power",),
    ("out",),
    "without x64 there are no tensors of 64 bits, which torch insists on for `out=`",
    RuntimeError,
    (torch.float32, torch.bfloat16, torch.complex64, torch.bool),
    "requires dtype",
  ),
  Difference(
    ("kthvalue", "masked_select", "take", "cat"),
    ("error",),
    "arrays are values: `out=` is written after the result is computed, so that it may "
    "share memory with an input",
    message="single memory location",
  ),
  Difference(
    ("amax", "amin", "aminmax", "complex"),
    ("error",),
    "`out=` takes a wider dtype everywhere; these kernels of torch alone do not",
    message="type",
  ),
  Difference(
    ("gather",),
    ("error",),
    "`out=` takes a wider dtype everywhere, and memory of an input: it is written "
    "after the result is computed",
    message=("to have dtype", "single memory location"),
  ),
  Difference(
    ("addbmm",),
    ("in_place",),
    "torch's addbmm_ changes the shape of its input; ours refuses, as other operations",
    RuntimeError,
    message="doesn't match the broadcast shape",
  ),
  Difference(
    ("as_strided.partial_views",),
    ("jit",),
    "an argument of a compiled function is the part of a storage that the tensor shows",
    (AssertionError, RuntimeError),
    message=("Mismatched elements", "setStorage: the sizes"),
  ),
  Difference(
    ("nn.functional.embedding",),
    GRADIENTS,
    "sparse gradients: torchax holds dense tensors and says so",
    UnsupportedDtypeError,
  ),
  Difference(
    ("abs",),
    ("in_place",),
    "torch refuses to write magnitudes into complex numbers",
    dtypes=(torch.complex64,),
    message="not supported for complex",
  ),
  Difference(
    ("nn.functional.embedding_bag",),
    GRADIENTS,
    "sparse gradients: torchax holds dense tensors and says so",
    NotImplementedError,
    message="sparse=False",
  ),
  Difference(
    (
      *("native_group_norm", "native_layer_norm", "native_batch_norm"),
      *("_native_batch_*", "_batch_norm_with_update"),
    ),
    ("forward", "jit", "out"),
    "mean and reciprocal deviation stay float32 for the backward pass, as on CUDA",
    dtypes=(torch.bfloat16,),
    message="float32 instead of torch.bfloat16",
  ),
  Difference(
    ("sort", "msort", "topk", "mode"),
    GRADIENTS,
    "among equal elements either may have the gradient; bfloat16 has many",
    dtypes=(torch.bfloat16,),
    message="not close",
  ),
  Difference(
    ("special.bessel_j?", "special.bessel_y?"),
    ("forward", "jit", "out"),
    "torch's kernels are off by up to 9e-7 in double precision, ours by 7e-15 (mpmath)",
    dtypes=(torch.float64,),
    message="not close",
  ),
  Difference(
    ("special.bessel_j?", "special.bessel_y?"),
    GRADIENTS,
    "torch differentiates them since 2.15, by the same kernels: off by up to 9e-7 in "
    "double precision, ours by 3e-14 (mpmath)",
    dtypes=(torch.float64,),
    message="not close",
  ),
  Difference(
    ("masked.prod", "masked.amax", "masked.amin"),
    GRADIENTS,
    "the gradient at an infinite element: NaN on the CPU, as infinity times False; XLA "
    "makes a choice of such a product, and gives 0",
    message="nan",
  ),
  Difference(
    ("nn.functional.normalize",),
    GRADIENTS,
    "the norm over one element has the gradient 0: both results are what is left of "
    "terms that cancel, torch's up to 0.016 and ours up to 0.063",
    dtypes=(torch.bfloat16,),
    message="not close",
  ),
  Difference(
    ("nn.functional.multi_head_attention_forward",),
    ("forward", *GRADIENTS),
    "logits of some hundred, where one unit in the last place of bfloat16 changes a "
    "softmax by half; with inputs around 1 the errors of both are the same",
    dtypes=(torch.bfloat16,),
    message="not close",
  ),
  Difference(
    ("nn.functional.linear_cross_entropy.chunked*",),
    GRADIENTS,
    "torch takes the chunked path for int64 labels alone, without x64 the other one, "
    "which does not differentiate class weights",
    RuntimeError,
    (torch.float32, torch.bfloat16, torch.complex64),
    "not differentiable",
    since="2.13",
  ),
)


def expected(operator: str, check: str, dtype: torch.dtype) -> Difference | None:
  """Return the row for a check of an operator, or None."""
  rows = [row for row in DIFFERENCES if row.covers(operator, check, dtype)]
  assert len(rows) <= 1, f"{operator} {check} {dtype} has {len(rows)} rows"
  return rows[0] if rows else None
