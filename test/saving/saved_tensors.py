"""Tensors of all kinds that tests save, copy and compare."""

import io

import pytest
import torch

DTYPES = (
  torch.bool,
  torch.uint8,
  torch.int8,
  torch.int16,
  torch.int32,
  torch.uint16,
  torch.float16,
  torch.bfloat16,
  torch.float32,
  torch.complex64,
  torch.float8_e4m3fn,
  torch.float8_e5m2,
)
BASE = torch.arange(12.0).reshape(3, 4)
COMPLEX = torch.complex(BASE, BASE - 3)

# Saved tensors by name, as functions of the base. Views share its memory.
TENSORS = {
  "whole": lambda base: base,
  "0-d": lambda base: base.sum(),
  "empty": lambda base: base.new_empty((0, 3)),
  "row": lambda base: base[1],
  "strided": lambda base: base[1:, ::2],
  "transposed": lambda base: base.t(),
  "expanded": lambda base: base[:, :1].expand(3, 5),
  "diagonal": lambda base: base.diagonal(),
  "reshaped": lambda base: base.view(2, 6),
}
FORMATS = {"zip": {}, "older": {"_use_new_zipfile_serialization": False}}
each_format = pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)


def stream_of(value, **options) -> io.BytesIO:
  stream = io.BytesIO()
  torch.save(value, stream, **options)
  stream.seek(0)
  return stream


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
  actual, expected = actual.detach().cpu(), expected.detach()
  bits = [t.resolve_conj().contiguous().view(-1) for t in (actual, expected)]
  return (
    actual.dtype == expected.dtype
    and actual.shape == expected.shape
    and torch.equal(*(b.view(torch.uint8) if b.numel() else b for b in bits))
  )


def all_kinds(device: str, dtypes=DTYPES) -> dict[str, torch.Tensor]:
  """Return tensors of all kinds; those on the CPU are the expected ones."""
  base = BASE.to(device, copy=True)
  values = {name: make(base) for name, make in TENSORS.items()}
  values |= {str(dtype): BASE.to(dtype).to(device) for dtype in dtypes}
  values["parameter"] = torch.nn.Parameter(base)
  values["parameter"].note = "kept"
  values["attributes"] = BASE.to(device, copy=True)
  values["attributes"].note = [1, 2]
  values["leaf"] = BASE.to(device, copy=True).requires_grad_()
  values["complex"] = COMPLEX.to(device)
  values["conjugate"] = values["complex"].conj()
  return values
