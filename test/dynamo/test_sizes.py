"""Option `buckets` of the backend: dynamic sizes of a graph share programs."""

import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.core import program_limit
from torchax.errors import BucketError

DEVICES = ("cpu", "jax")


@pytest.fixture(autouse=True)
def env():
  torch._dynamo.reset()
  with torchax.default_env() as environment:
    yield environment


@pytest.fixture
def compiles(monkeypatch):
  """Return a list with the name of each program of a bucket."""
  names = []
  trace = program_limit.Counted.trace

  def traced(self, function, *args, **kwargs):
    if function.__name__ == "padded":
      names.append(self.name)
    return trace(self, function, *args, **kwargs)

  monkeypatch.setattr(program_limit.Counted, "trace", traced)
  return names


def compiled(function, sizes="pow2", **options):
  return torch.compile(
    function, backend="jax", fullgraph=True, options={"buckets": sizes}, **options
  )


def values(*shape):
  return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_sizes_share_programs(device, compiles):
  def f(x, y):
    return torch.cat((x, y), 1).softmax(1) / x.shape[1]

  run = compiled(f, dynamic=True)
  for n, m in ((5, 6), (7, 8), (6, 5), (8, 7), (12, 9)):
    x, y = values(3, n), values(3, m)
    found = run(x.to(device), y.to(device))
    assert found.shape == (3, n + m)
    torch.testing.assert_close(found.cpu(), f(x, y))
  assert len(compiles) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_dynamic_sizes_share_programs(device, compiles):
  torch.manual_seed(0)
  layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
  plain = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
  plain.load_state_dict(layer.state_dict())
  run = compiled(layer.to(device), dynamic=True)
  for n in (5, 7, 6, 8):
    x = values(3, n, 8)
    for model, data in ((run, x.to(device)), (plain, x)):
      model(data).square().mean().backward()
    for ours, theirs in zip(layer.parameters(), plain.parameters()):
      torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
  assert len(compiles) == 2  # forward and backward


def test_draws_of_dynamic_sizes_are_those_of_true_sizes():
  f = lambda x: F.dropout(x, 0.5)  # noqa: E731
  results = []
  for run in (compiled(f, dynamic=True), f):
    torch.manual_seed(0)
    results.append([run(torch.ones(2, n, device="jax")).cpu() for n in (5, 6, 8)])
  assert all(map(torch.equal, *results))


def test_bound_of_mark_dynamic_is_the_largest_bucket():
  table = torch.ones(12, device="jax")
  run = compiled(lambda x: x + table[: x.shape[1]])
  for n in (9, 11, 12):
    x = torch.zeros(2, n, device="jax")
    torch._dynamo.mark_dynamic(x, 1, min=2, max=12)
    assert run(x).sum().item() == 2 * n


def test_size_above_the_buckets_raises():
  run = compiled(lambda x: x.sin(), [4, 8], dynamic=True)
  assert run(torch.zeros(2, 5, device="jax")).shape == (2, 5)
  with pytest.raises(ValueError, match="is 9, but its largest bucket is 8"):
    run(torch.zeros(2, 9, device="jax"))


def test_operation_without_padding_is_refused():
  run = compiled(lambda x: torch.fft.fft(x).real, dynamic=True)
  with pytest.raises(BucketError, match=r"`fft` .*cannot run at a padded size"):
    run(torch.zeros(3, 5, device="jax"))


def test_wrong_buckets_are_refused():
  with pytest.raises(Exception, match="The option buckets is .* but got 'pow3'"):
    compiled(lambda x: x.sin(), "pow3")(torch.zeros(3, device="jax"))
