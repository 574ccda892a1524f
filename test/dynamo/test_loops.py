"""Loops of `torch._higher_order_ops`: eager, in `jax_jit` and in `torch.compile`."""

import jax
import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import (
  associative_scan,
  associative_scan_op,
)
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

import torchax
from torchax import rng
from torchax.errors import RngError
from torchax.interop import jax_jit

X = torch.linspace(-1.0, 2.0, 12).reshape(4, 3)

# On jax tensors and on plain tensors.
WAYS = {
  "eager": (lambda function: function, "jax"),
  "jit": (jax_jit, "jax"),
  "compile": (lambda f: torch.compile(f, backend="jax", fullgraph=True), "jax"),
  "plain": (lambda f: torch.compile(f, backend="jax", fullgraph=True), "cpu"),
}
each_way = pytest.mark.parametrize("way", WAYS)


def running_sums(x):
  return scan(lambda total, row: (total + row, total * row), x[0].clone(), x)


def reversed_columns(x):
  scale = x.sum()  # a captured tensor
  return scan(
    lambda total, column: (total + column * scale, total.sin()),
    x[:, 0].clone(),
    x,
    dim=1,
    reverse=True,
  )


def products(x):
  return associative_scan(torch.mul, x, 0, combine_mode="generic")


def fused_products(x):
  return associative_scan_op(lambda a, b: (a * b,), (x,), ())[0]


def mapped(x):
  return map_slices(lambda row, y: row.sin() * y.sum(), x, x * 2)


def powers(x):
  start = torch.zeros((), dtype=torch.int64, device=x.device)
  return torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * x), (start, x))[
    1
  ]


def chosen(x):
  return torch.cond(x.sum() > 0, torch.sin, lambda x: 3 * x, (x,))


@torch.compiler.nested_compile_region
def region(x):
  return x.sin() * x


def regions(x):
  return region(x) + region(2 * x)


def nested(x):
  def step(total, row):
    inner = scan(lambda a, b: (a + b, a * b), row[0].clone(), row)[1]
    return total + torch.cond(row.sum() > 0, torch.sin, torch.cos, (row,)), inner

  return scan(step, x[0].clone(), x)


LOOPS = [
  nested,
  running_sums,
  reversed_columns,
  products,
  mapped,
  powers,
  chosen,
  regions,
]
each_loop = pytest.mark.parametrize("function", LOOPS, ids=lambda f: f.__name__)


@each_way
@each_loop
def test_loops_and_gradients_equal_cpu_torch(function, way):
  make, device = WAYS[way]
  # XLA cannot differentiate a loop of unknown length in reverse.
  has_gradient = function is not powers or way == "eager"

  def results(function, device):
    x = X.clone().to(device).requires_grad_(has_gradient)
    out = torch.utils._pytree.tree_leaves(function(x))
    if x.requires_grad:
      sum(part.square().sum() for part in out).backward()
      out.append(x.grad)
    return [part.detach().cpu() for part in out]

  expected = results(function, "cpu")
  torch.testing.assert_close(results(make(function), device), expected)


@pytest.mark.parametrize("way", ["eager", "jit", "compile"])
def test_while_loop_writes_to_a_captured_tensor(way):
  def function(x, y):
    def body(i, x):
      y.add_(1)
      return i + 1, x + y

    start = torch.zeros((), dtype=torch.int32, device=x.device)
    return torch.while_loop(lambda i, x: i < 3, body, (start, x))[1], y

  make, _ = WAYS[way]
  x, y = X.clone(), torch.ones(3)
  arguments = x.to("jax"), y.to("jax")
  with torch.no_grad():
    results, expected = make(function)(*arguments), function(x, y)
  torch.testing.assert_close([t.cpu() for t in results], list(expected))


def test_map_refuses_writes_to_its_slices():
  """torch refuses them itself before its release 2.15."""
  with pytest.raises(RuntimeError, match="mutation|writes in place"):
    map_slices(lambda row: row.mul_(2) + 1, X.to("jax"))


def test_pointwise_associative_scan_equals_cpu_torch():
  for x in (X, X.to("jax")):
    out = fused_products(x) if x is X else jax_jit(fused_products)(x)
    torch.testing.assert_close(out.cpu(), X.cumprod(0))


def test_compiled_scan_is_one_loop():
  x = X.to("jax")
  text = str(jax.make_jaxpr(torchax.interop.jax_view(jax_jit(running_sums)))(x.jax()))
  assert text.count("scan[") == 1


@pytest.mark.parametrize("way", ["jit", "compile", "plain"])
def test_compiled_while_loop_has_no_gradient(way):
  make, device = WAYS[way]
  x = X.clone().to(device).requires_grad_()
  error = "Reverse-mode differentiation|gradient of a torch.while_loop depends"
  with pytest.raises(Exception, match=error):
    make(powers)(x).sum().backward()


def test_number_in_the_carry_raises():
  with pytest.raises(Exception, match="expects tensors in its carry, but got int"):
    torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, 2 * x), (0, X.to("jax")))


# Draws --------------------------------------------------------------------------------


def drawing_scan(x):
  return scan(
    lambda total, row: (
      total + torch.rand_like(total),
      F.dropout(row, 0.5) + torch.rand_like(row),
    ),
    x[0].clone(),
    x,
  )


def unrolled_scan(x):
  total, outputs = x[0].clone(), []
  for row in x:
    total = total + torch.rand_like(total)
    outputs.append(F.dropout(row, 0.5) + torch.rand_like(row))
  return total, torch.stack(outputs)


def drawing_map(x):
  return map_slices(lambda row: row * torch.rand_like(row), x)


def unrolled_map(x):
  return torch.stack([row * torch.rand_like(row) for row in x])


@torch.compiler.nested_compile_region
def drawing_region(x):
  return x.sin() * torch.rand_like(x)


def drawing_regions(x):
  return drawing_region(x) + drawing_region(2 * x)


def unrolled_regions(x):
  return x.sin() * torch.rand_like(x) + (2 * x).sin() * torch.rand_like(x)


class Layers(torch.nn.Module):
  def __init__(self, unrolled: bool = False):
    super().__init__()
    self.drop, self.unrolled = torch.nn.Dropout(0.5), unrolled

  def forward(self, x):
    if self.unrolled:
      return torch.stack([self.drop(row) for row in x])
    # Dropout returns its argument in evaluation, which torch 2.15 refuses as a result.
    return scan(lambda total, row: (total + row, 1 * self.drop(row)), x[0].clone(), x)[
      1
    ]


DRAWING = [
  (drawing_scan, unrolled_scan),
  (drawing_map, unrolled_map),
  (drawing_regions, unrolled_regions),
  (Layers(), Layers(unrolled=True)),
]


def drawn(function, x):
  """Return two results, the sites of the first one's draws, and a number after them."""
  torch.manual_seed(3)
  with torchax.default_env() as env:
    with env.rng.record() as ledger:
      first = function(x)
    results = [first, function(x)]
    after = torch.rand(1, device="jax")
  leaves = torch.utils._pytree.tree_leaves((results, after))
  draws = [(draw.site, draw.index, draw.turn) for draw in ledger]
  return [leaf.detach().cpu() for leaf in leaves], draws


@pytest.mark.parametrize("mode", ["order", "site"])
@each_way
@pytest.mark.parametrize(
  "function, unrolled", DRAWING, ids=["scan", "map", "region", "module"]
)
def test_iterations_draw_as_the_unrolled_loop(function, unrolled, way, mode):
  make, device = WAYS[way]
  rng.address_by(mode)
  try:
    expected, expected_draws = drawn(unrolled, X.to("jax"))
    found, draws = drawn(make(function), X.to(device))
  finally:
    rng.address_by("order")
  torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
  if mode == "order":  # graphs follow modules only where numbers depend on it
    draws, expected_draws = ([d[1:] for d in each] for each in (draws, expected_draws))
  assert draws == expected_draws


@each_way
def test_gradients_of_scan_reuse_the_masks(way):
  make, device = WAYS[way]

  def gradient(function, device):
    torch.manual_seed(3)
    x = X.clone().to(device).requires_grad_()
    with torchax.default_env():
      function(x)[1].square().sum().backward()
    return x.grad.cpu()

  expected = gradient(unrolled_scan, "jax")
  torch.testing.assert_close(gradient(make(drawing_scan), device), expected)


def test_gradient_of_plain_map_that_draws_raises():
  """torch maps the body again in the backward pass, with other numbers."""
  compiled = torch.compile(drawing_map, backend="jax", fullgraph=True)
  with pytest.raises(Exception, match="draws numbers in the backward pass") as error:
    compiled(X.clone().requires_grad_())
  assert "RngError" in str(error.value)


def drawing_while(x):
  start = torch.zeros((), dtype=torch.int64, device=x.device)
  return torch.while_loop(
    lambda i, x: i < 3, lambda i, x: (i + 1, x + torch.rand_like(x)), (start, x)
  )[1]


@pytest.mark.parametrize("mode", ["order", "site"])
def test_while_loop_with_gradient_draws_as_the_compiled_loop(mode):
  rng.address_by(mode)
  try:
    expected, _ = drawn(jax_jit(drawing_while), X.to("jax"))
    for x in (X.to("jax"), X.to("jax").requires_grad_()):
      torch.testing.assert_close(drawn(drawing_while, x)[0], expected)
  finally:
    rng.address_by("order")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_while_condition_that_draws_raises(requires_grad):
  x = X.to("jax").requires_grad_(requires_grad)
  before = torchax.default_env().rng.state
  with pytest.raises(RngError, match=r"condition.*draws"):
    torch.while_loop(
      lambda x: torch.rand_like(x).sum() < 3, lambda x: (x + 1,), (x * 1,)
    )
  assert torchax.default_env().rng.state == before


def replayed(x):
  state, first = run_and_save_rng_state(torch.ops.aten.rand_like.default, x)
  between = torch.rand_like(x)
  again = run_with_rng_state(state, torch.ops.aten.rand_like.default, x)
  return first, between, again, torch.rand_like(x)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("way", ["eager", "jit"])
def test_run_with_rng_state_replays_and_restores(way, is_inside):
  function, x = WAYS[way][0](replayed), X.to("jax")
  torch.manual_seed(3)
  expected = [torch.rand(4, 3, device="jax") for _ in range(3)]
  torch.manual_seed(3)
  if is_inside:
    with torchax.default_env():
      first, between, again, after = function(x)
  else:
    first, between, again, after = function(x)
  assert torch.equal(first, again)
  for have, want in zip((first, between, after), expected):
    assert torch.equal(have, want)


# Guards -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "jit", "compile"])
def test_module_in_a_body_is_guarded(way):
  layers = Layers()
  function = WAYS[way][0](layers)
  x = torch.ones(4, 3, device="jax")
  assert not torch.equal(function(x), x)
  layers.eval()
  assert torch.equal(function(x), x)


def test_jitted_loop_over_a_module_is_traced_once():
  linear, traces = torch.nn.Linear(3, 3).to("jax"), []

  def function(x):
    traces.append(len(traces))
    return scan(lambda h, row: (h + linear(row), h * 1), x[0].clone(), x)[1]

  compiled, x = jax_jit(function), torch.ones(4, 3, device="jax")
  compiled(x)
  first = len(traces)
  for _ in range(3):
    compiled(x)
  assert len(traces) == first
