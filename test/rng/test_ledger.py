"""Ledger: site, order and key of each draw."""

import subprocess
import sys
import threading

import jax
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.interop import (
  JittableModule,
  cond,
  gradient_checkpoint,
  jax_jit,
  jax_vmap,
  scan,
  while_loop,
)


class Block(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.drop = torch.nn.Dropout(0.25)

  def forward(self, x):
    return self.drop(x)


class Net(torch.nn.Module):
  def __init__(self):
    super().__init__()
    self.layers = torch.nn.ModuleList([Block(), Block()])

  def forward(self, x):
    for layer in self.layers:
      x = layer(x)
    return x + torch.randn(6, device="jax")


@pytest.fixture(autouse=True)
def enabled(env):
  with env:
    yield


SITES = ["layers.0.drop", "layers.1.drop", ""]


def _x() -> torch.Tensor:
  return torch.ones(6, device="jax")


def _keys(ledger) -> list:
  return [draw.key for draw in ledger]


def test_a_ledger_says_what_was_drawn(env):
  net = Net()
  torch.rand(1, device="jax")
  with env.rng.record() as ledger:
    net(_x())
  assert [draw.index for draw in ledger] == [1, 2, 3]
  assert [draw.site for draw in ledger] == SITES
  assert [draw.distribution for draw in ledger] == [
    "dropout(p=0.25)",
    "dropout(p=0.25)",
    "normal(0, 1)",
  ]
  assert {draw.shape for draw in ledger} == {(6,)}
  assert {draw.dtype for draw in ledger} == {"float32"}
  assert all("test_ledger.py:" in draw.line for draw in ledger)


def test_only_the_draws_of_the_block_are_noted(env):
  _draw = lambda: torch.rand(2, device="jax")  # noqa: E731
  _draw()
  with env.rng.record() as ledger:
    _draw()
    with env.rng.record() as inner:
      _draw()
  _draw()
  assert len(ledger) == 2
  assert len(inner) == 1
  assert ledger[1] == inner[0]


def test_the_numbers_do_not_depend_on_being_recorded(env):
  net = Net()
  plain = net(_x())
  torch.manual_seed(0)
  with env.rng.record():
    recorded = net(_x())
  assert torch.equal(plain, recorded)


@pytest.mark.parametrize(
  "wrap",
  [
    jax_jit,
    JittableModule,
    lambda f: jax_jit(lambda x: jax_jit(f)(x)),
    gradient_checkpoint,
    lambda f: jax_jit(gradient_checkpoint(f)),
  ],
  ids=["jit", "module", "nested", "checkpoint", "jit of checkpoint"],
)
def test_a_compiled_function_notes_the_draws_of_the_eager_one(env, addressed, wrap):
  net = Net()

  def run(f):
    torch.manual_seed(0)
    f(_x())  # compiled before the ledger is opened
    with env.rng.record() as ledger:
      torch.rand(2, device="jax")
      f(_x())
      f(_x())
    return ledger

  eager, compiled = run(net), run(wrap(net))
  assert [draw.index for draw in eager] == list(range(3, 10))
  for name in ("index", "site", "distribution", "shape", "dtype", "key"):
    assert [getattr(draw, name) for draw in compiled] == [
      getattr(draw, name) for draw in eager
    ], name
  eager.require_unique()


@pytest.fixture(params=["order", "site"])
def addressed(request):
  torchax.rng.address_by(request.param)
  yield request.param
  torchax.rng.address_by("order")


def _noise(*_):
  return torch.rand(3, device="jax")


def test_a_loop_notes_the_draws_of_each_turn(env, addressed):
  def body(carry, x):
    return carry + _noise() + torch.randn(3, device="jax"), None

  xs = torch.zeros(4, 3, device="jax")
  with env.rng.record() as looped:
    scan(body, torch.zeros(3, device="jax"), xs)
  torch.manual_seed(0)
  with env.rng.record() as unrolled:
    for x in xs:
      body(x, x)
  assert len(looped) == 8
  assert _keys(looped) == _keys(unrolled)
  assert looped[7].stream == "iteration[3]"


def test_rows_of_a_vmap_note_the_draws_of_a_loop(env, addressed):
  xs = torch.zeros(4, 3, device="jax")
  with env.rng.record() as mapped:
    jax_vmap(lambda x: x + _noise(), randomness="different")(xs)
  torch.manual_seed(0)
  with env.rng.record() as unrolled:
    for _ in xs:
      _noise()
  assert _keys(mapped) == _keys(unrolled)
  assert [draw.stream for draw in mapped] == [f"row[{n}]" for n in range(4)]


def test_branches_and_loops_of_unknown_length_are_named(env):
  flag = torch.tensor(True).to("jax")
  start = (torch.tensor(0).to("jax"), torch.zeros(3, device="jax"))
  with env.rng.record() as ledger:
    cond(flag, _noise, lambda: torch.randn(3, device="jax"))
    while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + _noise()), start)
  assert {"branch 0", "branch 1", "while_loop"} <= {d.stream for d in ledger}
  ledger.require_unique()


def test_a_generator_has_a_stream_of_its_own(env):
  generator = torch.Generator().manual_seed(0)
  drawn = jax_jit(lambda: torch.rand(3, generator=generator, device="jax"))
  with env.rng.record() as ledger:
    torch.rand(3, generator=generator, device="jax")
    drawn()
  assert [draw.stream for draw in ledger] == ["generator"] * 2
  assert not ledger.duplicates()


def test_draws_of_other_threads_are_not_noted(env):
  thread = threading.Thread(target=_noise)
  with env.rng.record() as ledger:
    thread.start()
    thread.join()
    _noise()
  assert len(ledger) == 1


# A key used twice --------------------------------------------------------------------


def _twice_eagerly(env):
  for _ in range(2):
    with env.rng_scope(5):
      _noise()


def _twice_compiled(env):
  def f(key):
    with env.rng_scope(key):
      first = _noise()
    with env.rng_scope(key):
      return first + torch.randn(3, device="jax")

  jax_jit(f)(jax.random.key(0))


def _twice_by_restoring(env):
  state = torch.jax.get_rng_state()
  _noise()
  torch.jax.set_rng_state(state)
  _noise()


def _twice_by_seeding(env):
  torch.manual_seed(3)
  _noise()
  torch.manual_seed(3)
  jax_jit(_noise)()


def _twice_by_a_generator(env):
  for _ in range(2):
    generator = torch.Generator().manual_seed(1)
    torch.rand(3, generator=generator, device="jax")


@pytest.mark.parametrize(
  "draw",
  [
    _twice_eagerly,
    _twice_compiled,
    _twice_by_restoring,
    _twice_by_seeding,
    _twice_by_a_generator,
  ],
)
def test_a_key_used_twice_is_found(env, draw):
  with env.rng.record() as ledger:
    draw(env)
  (group,) = ledger.duplicates()
  assert len(group) == 2
  with pytest.raises(AssertionError, match="used more than once.*draw 0"):
    ledger.require_unique()


def test_a_traced_key_in_two_calls_is_no_duplicate(env):
  def f(key):
    with env.rng_scope(key):
      return _noise()

  compiled = jax_jit(f)
  with env.rng.record() as ledger:
    compiled(jax.random.key(0))
    compiled(jax.random.key(1))
  assert len(ledger) == 2
  ledger.require_unique()


def test_forks_and_scopes_share_no_key(env):
  with env.rng.record() as ledger:
    _noise()
    for scope in (1, env.rng.fork("data"), env.rng.fork("model"), jax.random.key(9)):
      with env.rng_scope(scope):
        _noise()
  assert len(ledger) == 5
  ledger.require_unique()


# explain ------------------------------------------------------------------------------


def test_explain_lists_the_draws_of_a_call_that_is_not_made(env, addressed):
  net = Net()
  torch.rand(2, device="jax")
  before = env.rng.state.state_dict()
  told = torchax.rng.explain(net, _x())
  assert env.rng.state.state_dict() == before
  with env.rng.record() as ledger:
    net(_x())
  assert _keys(told) == _keys(ledger)
  assert [draw.site for draw in told] == SITES


def test_explain_leaves_a_generator_and_the_arguments_alone():
  generator = torch.Generator().manual_seed(0)
  state, x = generator.get_state(), torch.zeros(3, device="jax")

  def f(x, *, times):
    for _ in range(times):
      x.add_(torch.rand(3, generator=generator, device="jax"))
    return x

  told = torchax.rng.explain(f, x, times=2)
  assert [draw.stream for draw in told] == ["generator"] * 2
  assert torch.equal(generator.get_state(), state)
  assert not x.any().item()


def test_explain_of_a_function_that_draws_nothing_is_empty():
  assert len(torchax.rng.explain(torch.sin, _x())) == 0


# Display ------------------------------------------------------------------------------


def test_a_ledger_prints_as_a_table(env):
  with env.rng.record() as ledger:
    Net()(_x())
  lines = str(ledger).splitlines()
  assert lines[0].split()[:4] == ["index", "op", "site", "distribution"]
  assert len(lines) == 2 + len(ledger)
  assert "layers.1.drop" in lines[3]
  assert len({line.index("dropout(") for line in lines if "dropout(" in line}) == 1


def test_a_ledger_exports_its_rows(env):
  with env.rng.record() as ledger:
    Net()(_x())
  rows = ledger.rows()
  assert [row["site"] for row in rows] == SITES
  assert rows[0]["shape"] == (6,)


def test_plot_has_one_row_per_site_and_one_marker_per_draw(env):
  pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is an extra")
  with env.rng.record() as ledger:
    Net()(_x())
    _twice_eagerly(env)
  axes = ledger.plot()
  assert [label.get_text() for label in axes.get_yticklabels()][:2] == SITES[:2]
  assert sum(len(c.get_offsets()) for c in axes.collections) == len(ledger)
  assert [line.get_color() for line in axes.lines] == ["red"]
  pyplot.close(axes.figure)


def test_the_library_does_without_matplotlib():
  code = (
    "import sys; sys.modules['matplotlib'] = None\n"
    "import torchax, torch\n"
    "env = torchax.default_env()\n"
    "with env.rng.record() as ledger: torch.rand(2, device='jax')\n"
    "print(len(ledger))\n"
    "try: ledger.plot()\n"
    "except ImportError as error: print(error)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout.startswith("1\n")
  assert 'pip install "matplotlib>=' in done.stdout


def test_recording_ends_with_its_block_also_after_an_exception(env):
  with pytest.raises(KeyError), env.rng.record() as ledger:
    raise KeyError
  F.dropout(_x(), 0.5)
  assert len(ledger) == 0
