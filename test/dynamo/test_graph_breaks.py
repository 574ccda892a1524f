"""Python code after a graph break, which Dynamo compiles frame by frame."""

import copy
import io
import pathlib

import pytest
import torch
from dynamo.counting import CountingBackend
from torch import nn
from torch._dynamo import convert_frame

import torchax
from torchax.tracing.modules import writes

PACKAGE = pathlib.Path(torchax.__file__).parent
# It has the `forward` of encoders on jax, which is compiled like torch's.
ENCODERS = PACKAGE / "compat/torch_compat/encoders.py"
X = torch.arange(3.0)


class Double(torch.autograd.Function):
  """Function whose formula is not its derivative."""

  @staticmethod
  def forward(ctx, x):
    return x * 2

  @staticmethod
  def backward(ctx, gradient):
    return gradient * 3


def transform(x):
  """Torch reads the mask of the decoder, which breaks the graph."""
  torch.manual_seed(0)
  model = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True).to(x.device)
  mask = nn.Transformer.generate_square_subsequent_mask(3, device=x.device)
  words = x.cos()[None, :, None].expand(1, 3, 4)
  return model(words, words, tgt_mask=mask)


def initialize_lazily(x):
  layer = nn.LazyLinear(2).to(x.device)
  layer(x[None])
  return torch.full_like(layer.weight, 2.0).detach()


def save(x):
  file = io.BytesIO()
  torch.save(x, file)
  file.seek(0)
  return torch.load(file)


def copy_deeply(x):
  return copy.deepcopy(nn.PReLU().to(x.device))(-x).detach()


def differentiate(x):
  x = x.detach().requires_grad_()
  Double.apply(x).sum().backward()
  return x.grad


def take_step(x):
  weight = nn.Parameter(torch.ones_like(x))
  optimizer = torch.optim.AdamW([weight], lr=0.1)
  (weight * x).sum().backward()
  optimizer.step()
  return weight.detach()


PROGRAMS = [transform, initialize_lazily, save, copy_deeply, differentiate, take_step]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "eager"), ("jax", "jax")])
@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
def test_code_after_a_graph_break(run, device, backend):
  """Dynamo compiles the user's code, and none of torchax."""
  writes.watch(nn.ReLU())  # as if a compiled function had run a module
  compiled = set()

  def after_break(x):
    torch._dynamo.graph_break()
    return run(x)

  hook = convert_frame.register_bytecode_hook(
    lambda code, _: compiled.add(pathlib.Path(code.co_filename))
  )
  try:
    actual = torch.compile(after_break, backend=backend)(X.to(device))
  finally:
    hook.remove()
  torch.testing.assert_close(actual.cpu(), run(X), rtol=1e-4, atol=1e-5)
  own = {path for path in compiled if path.is_relative_to(PACKAGE)}
  assert own <= {ENCODERS}


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_an_encoder_is_one_graph(device):
  layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
  model, words = nn.TransformerEncoder(layer, 1).to(device), torch.ones(1, 3, 4)
  backend = CountingBackend()
  compiled = torch.compile(model, backend=backend, fullgraph=True)
  torch.testing.assert_close(compiled(words.to(device)), model(words.to(device)))
  assert len(backend.graphs) == 1


def test_transformer_compiles_on_the_cpu():
  model = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)
  words, mask = torch.ones(1, 3, 4), nn.Transformer.generate_square_subsequent_mask(3)
  compiled = torch.compile(model, backend="eager")
  expected = model(words, words, tgt_mask=mask)
  torch.testing.assert_close(compiled(words, words, tgt_mask=mask), expected)
