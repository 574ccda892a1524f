"""Checks of the installation: all must pass here."""

import pytest
import torch

from torchax.compat import private
from torchax.diagnostics import report, self_check

pytestmark = pytest.mark.programs


@pytest.mark.parametrize("name", [n for n in self_check.CHECKS if n != "torch.compile"])
def test_a_check_passes_here(name):
  result = self_check.run(name)
  assert not result.failed and result.error is None, str(result)


def test_a_check_leaves_the_random_state():
  torch.manual_seed(5)
  before = report.env_info().random_state
  self_check.run("random numbers")
  assert report.env_info().random_state == before


def test_a_wrong_result_is_a_failure(monkeypatch):
  def broken():
    raise AssertionError("3 is not 2")

  monkeypatch.setitem(self_check.CHECKS, "broken", broken)
  result = self_check.run("broken")
  assert result.failed and str(result).endswith("AssertionError: 3 is not 2")


def test_compile_check_is_unavailable_without_its_private_api(monkeypatch):
  piece = private.PIECES["torch._guards.TracingContext"]
  monkeypatch.setattr(piece, "is_found", False)
  result = self_check.run("torch.compile")
  assert result.is_unavailable and not result.failed
  assert "torch._guards.TracingContext" in str(result)
