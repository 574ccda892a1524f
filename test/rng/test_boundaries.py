"""Boundaries pass arguments, shardings and in-place changes correctly.

Boundaries are `jax_jit`, `jax_value_and_grad`, `gradient_checkpoint` and
`JittableModule`. Laws of their draws are in `test_laws.py`.
"""

import jax
import pytest
import torch
import torch.nn.functional as F
from rng.boundaries import all_equal, drop
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.interop import (
  JittableModule,
  gradient_checkpoint,
  jax_jit,
  jax_value_and_grad,
  scan,
)


def _x(n=6) -> torch.Tensor:
  return torch.arange(1.0, n + 1).to("jax")


# The user's arguments are unchanged --------------------------------------------------


def test_static_arguments_count_the_users_arguments():
  seen = []

  def f(p, x, flag, *, name="a"):
    seen.append((p, flag, name))
    return F.dropout(x, p) if flag else x

  x = _x(16)
  for kwargs in (
    {"static_argnums": (0, 2), "static_argnames": "name"},
    {"static_argnums": (0, -1), "static_argnames": ("name",)},
    {"static_argnums": (-3, 2), "static_argnames": "name"},
  ):
    compiled = jax_jit(f, kwargs)
    torch.manual_seed(0)
    outs = [compiled(0.5, x, True, name="b"), compiled(0.25, x, False, name="c")]
    assert seen[-2:] == [(0.5, True, "b"), (0.25, False, "c")]
    torch.manual_seed(0)
    assert all_equal(outs, [F.dropout(x, 0.5), x])


@pytest.mark.parametrize("argnums", [1, (1,)], ids=repr)
def test_only_the_donated_argument_is_given_away(argnums):
  compiled = jax_jit(lambda x, y: (drop(x), y + 1), {"donate_argnums": argnums})
  for _ in range(2):
    x, y = _x(64), _x(64)
    array_x, array_y = x.jax(), y.jax()
    kept, bumped = compiled(x, y)
    assert torch.equal(bumped, _x(64) + 1)
    assert array_y.is_deleted() and not array_x.is_deleted()
    assert torch.equal((kept - _x(64)).abs(), _x(64)), "each is 0 or twice x"
    assert 0 < kept.count_nonzero() < 64


def test_a_seed_after_donation_still_works():
  compiled = jax_jit(drop, {"donate_argnums": 0})
  first = compiled(_x(64))
  torch.manual_seed(0)
  assert torch.equal(compiled(_x(64)), first)


def _sharding():
  mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


@pytest.mark.parametrize("whole", [False, True], ids=["one by one", "for all"])
def test_shardings_apply_to_the_users_arguments_and_results(whole):
  sharding = _sharding()
  options = {
    "in_shardings": sharding if whole else (sharding, {"y": sharding}),
    "out_shardings": sharding if whole else (sharding, None),
  }
  compiled = jax_jit(lambda x, tree: (drop(x), tree["y"] * 2), options)
  x = _x(32)
  masked, doubled = compiled(x, {"y": x})
  torch.manual_seed(0)
  assert torch.equal(masked, drop(x)) and torch.equal(doubled, x * 2)
  assert masked.jax().sharding.is_equivalent_to(sharding, 1)


def test_keyword_arguments_are_operands_as_positional_ones():
  traces = []

  def f(x, *, scale, extra=None):
    traces.append(None)
    return drop(x) * scale["a"] + (0 if extra is None else extra)

  compiled = jax_jit(f)
  x = _x(32)
  expected = [drop(x) * 2, drop(x) * 3, drop(x) * 2 + x]
  torch.manual_seed(0)
  drawn = [compiled(x, scale={"a": torch.tensor(2.0).to("jax")})]
  drawn += [compiled(x, scale={"a": torch.tensor(3.0).to("jax")})]
  assert len(traces) == 1
  drawn += [compiled(x, scale={"a": torch.tensor(2.0).to("jax")}, extra=x)]
  assert all_equal(drawn, expected)


def test_argnums_of_value_and_grad_count_the_users_arguments():
  def f(x, y):
    return (2 * x * drop(torch.ones(6, device="jax")) + 3 * y).sum()

  x, y = _x(), _x() + 1
  for argnums, place in ((0, 0), (1, 1), (-1, 1), ((0, 1), None), ((-1, 0), None)):
    torch.manual_seed(0)
    mask = drop(torch.ones(6, device="jax"))
    grads = {0: 2 * mask, 1: torch.full_like(y, 3.0), -1: torch.full_like(y, 3.0)}
    torch.manual_seed(0)
    _, found = jax_value_and_grad(f, {"argnums": argnums})(x, y)
    if place is not None:
      assert torch.equal(found, grads[place])
    else:
      assert all_equal(list(found), [grads[number] for number in argnums])


def test_tensor_passed_twice_has_one_gradient_per_argument():
  step = jax_value_and_grad(lambda x, y: (2 * x + 3 * y).sum(), {"argnums": (0, 1)})
  x = _x()
  _, (of_x, of_y) = step(x, x)
  assert of_x.tolist() == [2.0] * 6
  assert of_y.tolist() == [3.0] * 6


def test_gradient_checkpoint_static_argnums_count_user_arguments():
  x = _x(32)
  expected = F.dropout(x, 0.25)
  for argnums in ((1,), (-1,)):
    torch.manual_seed(0)
    checkpointed = gradient_checkpoint(F.dropout, {"static_argnums": argnums})
    assert torch.equal(checkpointed(x, 0.25), expected)


# Changes reach the caller -----------------------------------------------------------


def test_batch_norm_in_a_jittable_module_updates_its_statistics(env):
  def model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
      torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2)
    ).to("jax")

  plain, inner = model(), model()
  compiled = JittableModule(inner)
  x = torch.arange(32.0).view(8, 4).to("jax")
  outs = []
  for module in (plain, compiled):
    torch.manual_seed(2)
    with env:
      outs.append([module(x), module(x * 2)])
  for first, second in zip(*outs):
    torch.testing.assert_close(first.cpu(), second.cpu(), rtol=1e-6, atol=1e-6)
  for name, buffer in plain.named_buffers():
    mate = dict(inner.named_buffers())[name]
    torch.testing.assert_close(buffer.cpu(), mate.cpu(), rtol=1e-6, atol=1e-6)
  assert inner[0].num_batches_tracked.item() == 2
  assert inner[0].running_mean.abs().sum().item() > 0


def test_jittable_module_applies_dropout_only_in_training():
  module = JittableModule(torch.nn.Dropout(0.5))
  x = torch.ones(64, device="jax")
  assert set(module(x).tolist()) == {0.0, 2.0}
  module.eval()
  assert torch.equal(module(x), x)
  module.train()
  assert set(module(x).tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("of", ["module", "function", "loop"])
def test_compiled_function_follows_the_training_mode_of_modules(of):
  drop = torch.nn.Dropout(0.5)
  x, traces = torch.ones(64, device="jax"), []

  def f(x):
    traces.append(None)
    return drop(x)

  def body(carry, _):
    return f(carry), None

  run = {
    "module": jax_jit(drop),
    "function": jax_jit(f),
    "loop": lambda x: scan(body, x, length=1)[0],
  }[of]
  assert set(run(x).tolist()) == {0.0, 2.0}
  drop.eval()
  assert torch.equal(run(x), x)
  drop.train()
  assert set(run(x).tolist()) == {0.0, 2.0}
  count = len(traces)
  drop.eval()
  run(x)
  assert len(traces) == count  # both programs are compiled already


@pytest.mark.parametrize("wrap", [jax_jit, gradient_checkpoint])
def test_a_draw_in_place_reaches_the_callers_argument(wrap):
  x, y = torch.zeros(8, device="jax"), torch.zeros(8, device="jax")
  x.uniform_()
  torch.manual_seed(0)
  wrap(lambda t: t.uniform_().sum())(y)
  assert torch.equal(y, x) and y.any().item()


def test_a_draw_in_place_reaches_a_closed_over_tensor():
  noise, expected = torch.zeros(8, device="jax"), torch.zeros(8, device="jax")
  for _ in range(3):
    expected.normal_()
  torch.manual_seed(0)
  compiled = jax_jit(lambda: noise.normal_().sum())
  for _ in range(3):
    compiled()
  assert torch.equal(noise, expected)


def test_a_draw_in_place_reaches_the_base_of_a_view():
  base = torch.zeros(4, 2, device="jax")
  jax_jit(lambda: base[1:3].uniform_(1.0, 2.0).sum())()
  assert (base > 0).all(1).tolist() == [False, True, True, False]


def test_gradients_of_closed_over_leaves_reach_the_caller():
  def run(wrap):
    torch.manual_seed(0)
    weight = torch.ones(64, device="jax", requires_grad=True)

    def step(x):
      (weight * drop(x)).sum().backward()

    stepped = wrap(step)
    for _ in range(2):
      stepped(torch.ones(64, device="jax"))
    return weight.grad

  eager, compiled = run(lambda step: step), run(jax_jit)
  assert eager is not None and set(eager.tolist()) == {0.0, 2.0, 4.0}
  assert torch.equal(eager, compiled)


def test_an_exception_leaves_the_callers_tensors_as_they_were():
  x, noise = torch.zeros(4, device="jax"), torch.zeros(4, device="jax")

  def f(x):
    x.uniform_()
    noise.normal_()
    raise KeyError

  for wrap in (jax_jit, lambda f: jax_jit(gradient_checkpoint(f))):
    with pytest.raises(KeyError):
      wrap(f)(x)
  assert not x.any().item() and not noise.any().item()


@pytest.mark.parametrize("form", ["ours", "torch", "torch, reentrant", "in jit"])
def test_rrelu_in_a_checkpoint_has_the_gradient_of_its_slopes(form):
  module = torch.nn.RReLU()
  wrapped = {
    "ours": gradient_checkpoint(module),
    "torch": lambda x: checkpoint(module, x, use_reentrant=False),
    "torch, reentrant": lambda x: checkpoint(module, x, use_reentrant=True),
    "in jit": jax_jit(gradient_checkpoint(module)),
  }[form]
  x = torch.linspace(-2, 1, 9).to("jax").requires_grad_()
  with torchax.default_env():
    torch.manual_seed(3)
    expected = module(x)
    torch.manual_seed(3)
    out = wrapped(x)
    out.sum().backward()
  torch.testing.assert_close(out, expected)
  torch.testing.assert_close(x.grad * x, out)
