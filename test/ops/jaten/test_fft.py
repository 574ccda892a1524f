"""Fourier transforms of real and complex data in torch's three normalizations."""

import pytest
import torch
from ops.harness import Case, check, floats

REAL = floats(2, 3, 4, 5)
COMPLEX = torch.complex(REAL, floats(2, 3, 4, 5, seed=1))

CASES = (
  Case(torch.fft.fft, COMPLEX),
  Case(torch.fft.ifft, COMPLEX, norm="ortho"),
  Case(torch.fft.fft, REAL, dim=1, norm="forward", grad=True),
  Case(torch.fft.rfft, REAL, grad=True),
  Case(torch.fft.rfft, REAL, n=7, dim=0, norm="ortho", grad=True),
  Case(torch.fft.irfft, COMPLEX),
  Case(torch.fft.irfft, COMPLEX, n=5, dim=2, norm="forward"),
  Case(torch.fft.hfft, COMPLEX),
  Case(torch.fft.fft2, COMPLEX),
  Case(torch.fft.rfft2, REAL, dim=(2, 0), grad=True),
  Case(torch.fft.irfftn, COMPLEX, dim=(1, 2, 3)),
  Case(torch.fft.fftn, COMPLEX, norm="ortho", name="fftn-4d"),
  Case(torch.fft.ifftn, COMPLEX, dim=(0, 2)),
  Case(torch.fft.fftshift, REAL, grad=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fft(case):
  check(case)
