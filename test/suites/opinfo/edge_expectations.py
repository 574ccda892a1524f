"""Differences from CPU torch's gradients at edge points, one a row, with the reason.

Rows of `expectations.py` for the same checks hold here as well.
"""

import dataclasses

import torch
from opinfo import expectations

CHECKS = ("gradient", "jax_gradient")


@dataclasses.dataclass(frozen=True)
class EdgeDifference(expectations.Difference):
  """Row for edge points.

  Attributes:
    points: names of points in `edge_points.py`; all if empty.
    by_processor: the kernels of the processor decide whether there is a difference.
  """

  points: tuple[str, ...] = ()
  by_processor: bool = False


INFINITE = (
  *("an infinity", "a negative infinity", "negative infinities"),
  "infinities beside the input",
)
BY_JAX = ("jax_gradient",)

DIFFERENCES: tuple[EdgeDifference, ...] = (
  EdgeDifference(
    ("linalg.cond", "linalg.eig", "linalg.eigvals", "linalg.eigvalsh"),
    CHECKS,
    "equal eigenvalues have no derivative: which vectors LAPACK returns for them, and "
    "whether their matrix is singular, goes by the processor",
    (AssertionError, torch.linalg.LinAlgError),
    points=("ties",),
    by_processor=True,
  ),
  EdgeDifference(
    ("kthvalue", "topk", "sort", "msort"),
    CHECKS,
    "among equal elements any may have the gradient; torch's choice goes by the size",
    message="not close",
    points=(
      *("zeros", "a zero input", "ties", "rounded", "bounds", "negative infinities"),
    ),
  ),
  EdgeDifference(
    (
      *("nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.grid_sample"),
      *("nn.functional.conv_transpose?d", "grid_sampler_?d", "nn.functional.ctc_loss"),
    ),
    CHECKS,
    "which of the terms are 0 times infinity, so NaN, goes by the algorithm of a sum",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("prod",),
    CHECKS,
    "torch divides the product by the element on the CPU: infinity by infinity; ours "
    "multiplies the others",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("cumprod", "masked.cumprod", "linalg.vander"),
    BY_JAX,
    "JAX's product of the others has no 0 times infinity; torch's formula is a loop "
    "over the elements",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("logcumsumexp",),
    BY_JAX,
    "torch's formula takes logarithms of 0, so that its transpose, forward mode, would "
    "be NaN everywhere; JAX's derivative is NaN beside infinities alone",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    (
      *("nn.functional.batch_norm", "native_batch_norm", "_native_batch_norm_legit"),
      *("_batch_norm_with_update", "nn.functional.instance_norm"),
    ),
    CHECKS,
    "with an infinite weight or variance: NaN by the one kernel, 0 by the other",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("nn.functional.scaled_dot_product_attention",),
    CHECKS,
    "an infinite query or key: the blocks of torch's CPU kernel are NaN in other rows",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("nn.functional.soft_margin_loss",),
    CHECKS,
    "torch's exponential overflows, and infinity by infinity is NaN; ours is the limit",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("_softmax_backward_data",),
    CHECKS,
    "of a softmax that is infinite, which none is",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    (
      *("lu_solve", "linalg.lstsq*", "linalg.pinv", "linalg.pinv.hermitian"),
      *("pinverse", "norm.nuc", "linalg.svdvals", "masked.normalize"),
    ),
    CHECKS,
    "of a matrix with infinities all is NaN; LAPACK leaves numbers in some places",
    message="not close",
    points=INFINITE,
  ),
  EdgeDifference(
    ("qr", "linalg.qr", "linalg.eigh", "pinverse"),
    CHECKS,
    "the derivative does not exist for a singular matrix or equal eigenvalues: what "
    "rounding leaves of it",
    message="not close",
    points=("ties", "rounded", "bounds"),
  ),
  EdgeDifference(
    ("ormqr",),
    CHECKS,
    "reflectors of length 20: both are off by up to 0.03 of numbers around 1e5",
    message="not close",
    points=("bounds",),
  ),
  EdgeDifference(
    ("linalg.cholesky_ex",),
    CHECKS,
    "of a matrix that is not positive definite XLA's factor is NaN, torch's a part",
    message="not close",
    points=("ties", "bounds", "a negative infinity"),
  ),
  EdgeDifference(
    ("digamma",),
    CHECKS,
    "at a pole: torch's number is what rounding leaves of sin(pi x)",
    message="not close",
    points=("rounded", "bounds", *INFINITE),
  ),
  EdgeDifference(
    ("as_strided", "as_strided.partial_views", "as_strided_copy"),
    CHECKS,
    "the sizes reach beyond a tensor without elements; torch leaves its storage alone",
    RuntimeError,
    points=("empty",),
  ),
  EdgeDifference(
    ("nn.functional.linear_cross_entropy.chunked",),
    CHECKS,
    "torch takes the chunked path for int64 labels alone, without x64 the other one: "
    "the mean over no labels is NaN in one and 0 in the other",
    message="not close",
    points=("ignored labels",),
  ),
)


def expected(operator: str, check: str, point: str, problem: Exception):
  """Return the row for a failure, or None."""
  general = expectations.expected(operator, check, torch.float32)
  rows = [row for row in DIFFERENCES if row.covers(operator, check, torch.float32)]
  rows = [row for row in rows if not row.points or point in row.points]
  rows = [row for row in (general, *rows) if row is not None and row.matches(problem)]
  assert len(rows) <= 1, f"{operator} {check} {point} has {len(rows)} rows"
  return rows[0] if rows else None
