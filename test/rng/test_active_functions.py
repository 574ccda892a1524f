"""Active functions: calls of modules are tracked while a program asks for sites."""

import asyncio
import gc
import threading

import jax
import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

import torchax
import torchax.dynamo
from torchax.compat.torch_compat import active_functions
from torchax.interop import JittableModule, gradient_checkpoint, jax_jit
from torchax.rng import RngState, paths


@pytest.fixture
def by_site(env):
  torchax.rng.address_by("site")
  with env:
    yield env
  torchax.rng.address_by("order")


class Noise(torch.nn.Module):
  """Module that adds numbers that identify their draw."""

  def forward(self, x):
    return x + torch.rand(6, device="jax")


class Pair(torch.nn.Module):
  """Two modules and a draw of its own."""

  def __init__(self):
    super().__init__()
    self.a, self.layers = Noise(), torch.nn.ModuleList([Noise()])

  def forward(this, x):
    return F.dropout(this.layers[0](this.a(x)), 0.5)

  def sample(self, x):
    return self.a(x) + torch.rand(6, device="jax")

  def fail(self, error):
    raise error


PLACES = {"a": 1, "layers.0": 1, "": 1}


def _x() -> torch.Tensor:
  return torch.zeros(6, device="jax")


def _is_followed() -> bool:
  return torch.nn.Module.__call__ in active_functions._originals


@pytest.fixture
def nobody_asks(monkeypatch):
  """Restore torch's own calls of modules, whatever earlier tests have left alive."""
  call = torch.nn.Module.__call__
  torch.nn.Module.__call__ = active_functions._originals.get(call, call)
  monkeypatch.setattr(active_functions, "following", active_functions._Following())
  yield
  torch.nn.Module.__call__ = call


def test_torch_is_unchanged_while_no_program_asks_for_sites(env, nobody_asks):
  with env:
    Pair()(_x())
    original = torch.nn.Module.__call__
    assert not _is_followed()
    jax_jit(Pair())(_x())
    assert torch.nn.Module.__call__ is original
    with env.rng.record():
      assert _is_followed()
    assert torch.nn.Module.__call__ is original
    torchax.rng.address_by("site")
    assert _is_followed()
    Pair()(_x())
    torchax.rng.address_by("order")
    Pair()(_x())  # the stream stops using sites
  assert torch.nn.Module.__call__ is original


def test_torch_is_restored_when_an_environment_is_deleted(nobody_asks):
  original = torch.nn.Module.__call__
  env = torchax.Environment()
  env.streams.address_by_site(True)
  assert _is_followed()
  del env
  gc.collect()
  assert torch.nn.Module.__call__ is original


class Scanning(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.layer = torch.nn.Dropout(0.5)

  def forward(self, x):
    return scan(lambda total, row: (total + row, self.layer(row) * 2), x[0] * 1, x)[1]


def test_an_owner_may_be_deleted_while_torch_compiles(nobody_asks):
  class Owner:
    """Object that needs the paths of modules."""

  original = torch.nn.Module.__call__
  owners = [Owner()]
  active_functions.following.hold_for(owners[0])

  def backend(graph, inputs):
    owners.clear()
    return graph.forward

  compiled = torch.compile(Scanning(), backend=backend, fullgraph=True)
  assert compiled(torch.ones(4, 3)).shape == (4, 3)
  assert not owners
  with active_functions.following.hold():
    pass
  assert torch.nn.Module.__call__ is original


def test_a_compiled_function_knows_the_sites_of_its_draws_later(env):
  model = jax_jit(Pair())
  with env:
    model(_x())
    with env.rng.record() as ledger:
      model(_x())
  assert [draw.site for draw in ledger] == ["a", "layers.0", ""]


WRAPPED = {
  "eager": lambda m: m,
  "jit": jax_jit,
  "JittableModule": JittableModule,
  "gradient_checkpoint": gradient_checkpoint,
  "functional_call": lambda m: lambda x: torch.func.functional_call(m, {}, (x,)),
  "transparent in a module": lambda m: torch.nn.Sequential(JittableModule(m))[0],
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_a_site_does_not_depend_on_names_of_arguments(by_site, wrap):
  expected = Pair()(_x())
  torch.manual_seed(0)
  assert torch.equal(WRAPPED[wrap](Pair())(_x()), expected)
  assert by_site.rng.state.sites == PLACES


def test_hooks_draw_at_the_site_of_their_module(by_site):
  net = Pair()
  net.a.register_forward_hook(lambda m, args, out: out + torch.rand(6, device="jax"))
  net.a.register_forward_pre_hook(lambda m, args: args[0] + torch.rand(6, device="jax"))
  expected = net(_x())
  assert by_site.rng.state.sites == {**PLACES, "a": 3}
  torch.manual_seed(0)
  assert torch.equal(JittableModule(net)(_x()), expected)


class Interrupted(BaseException):
  """Module whose interruption no hook of torch reports."""


@pytest.mark.parametrize("error", [ValueError, Interrupted, KeyboardInterrupt])
def test_an_exception_ends_the_module_that_it_leaves(by_site, error):
  class Failing(torch.nn.Module):
    def forward(self, x):
      raise error

  class Net(Pair):
    def __init__(self):
      super().__init__()
      self.bad = Failing()

    def forward(self, x):
      with pytest.raises(error):
        self.bad(x)
      return self.a(x)

  Net()(_x())
  with pytest.raises(error):
    Failing()(_x())
  assert paths.path() == "" and active_functions.innermost() is None
  assert by_site.rng.state.sites == {"a": 1}


def test_a_method_draws_for_the_module_that_is_running(by_site):
  net = Pair()
  expected = net.sample(_x())
  assert by_site.rng.state.sites == {"": 2}
  torch.manual_seed(0)
  assert torch.equal(jax_jit(net.sample)(_x()), expected)
  assert by_site.rng.state.sites == {"": 2}


def test_inside_returns_the_active_module(by_site):
  net = torch.nn.Sequential(Pair())
  with torchax.rng.inside(net), torchax.rng.inside(net[0]):
    expected = net[0].sample(_x())
  assert by_site.rng.state.sites == {"0.a": 1, "0": 1}
  torch.manual_seed(0)
  for whole in (net, JittableModule(net)):
    torch.manual_seed(0)
    with torchax.rng.inside(whole), torchax.rng.inside(net[0]):
      assert torch.equal(jax_jit(net[0].sample)(_x()), expected)
    assert by_site.rng.state.sites == {"0.a": 1, "0": 1}


def test_inside_something_else_is_refused(by_site):
  with pytest.raises(TypeError, match=r"torch\.nn\.Module that is running.*str"):
    torchax.rng.inside("decoder")


class Recomputed(torch.nn.Module):
  """Module with a method that runs a part of it again in the backward pass."""

  def __init__(self, use_reentrant):
    super().__init__()
    self.pair = Pair()
    self.use_reentrant = use_reentrant

  def forward(self, x):
    if self.use_reentrant is None:
      return self._part(x)
    return checkpoint(self._part, x, use_reentrant=self.use_reentrant)

  def _part(self, x):
    return F.dropout(self.pair.a(x) * x, 0.5) * x


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_method_that_is_run_again_draws_the_same(by_site, use_reentrant, wrap):
  def run(flag):
    torch.manual_seed(0)
    net = wrap(torch.nn.Sequential(Recomputed(flag), Recomputed(flag)))
    x = torch.ones(6, device="jax", requires_grad=True)
    net(x).sum().backward()
    return x.grad, by_site.rng.state.sites

  plain, again = run(None), run(use_reentrant)
  assert torch.allclose(plain[0], again[0])
  assert plain[1] == again[1] == {"0.pair.a": 1, "0": 1, "1.pair.a": 1, "1": 1}


def test_more_checkpoints_than_could_be_counted_draw_the_same(by_site):
  """A saved state keeps the modules that were active alive as long as itself."""

  class Layers(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.layers = torch.nn.ModuleList([torch.nn.Dropout(0.5) for _ in range(3)])

    def forward(self, x):
      for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False)
      return x

  net = Layers()
  x = torch.ones(6, device="jax", requires_grad=True)
  out = net(x)
  kept = []
  for _ in range(1100):
    torch.rand(6, device="jax")
    kept.append(torch.jax.get_rng_state())
  out.sum().backward()
  assert torch.equal(out.detach(), x.grad) and len(kept) == 1100


def test_a_jitted_method_of_a_running_module_has_the_eager_sites(by_site):
  class Net(Pair):
    def __init__(self, wrap):
      super().__init__()
      self.wrap = [wrap]

    def forward(self, x):
      return self.wrap[0](self._part)(x)

    def _part(self, x):
      return self.layers[0](self.a(x)) + torch.rand(6, device="jax")

  def run(wrap):
    torch.manual_seed(0)
    return torch.nn.Sequential(Net(wrap))(_x()), by_site.rng.state.sites

  eager, jitted = run(lambda f: f), run(jax_jit)
  assert torch.allclose(eager[0], jitted[0]) and eager[1] == jitted[1]
  assert set(eager[1]) == {"0", "0.a", "0.layers.0"}


def test_each_thread_and_each_task_runs_its_own_modules(by_site):
  async def one(net):
    with active_functions.inside(net):
      await asyncio.sleep(0)
      with active_functions.inside(net.a):
        await asyncio.sleep(0)
        return paths.path()

  async def both():
    return await asyncio.gather(one(Pair()), one(Pair()))

  found = []
  net = Pair()
  with active_functions.inside(net), active_functions.inside(net.a):
    thread = threading.Thread(target=lambda: found.append(paths.path()))
    thread.start()
    thread.join()
    assert paths.path() == "a"
  assert found == [""]
  assert asyncio.run(both()) == ["a", "a"]


def test_a_copied_module_has_the_paths_of_the_original(by_site):
  net = Pair()
  expected = net(_x())
  replica = net._replicate_for_data_parallel()
  torch.manual_seed(0)
  assert torch.equal(replica(_x()), expected)
  assert by_site.rng.state.sites == PLACES


def test_scope_by_site_starts_its_paths_at_the_scope(env):
  """Modules outside of the scope are not tracked, so they are not in the paths."""

  class Net(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.pair = Pair()

    def forward(self, x):
      with env.rng_scope(RngState(jax.random.key(0), 0, {})) as stream:
        x = self.pair(x)
        return x, stream.state.sites

  with env:
    first = Net()(_x())
    with env.rng.record():
      second = Net()(_x())
  assert torch.equal(first[0], second[0])
  assert first[1] == second[1] == PLACES


def test_another_wrapper_of_module_calls_is_kept(env):
  original, calls = torch.nn.Module.__call__, []

  def wrap():
    inner = torch.nn.Module.__call__

    def outer(self, *args, **kwargs):
      calls.append(self)
      return inner(self, *args, **kwargs)

    torch.nn.Module.__call__ = outer

  net = Pair()
  try:
    with env, env.rng.record() as ledger:
      wrap()
      net(_x())
    assert [draw.site for draw in ledger] == ["a", "layers.0", ""]
    assert len(calls) == 3
    with env, env.rng.record() as ledger:
      net(_x())
    assert [draw.site for draw in ledger] == ["a", "layers.0", ""]
    assert len(calls) == 6
  finally:
    torch.nn.Module.__call__ = original


def test_one_graph_stays_one_where_draws_are_addressed_by_site(by_site):
  model = torch.nn.Sequential(
    torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.ReLU())
  )
  graphs = []

  def keep(graph, inputs):
    graphs.append(graph)
    return graph

  x = torch.ones(1, 2)
  with torchax.disable_temporarily():
    compiled = torch.compile(lambda x: model(x) * 2, backend=keep, fullgraph=True)
    assert torch.equal(compiled(x), model(x) * 2)
  assert len(graphs) == 1
