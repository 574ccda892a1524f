"""`python -m torchax` and `torchax.env_info`: the facts for a bug report."""

import os
import platform
import subprocess
import sys

import jax
import pytest
import torch

import torchax
from torchax.compat import private, versions
from torchax.diagnostics import self_check

pytestmark = pytest.mark.programs


def test_report_has_versions_and_devices_of_this_process():
  info = torchax.env_info()
  assert info.torchax == torchax.VERSION
  assert info.python == platform.python_version()
  assert info.libraries["jax"] == jax.__version__
  # The name of a wheel may lack the part after the "+".
  assert torch.__version__.startswith(info.libraries["torch"])
  assert len(info.devices) == len(jax.devices())
  assert info.devices[0].startswith(jax.default_backend())
  assert info.x64 == jax.config.jax_enable_x64


def test_the_random_state_is_that_of_this_thread():
  torch.manual_seed(3)
  before = torchax.env_info().random_state
  assert torchax.env_info().random_state == before, "asking moves the stream"
  torch.rand(2, device="jax")
  assert torchax.env_info().random_state != before


def test_every_private_piece_is_named_with_whether_it_was_found():
  info = torchax.env_info()
  pieces = private.PIECES.items()
  assert info.private_api == {path: not piece.is_future for path, piece in pieces}
  assert "torch._C._set_conj" in info.private_api
  assert "jax._src.core.trace_ctx" in info.private_api
  assert info.lost == ()


def test_env_info_reports_missing_private_api_but_not_future_api(monkeypatch):
  path = "torch._C._accelerator_emptyHostCache"
  piece = private.Piece(path, "a test", is_found=False)
  monkeypatch.setitem(private.PIECES, path, piece)
  (sentence,) = torchax.env_info().lost
  assert f"has no {path}, which torchax needs for a test; torch 2.11 to" in sentence
  piece.since = "99.1"
  info = torchax.env_info()
  assert info.lost == () and not info.private_api[path]
  assert "torch 99.1 to " in piece.message()


def test_the_text_is_for_a_bug_report():
  text = str(torchax.env_info())
  for word in (torchax.VERSION, jax.__version__, "devices", "random state", "pieces"):
    assert word in text


def test_env_info_names_untested_versions(monkeypatch):
  monkeypatch.setitem(versions.TESTED, "torch", ("2.1", "2.2"))
  info = torchax.env_info()
  assert info.untested == ("torch",)
  assert "Not a tested version: torch" in str(info)


def _run(program: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, *program],
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
    env=dict(os.environ),
  )


def test_the_module_prints_the_report_and_succeeds():
  done = _run(["-m", "torchax"])
  assert done.returncode == 0, done.stdout + done.stderr
  assert f"torchax       {torchax.VERSION}" in done.stdout
  for name in self_check.CHECKS:
    assert f"{name:<14} ok" in done.stdout


FAILING = """
import runpy, sys
from torchax.diagnostics import self_check

def broken():
  raise ValueError("changed")

self_check.CHECKS.clear()
self_check.CHECKS["broken"] = broken
sys.argv = ["torchax"]
runpy.run_module("torchax", run_name="__main__")
"""


def test_the_exit_status_is_1_where_a_check_fails():
  done = _run(["-c", FAILING])
  assert done.returncode == 1, done.stdout + done.stderr
  assert "FAILED" in done.stdout and "ValueError: changed" in done.stdout
