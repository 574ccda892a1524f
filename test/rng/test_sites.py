"""Draws addressed by site: by the path of modules and a count, not by their order."""

import subprocess
import sys
import threading

import jax
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.interop import (
  JittableModule,
  cond,
  functional_rng,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  jax_view,
  jax_vmap,
  scan,
  while_loop,
)
from torchax.rng import RngState


@pytest.fixture(autouse=True)
def by_site(env):
  torchax.rng.address_by("site")
  with env:
    yield
  torchax.rng.address_by("order")


class Noise(torch.nn.Module):
  """Module that adds numbers that identify their draw."""

  def forward(self, x):
    return x + torch.rand(6, device="jax")


class Net(torch.nn.Module):
  """Module whose submodules run in the order in which they are named."""

  def __init__(self, *names):
    super().__init__()
    self.order = names
    for name in sorted(names):
      self.add_module(name, Noise())
    self.drawn: dict = {}

  def forward(self, x):
    for name in self.order:
      x = self.get_submodule(name)(x)
    return x


class Stack(torch.nn.Module):
  """Layers in a list, called through a function that may wrap them."""

  def __init__(self, wrap=lambda layer: layer):
    super().__init__()
    self.layers = torch.nn.ModuleList([Net("a", "b"), Net("a", "b")])
    self.wrap = wrap

  def forward(self, x):
    for layer in self.layers:
      x = self.wrap(layer)(x)
    return F.dropout(x, 0.5)


def _x() -> torch.Tensor:
  return torch.zeros(6, device="jax")


def _drawn(net, calls: int = 2) -> dict[str, list[torch.Tensor]]:
  """Return the draws of each submodule of a Net."""
  torch.manual_seed(0)
  found: dict = {name: [] for name in net.order}
  hooks = [
    net.get_submodule(name).register_forward_hook(
      lambda module, args, out, name=name: found[name].append(out - args[0])
    )
    for name in net.order
  ]
  for _ in range(calls):
    net(_x())
  for hook in hooks:
    hook.remove()
  return found


def _close(first, second) -> bool:
  # A difference of sums gives the numbers up to rounding.
  return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(first, second))


def test_another_layer_changes_no_others_numbers():
  before, after = _drawn(Net("a", "b")), _drawn(Net("a", "new", "b"))
  for name in ("a", "b"):
    assert _close(before[name], after[name])
  assert not _close(after["new"], after["a"])


def test_the_order_of_layers_does_not_matter():
  one, other = _drawn(Net("a", "b", "c")), _drawn(Net("c", "a", "b"))
  for name in one:
    assert _close(one[name], other[name])


def test_by_order_both_would_change_them():
  torchax.rng.address_by("order")
  before, after = _drawn(Net("a", "b")), _drawn(Net("a", "new", "b"))
  assert _close(before["a"][:1], after["a"][:1])
  assert not _close(before["b"], after["b"])


def test_draws_of_all_sites_have_unique_keys(env):
  net = Stack()
  with env.rng.record() as ledger:
    for _ in range(3):
      net(_x())
      torch.rand(2, device="jax")
      jax_jit(net)(_x())
  assert len(ledger) == 3 * 11
  ledger.require_unique()


def _by_value_and_grad(f):
  differentiated = jax_value_and_grad(lambda x: (x.sum(), f(x)), {"has_aux": True})
  return lambda x: differentiated(x)[0][1]


BOUNDARIES = {
  "jit": jax_jit,
  "nested jit": lambda f: jax_jit(lambda x: jax_jit(f)(x)),
  "module": JittableModule,
  "checkpoint": gradient_checkpoint,
  "jit of checkpoint": lambda f: jax_jit(gradient_checkpoint(f)),
  "value_and_grad": _by_value_and_grad,
  "cond": lambda f: lambda x: cond(x.sum() < 1, f, f, x),
  "scan": lambda f: lambda x: scan(lambda c, _: (f(c), None), x, length=1)[0],
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_boundary_draws_the_eager_numbers(env, name):
  net = Stack()
  eager = [net(_x()) for _ in range(3)]
  state = env.rng.state.state_dict()
  torch.manual_seed(0)
  wrapped = BOUNDARIES[name](net)
  outs = [wrapped(_x()), net(_x()), wrapped(_x())]
  assert all(map(torch.equal, outs, eager))
  assert env.rng.state.state_dict() == state


@pytest.mark.parametrize(
  "wrap",
  [
    jax_jit,
    JittableModule,
    gradient_checkpoint,
    lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    lambda layer: lambda x: checkpoint(layer, x, use_reentrant=True),
  ],
  ids=["jit", "module", "gradient_checkpoint", "checkpoint", "reentrant checkpoint"],
)
def test_a_wrapped_part_of_a_model_keeps_its_sites(wrap):
  def run(net):
    torch.manual_seed(0)
    x = torch.ones(6, device="jax", requires_grad=True)
    out = net(x)
    (out * out).sum().backward()
    return out.detach(), x.grad

  plain, wrapped = run(Stack()), run(Stack(wrap))
  assert torch.equal(plain[0], wrapped[0])
  # The gradient has the mask of the forward pass: it is 4 · out where out is kept.
  assert torch.allclose(plain[1], wrapped[1])


def test_one_compiled_block_in_two_places_has_two_sites():
  class Shared(torch.nn.Module):
    def __init__(self, wrap):
      super().__init__()
      self.block = Noise()
      self.first, self.second = Outer(wrap(self.block)), Outer(wrap(self.block))

    def forward(self, x):
      return self.second(self.first(x))

  class Outer(torch.nn.Module):
    def __init__(self, function):
      super().__init__()
      self.function = [function]

    def forward(self, x):
      return self.function[0](x)

  jitted: dict = {}
  torch.manual_seed(0)
  eager = Shared(lambda block: block)(_x())
  torch.manual_seed(0)
  compiled = Shared(lambda block: jitted.setdefault("block", jax_jit(block)))(_x())
  assert torch.allclose(eager, compiled)


def test_a_loop_draws_as_if_unrolled():
  net = Net("a", "b")
  xs = torch.zeros(3, 6, device="jax")
  scanned = scan(lambda c, x: (net(c) + x, None), _x(), xs)[0]
  torch.manual_seed(0)
  value = _x()
  for x in xs:
    value = net(value) + x
  assert torch.equal(scanned, value)


def test_rows_draw_as_a_loop_over_them():
  net, xs = Net("a", "b"), torch.zeros(3, 6, device="jax")
  rows = jax_vmap(net, randomness="different")(xs)
  torch.manual_seed(0)
  assert torch.equal(rows, torch.stack([net(x) for x in xs]))


def test_a_loop_of_unknown_length_draws_the_same_compiled():
  net = Net("a", "b")

  def run():
    start = (torch.tensor(0).to("jax"), _x())
    return while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, net(s[1])), start)[1]

  eager = [run(), run()]
  torch.manual_seed(0)
  compiled = jax_jit(run)
  assert all(map(torch.equal, [compiled(), compiled()], eager))
  assert not torch.equal(*eager)


def test_seeding_decides_and_compiles_nothing_again():
  traces = []
  net = Net("a", "b")

  def f(x):
    traces.append(None)
    return net(x)

  compiled = jax_jit(f)
  first = [compiled(_x()), compiled(_x())]
  count = len(traces)
  torch.manual_seed(0)
  assert all(map(torch.equal, [compiled(_x()), compiled(_x())], first))
  torch.manual_seed(1)
  assert not torch.equal(compiled(_x()), first[0])
  assert len(traces) == count == 2  # the second trace has operands for the sites


def test_the_keys_are_operands():
  net = Net("a", "b")
  compiled = jax_jit(net)
  compiled(_x())
  jaxpr = compiled.trace(_x()).jaxpr
  assert "random_wrap[impl=fry" not in str(jaxpr), "a key made of words"
  assert "random_seed" not in str(jaxpr)
  kinds = [str(aval.dtype) for aval in jaxpr.in_avals]
  assert kinds.count("key<fry>") >= 2  # one for each site


_PROGRAM = """
import torch, torchax
torchax.rng.address_by("site")
torchax.enable_globally()
model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5))
x = torch.ones(16, device="jax")
torch.jax.set_rng_state(torch.load({path!r}))
print([model(x).tolist() for _ in range(2)])
"""


def test_a_new_process_goes_on_where_the_state_was_saved(tmp_path):
  model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5))
  x = torch.ones(16, device="jax")
  model(x)
  path = str(tmp_path / "state.pt")
  torch.save(torch.jax.get_rng_state(), path)
  expected = [model(x).tolist() for _ in range(2)]
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM.format(path=path)],
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.strip() == str(expected)


def test_a_state_is_saved_with_its_counts(env):
  Net("a", "b")(_x())
  state = env.rng.state
  assert state.sites == {"a": 1, "b": 1}
  for copy in (
    RngState.from_state_dict(state.state_dict()),
    RngState.from_tensor(state.to_tensor()),
    jax.tree.map(lambda leaf: leaf, state),
  ):
    assert copy.state_dict() == state.state_dict()


@pytest.mark.parametrize("sites", [{"a": -1}, {"a": 1.5}, ["a"], {"a": 2**63}])
def test_a_state_with_wrong_counts_is_refused(sites):
  data = {**RngState.from_seed(0).state_dict(), "sites": sites}
  with pytest.raises(ValueError, match="count|Sites"):
    RngState.from_state_dict(data)


def test_a_state_of_one_mode_is_restored_in_the_other(env):
  net = Net("a", "b")
  saved = torch.jax.get_rng_state()
  expected = net(_x())
  torchax.rng.address_by("order")
  by_order = net(_x())
  torch.jax.set_rng_state(saved)
  assert torch.equal(net(_x()), expected)
  assert not torch.equal(by_order, expected)


def test_switching_the_mode_repeats_nothing(env):
  with env.rng.record() as ledger:
    for mode in ("site", "order", "site", "order", "site"):
      torchax.rng.address_by(mode)
      assert torchax.rng.addressed_by() == mode
      Net("a", "b")(_x())
  assert len(ledger) == 10
  ledger.require_unique()


def test_the_switch_shows_first_inside_a_raw_jax_trace(env):
  """The root stream is updated there, outside of the trace."""
  Noise()(_x())
  draw = jax.jit(lambda key: jax_view(lambda: torch.rand(6, device="jax"))(rng=key))
  torchax.rng.address_by("order")
  drawn = draw(jax.random.key(3))
  draw.clear_cache()
  assert (draw(jax.random.key(3)) == drawn).all()
  state = env.rng.state
  assert state.sites is None and isinstance(state.key, jax.Array)
  assert not isinstance(state.key, jax.core.Tracer)


def test_another_mode_is_refused(env):
  before = env.rng.state.state_dict()
  with pytest.raises(ValueError, match='"order" or "site"'):
    torchax.rng.address_by("name")
  assert env.rng.state.state_dict() == before
  assert torchax.rng.addressed_by() == "site"


def test_the_configuration_has_the_switch():
  torchax.rng.address_by("order")
  with torchax.Environment(torchax.Configuration(rng_addressing="site")):
    assert torchax.rng.addressed_by() == "site"
  assert torchax.rng.addressed_by() == "order"


def test_scopes_keys_and_forks_are_addressed_by_site_too(env):
  net = Net("a", "b")
  outs = []
  for scope in (3, jax.random.key(3)):
    with env.rng_scope(scope):
      outs.append(net(_x()))
      assert env.rng.state.sites == {"a": 1, "b": 1}
  key = env.prng_key
  first = net(_x())
  env.prng_key = key
  assert torch.equal(net(_x()), first)
  with env.rng_scope(env.rng.fork("data")):
    outs.append(net(_x()))
  assert torch.equal(outs[0], outs[1])
  assert not torch.equal(outs[0], outs[2])


def test_reading_the_key_after_draws_goes_on_with_new_numbers(env):
  net = Net("a")
  first = net(_x())
  env.prng_key = env.prng_key
  assert not torch.equal(net(_x()), first)


def test_the_functional_form_carries_the_counts():
  net = Net("a", "b")
  eager = [net(_x()), net(_x())]
  pure = functional_rng(net)
  state = RngState(RngState.from_seed(0).key, 0, {})
  first, state = pure(state, _x())
  second, state = pure(state, _x())
  assert first.tolist() == eager[0].tolist() and second.tolist() == eager[1].tolist()
  assert state.sites == {"a": 2, "b": 2}


def test_a_state_by_site_does_not_advance_by_a_number():
  with pytest.raises(ValueError, match="addressed by site"):
    RngState(RngState.from_seed(0).key, 0, {}).advance(1)


def test_an_exception_leaves_the_counts_as_they_were(env):
  net = Net("a", "b")

  @jax_jit
  def failing(x):
    net(x)
    raise KeyError

  net(_x())
  before = env.rng.state.state_dict()
  for _ in range(2):
    with pytest.raises(KeyError):
      failing(_x())
  assert env.rng.state.state_dict() == before


def test_threads_have_sites_of_their_own():
  net, outs = Net("a"), []

  def run():
    outs.append(net(_x()))

  for _ in range(2):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
  outs.append(net(_x()))
  assert not any(torch.equal(a, b) for a in outs for b in outs if a is not b)


def test_a_seed_inside_a_compiled_function_draws_as_in_eager(env):
  net = Net("a", "b")

  def f(x):
    first = net(x)
    env.manual_seed(7)
    return first + net(x)

  eager = [f(_x()), net(_x())]
  state = env.rng.state.state_dict()
  torch.manual_seed(0)
  compiled = [jax_jit(f)(_x()), net(_x())]
  assert all(map(torch.equal, eager, compiled))
  assert env.rng.state.state_dict() == state
