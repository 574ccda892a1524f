"""`F.multi_head_attention_forward` against CPU torch, in usual and unusual cases."""

import copy

import pytest
import torch
from ops.harness import floats

import torchax
from torchax.core import program_limit
from torchax.interop import jax_jit
from torchax.ops.jaten import _blockwise_attention as blockwise

LENGTH, POSITIONS, BATCH, WIDTH, HEADS = 5, 7, 3, 8, 2
X = floats(LENGTH, BATCH, WIDTH)
MEMORY = floats(POSITIONS, BATCH, WIDTH, seed=1)
VALUE = floats(POSITIONS, BATCH, WIDTH, seed=2)
INPUTS = {
  "of itself": (X, X, X),
  "of a memory": (X, MEMORY, MEMORY),
  "of keys and values": (X, MEMORY, VALUE),
}


def _hidden(*shape):
  hidden = floats(*shape, seed=3) > 0.3
  hidden[..., 0] = False
  return hidden


# Arguments by the number of positions.
MASKS = {
  "no mask": lambda s: {},
  "bool": lambda s: {"attn_mask": _hidden(LENGTH, s)},
  "added": lambda s: {"attn_mask": floats(LENGTH, s, seed=4)},
  "a head each": lambda s: {"attn_mask": _hidden(BATCH * HEADS, LENGTH, s)},
  "padding": lambda s: {"key_padding_mask": _hidden(BATCH, s)},
  "bool and padding": lambda s: {
    "attn_mask": _hidden(LENGTH, s),
    "key_padding_mask": _hidden(BATCH, s),
  },
}
WEIGHTS = {
  "without": {"need_weights": False},
  "averaged": {},
  "of each head": {"average_attn_weights": False},
}


def _module(**options):
  torch.manual_seed(0)
  module = torch.nn.MultiheadAttention(WIDTH, HEADS, **options)
  with torch.no_grad():
    for parameter in module.parameters():  # biases are zero by default
      parameter.normal_(std=0.5)
  return module


def _run(device, module, inputs, kwargs):
  """Return results, weights, and gradients of inputs and parameters."""
  module = copy.deepcopy(module).to(device)
  moved = {id(t): t.to(device, copy=True).requires_grad_() for t in inputs}
  kwargs = {
    name: value.to(device) if isinstance(value, torch.Tensor) else value
    for name, value in kwargs.items()
  }
  output, weights = module(*[moved[id(t)] for t in inputs], **kwargs)
  loss = output.square().sum()
  if weights is not None:
    loss = loss + weights.square().sum()
  loss.backward()
  leaves = [*moved.values(), *module.parameters()]
  return [output, weights, *[leaf.grad for leaf in leaves]]


def _compare(module, inputs, kwargs):
  expected = _run("cpu", module, inputs, kwargs)
  with torchax.default_env():
    found = _run("jax", module, inputs, kwargs)
  for ours, theirs in zip(found, expected, strict=True):
    if theirs is None:
      assert ours is None
    else:
      torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_multi_head_attention_matches_cpu_torch(inputs, masks, weights):
  _compare(_module(), inputs, {**masks(inputs[1].shape[0]), **weights})


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_error_is_at_most_torchs(dtype, weights):
  module = _module()
  expected = module(X, X, X, need_weights=weights)
  halves = copy.deepcopy(module).to(dtype)
  theirs = halves(*[X.to(dtype)] * 3, need_weights=weights)
  with torchax.default_env():
    x = X.to("jax", dtype)
    ours = halves.to("jax")(x, x, x, need_weights=weights)
  for exact, found, torchs in zip(expected, ours, theirs, strict=True):
    if exact is not None:
      assert found.dtype == dtype
      error = (found.cpu().float() - exact).abs().max()
      assert error <= 2 * (torchs.float() - exact).abs().max()


OTHERS = {
  "no biases": (dict(bias=False), INPUTS["of itself"]),
  "biases of keys and values": (dict(add_bias_kv=True), INPUTS["of a memory"]),
  "zeros to attend to": (dict(add_zero_attn=True), INPUTS["of a memory"]),
  "widths of their own": (
    dict(kdim=4, vdim=6),
    (X, MEMORY[..., :4].clone(), VALUE[..., :6].clone()),
  ),
  "without a batch": ({}, (X[:, 0].clone(),) * 3),
  "the batch first": (dict(batch_first=True), INPUTS["of itself"]),
}


@pytest.mark.parametrize("row", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("weights", [True, False])
def test_unusual_calls_match_cpu_torch(row, weights):
  options, inputs = row
  _compare(_module(**options), inputs, {"need_weights": weights})


def test_a_usual_call_is_two_programs():
  """The dropout mask, which other sizes share, and the rest."""
  with torchax.default_env():
    module, x = _module(dropout=0.5).to("jax"), X.to("jax")
    torchax.clear_caches()
    with torch.no_grad():
      before = program_limit.count()
      module(x, x, x, need_weights=False)
      assert program_limit.count() - before == 2


@pytest.mark.parametrize("weights", [True, False])
def test_dropout_draws_the_same_everywhere(weights):
  module = _module(dropout=0.5).to("jax")
  x = X.to("jax")

  def drawn(call):
    torch.manual_seed(3)
    return call(x)

  def attend(x):
    return module(x, x, x, need_weights=weights)[0]

  outside = drawn(attend)
  with torchax.default_env():
    eager = drawn(attend)
    jitted = drawn(jax_jit(attend))
    compiled = drawn(torch.compile(attend, backend="jax"))
  for found in (eager, jitted, compiled):
    torch.testing.assert_close(found, outside, rtol=1e-5, atol=1e-5)


def test_dropout_keeps_its_rate_and_mean():
  """All weights are equal, so the output of a head is the fraction that is kept."""
  length, p = 64, 0.25
  module = torch.nn.MultiheadAttention(4, 1, dropout=p, bias=False)
  with torch.no_grad():
    module.in_proj_weight.zero_()
    module.in_proj_weight[8:] = torch.eye(4)
    module.out_proj.weight.copy_(torch.eye(4))
  module.to("jax")
  with torchax.default_env():
    torch.manual_seed(0)
    x = torch.ones(length, 64, 4, device="jax")
    output = module(x, x, x, need_weights=False)[0][..., 0].cpu()
  # Each is the mean of `length` numbers, 0 or 1 / (1 - p).
  spread = (p / (1 - p) / length) ** 0.5
  count = output.numel()
  assert abs(output.mean() - 1) < 5 * spread / count**0.5
  assert abs(output.std() / spread - 1) < 5 / (2 * count) ** 0.5


WRONG = {
  "heads": dict(num_heads=3),
  "width": dict(embed_dim_to_check=6),
  "a mask": dict(attn_mask=torch.zeros(LENGTH, 3)),
  "padding": dict(key_padding_mask=torch.zeros(BATCH, 2, dtype=torch.bool)),
  "padding of integers": dict(key_padding_mask=torch.zeros(BATCH, LENGTH).long()),
  "the hint without a mask": dict(is_causal=True),
  "no weight": dict(in_proj_weight=None),
  "dropout": dict(dropout_p=1.5),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_refused_arguments_raise_torchs_message(wrong):
  module = _module()

  def call(device):
    given = dict(
      query=X,
      key=X,
      value=X,
      embed_dim_to_check=WIDTH,
      num_heads=HEADS,
      in_proj_weight=module.in_proj_weight,
      in_proj_bias=module.in_proj_bias,
      bias_k=None,
      bias_v=None,
      add_zero_attn=False,
      dropout_p=0.0,
      out_proj_weight=module.out_proj.weight,
      out_proj_bias=module.out_proj.bias,
    )
    given = {**given, **wrong}
    given = {
      name: value.detach().to(device) if isinstance(value, torch.Tensor) else value
      for name, value in given.items()
    }
    return torch.nn.functional.multi_head_attention_forward(**given)

  with pytest.raises(Exception) as expected:
    call("cpu")
  with torchax.default_env(), pytest.raises(expected.type) as found:
    call("jax")
  assert str(found.value).startswith(str(expected.value))


@pytest.mark.parametrize("wish", ["auto", "blockwise"])
def test_requested_form_runs_scaled_dot_product_attention(wish, monkeypatch):
  """So it uses blocks of keys or a device's kernel, and draws the same mask."""
  taken = []

  def attention(*args, **kwargs):
    taken.append(args)
    return blockwise_attention(*args, **kwargs)

  blockwise_attention = blockwise.attention
  monkeypatch.setattr(blockwise, "attention", attention)
  env = torchax.default_env()
  monkeypatch.setattr(env.config, "attention", wish)
  module, x = _module(dropout=0.5).to("jax"), X.to("jax")
  with env, torch.no_grad():
    torch.manual_seed(3)
    found = module(x, x, x, need_weights=False)[0]
    env.config.attention = "plain"
    torch.manual_seed(3)
    torch.testing.assert_close(found, module(x, x, x, need_weights=False)[0])
  assert bool(taken) == (wish == "blockwise")
