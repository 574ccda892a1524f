"""Draws addressed by site in captured graphs: the sites of modules, as in eager mode.

Modules are not active while a graph runs; the graph records the module of each
operation.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from dynamo.counting import CountingBackend
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.compat import versions
from torchax.export import exported_program_to_jax


class Block(nn.Module):
  """Layer with a dropout in a submodule."""

  def __init__(self):
    super().__init__()
    self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

  def forward(self, x):
    return self.drop(self.linear(x))


class Model(nn.Module):
  """Module used twice, modules in a list, and draws of its own between them."""

  def __init__(self):
    super().__init__()
    self.drop = nn.Dropout(0.5)
    self.layers = nn.ModuleList([Block(), Block()])

  def forward(self, x):
    x = self.drop(x) + torch.rand_like(x)
    for layer in self.layers:
      x = layer(x)
    return self.drop(F.dropout(x, 0.5))


class Checkpointed(Model):
  """Module that runs its layers again in the backward pass."""

  def forward(self, x):
    for layer in self.layers:
      x = checkpoint(layer, x, use_reentrant=False)
    return self.drop(x)


class Branching(nn.Module):
  """Module that draws in the branches of a `torch.cond`, one of them in a submodule."""

  def __init__(self):
    super().__init__()
    self.layer = Block()

  def forward(self, x):
    x = F.dropout(x, 0.5)
    drawn = torch.cond(
      x.sum() > 0, lambda x: self.layer(x), lambda x: torch.rand_like(x) + x, (x,)
    )
    return F.dropout(drawn, 0.5)


class Outer(nn.Module):
  """Module that contains a compiled one."""

  def __init__(self, inner):
    super().__init__()
    self.inner = inner

  def forward(self, x):
    return self.inner(x) * 2


@pytest.fixture(autouse=True)
def env():
  torchax.rng.address_by("site")
  yield torchax.default_env()
  torchax.rng.address_by("order")


def _x(device: str) -> torch.Tensor:
  return torch.ones(8, 4).to(device)


def _modes(device: str, env):
  return env if device == "jax" else contextlib.nullcontext()


def _run(env, function, device: str, calls: int = 2):
  """Return results of some calls, gradients of the input, and the sites that drew."""
  torch.manual_seed(0)
  results = []
  with _modes(device, env), env.rng.record() as ledger:
    for _ in range(calls):
      x = _x(device).requires_grad_()
      out = function(x)
      out.sum().backward()
      results += [out.detach().cpu(), x.grad.cpu()]
  sites = {path: n for path, n in env.rng.state.sites.items() if n}
  return results, sites, [(draw.site, draw.turn, draw.key) for draw in ledger]


def _eager(env, model, **options):
  """Return the same of the model itself, on jax."""
  with env:
    return _run(env, model.to("jax"), "jax", **options)


def _same(compiled, eager) -> None:
  for have, want in zip(compiled[0], eager[0], strict=True):
    torch.testing.assert_close(have, want)
  assert compiled[1] == eager[1]


@pytest.mark.parametrize("device", ["cpu", "jax"])
@pytest.mark.parametrize("wrap", [lambda model: model, Outer], ids=["alone", "inside"])
def test_a_compiled_module_draws_at_the_sites_of_its_modules(env, device, wrap):
  torch.manual_seed(1)
  model = Model()
  eager = _eager(env, wrap(model))
  prefix = "" if wrap is not Outer else "inner."
  assert eager[1] == {
    f"{prefix}drop": 4, f"{prefix}layers.0.drop": 2, f"{prefix}layers.1.drop": 2,
    prefix.removesuffix("."): 4,
  }  # fmt: skip
  compiled = torch.compile(model.to(device), backend="jax", fullgraph=True)
  found = _run(env, wrap(compiled), device)
  _same(found, eager)
  assert found[2] == eager[2]  # ledgers have the same keys


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_added_layer_does_not_change_draws_of_other_layers(env, device):
  """Addressing by site has the same purpose for compiled modules."""

  def drawn(*layers):
    model = nn.Sequential(*layers).to(device)
    torch.manual_seed(0)
    with _modes(device, env):
      return torch.compile(model, backend="jax")(_x(device)).cpu()

  class Last(nn.Module):
    def __init__(self, first):
      super().__init__()
      self.first, self.last = first, nn.Dropout(0.5)

    def forward(self, x):
      return self.last(self.first(x) * 0 + 1)

  assert torch.equal(drawn(Last(nn.Dropout(0.5))), drawn(Last(nn.Identity())))


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_recomputed_layer_draws_at_its_site(env, device):
  torch.manual_seed(1)
  model = Checkpointed()
  eager = _eager(env, model)
  assert eager[1] == {"drop": 2, "layers.0.drop": 2, "layers.1.drop": 2}
  _same(_run(env, torch.compile(model.to(device), backend="jax"), device), eager)


@pytest.mark.skipif(
  versions.is_older(torch.__version__, "2.13"),
  reason="Dynamo before torch 2.13 takes fakes of its own class only in torch.cond",
)
@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_the_branches_of_cond_draw_at_their_sites(env, device):
  torch.manual_seed(1)
  model = Branching()
  eager = _eager(env, model)
  assert eager[1] == {"": 6, "layer.drop": 2}
  compiled = torch.compile(model.to(device), backend="jax", fullgraph=True)
  _same(_run(env, compiled, device), eager)


@pytest.mark.filterwarnings("ignore:torch.compile leaves a graph uncompiled")
def test_uncompiled_graph_draws_at_its_sites(env):
  class Moving(nn.Module):
    def __init__(self):
      super().__init__()
      self.drop = nn.Dropout(0.5)

    def forward(self, x):
      return self.drop(x.to("jax")) + torch.rand(4, device="jax")

  model, results = Moving(), []
  for function in (model, torch.compile(model, backend="jax")):
    torch.manual_seed(0)
    with torchax.disable_temporarily():
      results.append((function(torch.ones(4)).cpu(), env.rng.state.sites))
  assert torch.equal(results[0][0], results[1][0])
  assert results[0][1] == results[1][1] == {"drop": 1, "": 1}


@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_one_graph_draws_by_order_and_by_site(env, device):
  """The way of addressing is not compiled in: it may change between two calls."""
  torch.manual_seed(1)
  model = Model()
  counter = CountingBackend()
  compiled = torch.compile(model.to(device), backend=counter)
  for mode in ("site", "order", "site"):
    torchax.rng.address_by(mode)
    for function in (compiled, model.to("jax")) if device == "jax" else (compiled,):
      torch.manual_seed(0)
      with _modes(device, env):
        found = function(_x(device)).detach().cpu()
      if function is compiled:
        first = found
    assert torch.allclose(first, found)
  assert len(counter.graphs) == 1


def test_an_exported_program_draws_at_the_sites_of_its_modules(env):
  torch.manual_seed(1)
  model = Model()
  eager = _eager(env, model, calls=1)
  model.to("cpu")
  with torchax.disable_temporarily():
    states, program = exported_program_to_jax(torch.export.export(model, (_x("cpu"),)))
  torch.manual_seed(0)
  (out,) = program(states, (_x("jax").jax(),))
  torch.testing.assert_close(torchax.interop.torch_view(out).cpu(), eager[0][0])
  assert {p: n for p, n in env.rng.state.sites.items() if n} == eager[1]


def test_exported_branch_draws_at_the_site_of_its_cond(env):
  """torch.export does not record the modules of the operations in a branch."""
  model = Branching()
  states, program = exported_program_to_jax(torch.export.export(model, (_x("cpu"),)))
  torch.manual_seed(0)
  first, second = (program(states, (_x("jax").jax(),))[0] for _ in range(2))
  assert (first != second).any()
  assert env.rng.state.sites == {"": 6}


@pytest.mark.parametrize("mode", ["jax", "dynamo"])
def test_compile_modes_draw_at_the_sites_of_eager_modules(env, mode):
  torch.manual_seed(1)
  model = Model().to("jax")
  results = []
  with env:
    compiled = torchax.compile(model, torchax.CompileOptions(mode=mode))
    for function in (model, compiled):
      torch.manual_seed(0)
      drawn = torch.cat([function(_x("jax")) for _ in range(2)])
      results.append((drawn, env.rng.state.sites))
  torch.testing.assert_close(results[0][0], results[1][0])
  assert results[0][1] == results[1][1]
