"""Code that is not compiled: it raises, or torch reports that it runs eagerly."""

import logging

import pytest
import torch

from torchax.errors import MixedDeviceError


@pytest.fixture
def said(monkeypatch):
  """Return Dynamo's messages about frames that it leaves uncompiled."""
  messages = []
  logger = logging.getLogger("torch._dynamo.convert_frame")
  monkeypatch.setattr(logger, "warning", lambda text, *args: messages.append(text))
  return messages


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_function_beyond_the_recompile_limit_runs_uncompiled(device, said):
  run = torch.compile(lambda x, text: x * len(text), backend="jax")
  x = torch.ones(2).to(device)
  with torch._dynamo.config.patch(recompile_limit=2):
    results = [run(x, "a" * n).tolist() for n in (1, 2, 3, 4)]
  assert results == [[float(n)] * 2 for n in (1, 2, 3, 4)]
  assert any(
    "recompile_limit" in message or "hit config" in message for message in said
  )


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_recompile_limit_raises_with_fullgraph(device):
  run = torch.compile(lambda x, text: x * len(text), backend="jax", fullgraph=True)
  x = torch.ones(2).to(device)
  limit = torch._dynamo.exc.FailOnRecompileLimitHit
  with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(limit):
    for n in (1, 2, 3, 4):
      run(x, "a" * n)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR")
@pytest.mark.parametrize(
  "make",
  [
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.eye(3).to_sparse_csr(),
  ],
  ids=["quantised", "sparse", "sparse rows"],
)
def test_untraceable_code_raises_with_fullgraph(make):
  """torch raises before it calls the backend."""
  with pytest.raises(RuntimeError, match="quantized|sparse Tensors"):
    torch.compile(lambda x: x * 2, backend="jax", fullgraph=True)(make())


def test_a_tensor_of_another_device_is_refused():
  with pytest.raises(MixedDeviceError, match=r"one on meta\. Call"):
    torch.compile(lambda x: x * 2, backend="jax")(torch.ones(3, device="meta"))
