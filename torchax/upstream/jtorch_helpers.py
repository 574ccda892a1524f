"""Torch functions by the names that upstream's lowerings of them have.

Torch itself does the same, by way of its operations, so these are torch's functions:
of arrays, which give arrays, and of tensors. What makes tensors of numbers makes
arrays on jax.
"""

from collections.abc import Callable

import torch

from torchax.environment import env_on
from torchax.upstream.aliases import of_tensors

F = torch.nn.functional


def _allclose(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
  """The answer as a 0-d tensor, which a trace can hold."""
  return torch.isclose(input, other, rtol, atol, equal_nan).all()


def _argsort(input, dim=-1, descending=False, stable=False):
  return torch.argsort(input, dim=dim, descending=descending, stable=stable)


def _arange(start, end=None, step=None, out=None, dtype=None, *_, device, **__):
  if end is None:
    start, end = 0, start
  return torch.arange(start, end, step or 1, dtype=dtype, device=device)


def _eye(n, m=None, *, dtype=None, device, **_):
  return torch.eye(n, n if m is None else m, dtype=dtype, device=device)


def _sparse_mm(mat1, mat2, reduce="sum"):
  """The product of two matrices, which are dense on jax."""
  if reduce != "sum":
    raise ValueError(f'reduce should be "sum", but got {reduce!r}.')
  return torch.mm(mat1, mat2)


def _lu(A, pivot=True, get_infos=False):
  """Both factors in one matrix, and pivots; with `get_infos`, infos too."""
  factors = tuple(torch.linalg.lu_factor_ex(A, pivot=pivot, check_errors=not get_infos))
  return factors if get_infos else factors[:2]


def _lu_solve(b, LU_data, LU_pivots):
  return torch.linalg.lu_solve(LU_data, LU_pivots, b)


_OF_TENSORS: dict[str, Callable] = {
  "_aten_allclose": _allclose,
  "_aten_isclose": torch.isclose,
  "_cdist": torch.cdist,
  "_diag": torch.diag,
  "_einsum": torch.einsum,
  "_functional_max_pool2d": F.max_pool2d,
  "_pad_sequence": torch.nn.utils.rnn.pad_sequence,
  "_sparse_mm": _sparse_mm,
  "_torch_angle": torch.angle,
  "_torch_argsort": _argsort,
  "functional_interpolate": F.interpolate,
  "getitem": torch.Tensor.__getitem__,
  "linalg_det": torch.linalg.det,
  "linalg_slogdet": torch.linalg.slogdet,
  "linalg_solve": torch.linalg.solve,
  "linalg_solve_ex": torch.linalg.solve_ex,
  "linalg_svd": torch.linalg.svd,
  "linalg_tensorsolve": torch.linalg.tensorsolve,
  "logdet": torch.logdet,
  "lu": _lu,
  "lu_solve": _lu_solve,
  "matrix_power": torch.linalg.matrix_power,
  "pad": F.pad,
  "svd": torch.svd,
  "tensor_split": torch.tensor_split,
  "torch_Tensor_repeat_interleave": torch.repeat_interleave,
}

_MAKES: dict[str, Callable] = {
  "_eye": _eye,
  "_full": torch.full,
  "_ones": torch.ones,
  "_tensor": torch.tensor,
  "_zeros": torch.zeros,
  "arange": _arange,
  "empty": torch.empty,
  "empty_strided": torch.empty_strided,
  "rand": torch.rand,
  "randint": torch.randint,
  "randn": torch.randn,
}


def _as_tensor(data, dtype=None, device=None, env=None):
  """A tensor on jax of numbers, a tensor or an array."""
  env = env or env_on()
  with env:
    return torch.as_tensor(env.j2t_iso(data), dtype=dtype, device=device or "jax")


FACES = (
  {name: of_tensors(function) for name, function in _OF_TENSORS.items()}
  | {name: of_tensors(function, makes=True) for name, function in _MAKES.items()}
  | {"_as_tensor": _as_tensor}
)
