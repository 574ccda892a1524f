"""`scan_layers`: stacks of equal layers in a model run as loops."""

import copy
import gc

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchax.core import program_limit
from torchax.interop import jax_jit
from torchax.stacks import LayerStack, scan_layers

WIDTH = 8


class Residual(nn.Module):
  """Layer with a dropout, a buffer, and a mask as a second argument."""

  def __init__(self, inner=WIDTH):
    super().__init__()
    self.norm = nn.LayerNorm(WIDTH)
    self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
    self.dropout = nn.Dropout(0.5)
    self.register_buffer("scale", torch.tensor(0.5))

  def forward(self, x, mask=None):
    hidden = F.gelu(self.up(self.norm(x))) * self.scale
    hidden = hidden if mask is None else hidden * mask
    return x + self.dropout(self.down(hidden))


class Deep(nn.Module):
  """Model that iterates over a list of layers."""

  def __init__(self, depth=3, tuples=False):
    super().__init__()
    self.embed = nn.Linear(4, WIDTH)
    self.layers = nn.ModuleList([Residual() for _ in range(depth)])
    self.tuples = tuples

  def forward(self, x, mask=None):
    x = self.embed(x)
    for layer in self.layers:
      x = layer(x, mask=mask)
    return x


class Tuples(Residual):
  """Layer that returns a tuple, like some layers of transformers."""

  def forward(self, x, mask=None):
    return super().forward(x, mask), None


class DeepTuples(Deep):
  """Model whose layers return tuples."""

  def __init__(self):
    super().__init__()
    self.layers = nn.ModuleList([Tuples() for _ in range(3)])

  def forward(self, x, mask=None):
    x = self.embed(x)
    for layer in self.layers[: len(self.layers)]:
      x = layer(x, mask=mask)[0]
    return x


def _sequential():
  layers = [nn.Linear(4, WIDTH), *[Residual() for _ in range(3)], nn.Linear(WIDTH, 2)]
  return nn.Sequential(*layers)


def _encoder():
  layer = nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)
  return nn.TransformerEncoder(layer, 3)


MODELS = {
  "a list": (Deep, "layers.0"),
  "layers that return tuples": (DeepTuples, "layers.0"),
  "neighbours in a Sequential": (_sequential, "1"),
  "torch's encoder": (_encoder, "layers.0"),
}

pytestmark = pytest.mark.usefixtures("env")


def _x():
  return torch.linspace(-1, 1, 40).view(2, 5, 4).to("jax")


def _both(make, **options):
  torch.manual_seed(0)
  model = make().to("jax")
  scanned = scan_layers(copy.deepcopy(model), _x(), **options)
  return model, scanned


def _step(model):
  torch.manual_seed(1)
  loss = model(_x()).square().mean()
  loss.backward()
  return loss


@pytest.mark.parametrize(("make", "place"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_scanned_model_equals_the_unrolled_model(make, place, policy):
  model, scanned = _both(make, policy=policy)
  stack = scanned.get_submodule(place)
  assert isinstance(stack, LayerStack)
  torch.testing.assert_close(_step(scanned), _step(model))
  wanted = {name: p.grad for name, p in model.named_parameters()}
  for here, name in stack.tensor_names().items():
    if here.startswith("params."):
      prefix = place.rpartition(".")[0] + "." if "." in place else ""
      parts = [wanted.get(f"{prefix}{n}.{name}") for n in stack._names]
      torch.testing.assert_close(stack.get_parameter(here).grad, torch.stack(parts))


@pytest.mark.parametrize(("make", "place"), MODELS.values(), ids=MODELS)
def test_state_dict_keeps_the_names_of_the_model(make, place):
  model, scanned = _both(make)
  state = scanned.state_dict()
  assert state.keys() == model.state_dict().keys()
  for name, tensor in model.state_dict().items():
    assert torch.equal(state[name], tensor)
  torch.manual_seed(2)
  other = make().to("jax")
  scanned.load_state_dict(other.state_dict())
  for name, tensor in other.state_dict().items():
    assert torch.equal(scanned.state_dict()[name], tensor)
  model.load_state_dict(scanned.state_dict())


def test_state_dict_without_a_layer_raises():
  model, scanned = _both(Deep)
  state = {k: v for k, v in model.state_dict().items() if "layers.1.up" not in k}
  with pytest.raises(RuntimeError, match="up"):
    scanned.load_state_dict(state)


def test_jitted_step_draws_the_same_as_the_model():
  model, scanned = _both(Deep)
  mask = torch.ones(2, 5, 1, device="jax")
  torch.manual_seed(3)
  expected = model(_x(), mask)
  torch.manual_seed(3)
  found = jax_jit(lambda x, mask: scanned(x, mask))(_x(), mask)
  assert torch.equal(found == _x()[..., :1], expected == _x()[..., :1])
  torch.testing.assert_close(found, expected)


def test_finding_stacks_draws_and_computes_nothing():
  model = Deep().to("jax")
  before = torch.jax.get_rng_state()
  scan_layers(model, _x())
  assert torch.equal(torch.jax.get_rng_state(), before)


def test_program_count_does_not_depend_on_depth():
  counts = []
  for depth in (2, 6):
    model = scan_layers(Deep(depth).to("jax"), _x())
    x = _x()
    model(x)
    gc.collect()  # programs of other tests do not count
    before = program_limit.count()
    jax.block_until_ready(jax_jit(lambda x, model=model: model(x))(x).jax())
    counts.append(program_limit.count() - before)
  assert counts[0] == counts[1]


class Heads(nn.Module):
  """Model whose equal layers are not called one after another."""

  def __init__(self):
    super().__init__()
    self.heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

  def forward(self, x):
    return sum(head(x) for head in self.heads)


class Numbered(Deep):
  """Model that calls each layer with different arguments."""

  def forward(self, x):
    x = self.embed(x)
    for n, layer in enumerate(self.layers):
      x = layer(x, mask=n / 2)
    return x


class Twice(Deep):
  """Model that calls each layer twice."""

  def forward(self, x):
    return super().forward(super().forward(x)[..., :4])


class Others(Deep):
  """Model with layers of two structures."""

  def __init__(self):
    super().__init__()
    self.layers[1] = Residual(4)


REFUSED = {
  "heads": (Heads, "heads: the input of a layer is not the result"),
  "arguments": (Numbered, "layers: the layers are called with different mask"),
  "twice": (Twice, "layers: each layer of a stack is called once"),
  "others": (lambda: Others(), "layers: its layers differ"),
  "no list": (lambda: nn.Linear(4, 4), "no ModuleList or Sequential has equal"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_model_without_stack_raises_and_is_unchanged(make, message):
  model = make().to("jax")
  names = [name for name, _ in model.named_modules()]
  with pytest.raises(ValueError, match=message):
    scan_layers(model, _x())
  assert [name for name, _ in model.named_modules()] == names


def test_unknown_policy_raises():
  model = Deep().to("jax")
  with pytest.raises(ValueError, match=r"'dots'.*dots_saveable"):
    scan_layers(model, _x(), policy="dots")
  assert len(model.layers) == 3


def test_layer_with_further_results_raises():
  class Weights(Tuples):
    def forward(self, x, mask=None):
      return super().forward(x, mask)[0], x

  model = DeepTuples()
  model.layers = nn.ModuleList([Weights() for _ in range(3)])
  scanned = scan_layers(model.to("jax"), _x())
  with pytest.raises(ValueError, match="2 values"):
    scanned(_x())
