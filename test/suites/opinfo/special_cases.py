"""Operators whose results cannot be compared number by number."""

import functools

import torch
from torch.utils import _pytree as pytree

# Random numbers: shapes and dtypes are compared here, distributions in test/rng.
RANDOM = frozenset(
  {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),
    *("normal", "normal.in_place", "normal.number_mean", "uniform"),
    *("rand_like", "randint", "randint_like", "randn", "randn_like"),
    *(f"nn.functional.{name}" for name in ("alpha_dropout", "dropout", "dropout2d")),
    *("nn.functional.dropout3d", "nn.functional.feature_alpha_dropout.with_train"),
    *(f"nn.functional.fractional_max_pool{rank}d" for rank in (2, 3)),
    *("nn.functional.rrelu", "pca_lowrank", "svd_lowrank"),
  }
)
# Uninitialized memory.
UNDEFINED = frozenset(
  {
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
  }
)


def without_numbers(tree):
  """Return the tree with zeros in its tensors."""
  return pytree.tree_map_only(torch.Tensor, torch.zeros_like, tree)


def is_drawn(name: str, sample) -> bool:
  """Return True if a result holds random numbers."""
  if name in RANDOM:
    return True
  if name == "nn.functional.multi_head_attention_forward":
    return sample.args[9] > 0 and sample.kwargs.get("training", True)
  if name == "nn.functional.scaled_dot_product_attention":
    return sample.kwargs.get("dropout_p", 0.0) > 0
  return False


def comparable(name: str, result, sample):
  """Return the unique part of a result."""
  if name in UNDEFINED or is_drawn(name, sample):
    return without_numbers(result)
  return UNIQUE[name](result, sample) if name in UNIQUE else result


def _product(factors):
  def multiply(result, sample):
    return factors(*result)

  return multiply


def _values_alone(result, sample, place=1):
  """Indices of equal elements are arbitrary: the elements themselves are compared.

  `place` is the position of `dim` among the arguments after the input.
  """
  values, indices = result
  if not values.dim() or not sample.input.dim():
    return values
  numbers = [arg for arg in sample.args if not isinstance(arg, bool)]
  dim = numbers[place] if len(numbers) > place else sample.kwargs.get("dim", -1)
  is_kept = sample.kwargs.get("keepdim", values.dim() == sample.input.dim())
  places = indices if is_kept else indices.unsqueeze(dim)
  return values, sample.input.to(values.device).gather(dim, places.long())


def _projections(vectors):
  """Return projections: eigenvectors are unique only up to a factor of length one."""
  return vectors.unsqueeze(-2) * vectors.conj().unsqueeze(-3)


def _svd(result, sample):
  """Return the singular values, and the product of the factors if there are any."""
  if isinstance(result, torch.Tensor):
    return result
  left, values, right = result
  rank = values.shape[-1]
  if left.shape[-1] < rank or not left.numel():
    return values
  return values, (left[..., :rank] * values.unsqueeze(-2)) @ right[..., :rank, :]


def _svd_of_torch(result, sample):
  """`torch.svd` returns right vectors as columns, or zeros if they are not computed."""
  left, values, right = result
  return _svd((left, values, right.mH), sample)


def _exponential(result, sample):
  """A complex logarithm is unique up to whole turns of its imaginary part."""
  return (
    (result.real, result.imag.cos(), result.imag.sin())
    if result.is_complex()
    else result
  )


def _ordered(result, sample):
  """Return the elements in the order of `argsort`; equal ones may be exchanged."""
  dim = sample.args[0] if sample.args else sample.kwargs.get("dim", -1)
  source = sample.input.to(result.device)
  return source.gather(dim, result.long()) if source.dim() else result


UNIQUE = {
  "argsort": _ordered,
  "mode": functools.partial(_values_alone, place=0),
  "svd": _svd_of_torch,
  "linalg.svd": _svd,
  "sort": functools.partial(_values_alone, place=0),
  "logcumsumexp": _exponential,
  "topk": _values_alone,
  "kthvalue": _values_alone,
  "linalg.eig": _product(lambda values, vectors: (values, _projections(vectors))),
  "linalg.eigh": _product(lambda values, vectors: (values, _projections(vectors))),
}
