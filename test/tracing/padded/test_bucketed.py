"""Compiled functions with buckets: programs, results, state, draws and errors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchax
from torchax.errors import BucketError
from torchax.interop import jax_jit

POW2 = {"x": {1: "pow2"}}
WORDS, WIDTH, HEADS, MOST = 32, 16, 2, 16


def programs(jitted):
  return jitted._jitted._counted.programs


def numbers(*shape):
  generator = torch.Generator().manual_seed(sum(shape))
  return torch.randn(*shape, generator=generator).to("jax")


# Programs -----------------------------------------------------------------------------


def test_hundred_lengths_compile_eight_programs():
  normalize = jax_jit(lambda x: x.softmax(1).sum(0), buckets=POW2)
  for n in range(1, 101):
    x = numbers(2, n)
    torch.testing.assert_close(normalize(x).cpu(), x.cpu().softmax(1).sum(0))
  assert programs(normalize) == 8


def test_known_length_is_not_traced():
  lengths = []

  @functools.partial(jax_jit, buckets=POW2)
  def f(x):
    lengths.append(x.shape[1])
    return x.mean(1)

  for n in (5, 6, 5, 6, 8):
    f(numbers(2, n))
  assert lengths == [5, 8, 6]


@pytest.mark.parametrize(
  ("sizes", "expected"),
  [
    ("pow2", {3: 4, 4: 4, 9: 16, 0: 0, 1: 1}),
    ([4, 10], {2: 4, 5: 10, 10: 10, 1: 1}),
    (lambda n: -(-n // 6) * 6, {2: 6, 7: 12, 12: 12}),
  ],
)
def test_size_has_the_next_bucket(sizes, expected):
  f = jax_jit(lambda x: x.cumsum(1), buckets={"x": {-1: sizes}})
  for n, padded in expected.items():
    f(numbers(2, n))
    assert f"2x{padded}x" in f.lower(numbers(2, n)).as_text()


def test_two_arguments_have_buckets_of_their_own():
  f = jax_jit(
    lambda x, y: (x[:, :, None] * y[:, None, :]).sum(0),
    buckets={"x": {1: "pow2"}, "y": {1: [4, 8]}},
  )
  for n, m in ((3, 3), (3, 4), (4, 3), (3, 7), (4, 5)):
    x, y = numbers(2, n), numbers(2, m)
    expected = torch.einsum("bn,bm->nm", x.cpu(), y.cpu())
    torch.testing.assert_close(f(x, y).cpu(), expected)
  assert programs(f) <= 4


def test_keyword_container_and_static_arguments():
  @functools.partial(jax_jit, buckets={"batch": {1: "pow2"}}, static_argnames="power")
  def f(scale, *, batch, power, flag=True):
    assert flag is False
    return scale * (batch["x"] * batch["y"]).sum(1) ** power

  for n in (5, 7):
    x, y = numbers(2, n), numbers(2, n)
    result = f(2.0, batch={"x": x, "y": y}, power=2, flag=False)
    torch.testing.assert_close(result.cpu(), 2 * (x * y).sum(1).cpu() ** 2)
  assert programs(f) == 1


def test_function_runs_after_its_programs_were_dropped():
  f = jax_jit(lambda x: x.mean(1), buckets=POW2)
  x = numbers(2, 5)
  before = f(x)
  torchax.clear_caches()
  assert programs(f) == 0 and torch.equal(f(x), before)


def test_explanation_names_the_operands():
  f = jax_jit(lambda x: F.dropout(x, 0.5), buckets=POW2)
  explanation = torchax.explain(f, numbers(2, 5))
  assert list(explanation.operands) == ["x", "random stream"]


def test_function_in_another_trace_runs_at_true_size():
  inner = jax_jit(lambda x: x.sum(1), buckets=POW2)
  outer = jax_jit(lambda x: inner(x) * 2)
  x = numbers(2, 5)
  torch.testing.assert_close(outer(x).cpu(), x.cpu().sum(1) * 2)


def test_slice_of_a_table_as_long_as_the_bucket():
  table = numbers(8, 3)
  f = jax_jit(lambda x: x + table[: x.shape[1]], buckets=POW2)
  for n in (8, 5, 7):
    x = numbers(2, n, 3)
    torch.testing.assert_close(f(x).cpu(), x.cpu() + table.cpu()[:n])


def test_buckets_of_a_compiled_module():
  model = nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)).to("jax")
  options = torchax.CompileOptions(jax_jit_kwargs={"buckets": {"input": {1: "pow2"}}})
  compiled = torchax.compile(model, options)
  for n in (5, 7):
    x = numbers(2, n, 4)
    torch.testing.assert_close(compiled(x).cpu(), model(x).cpu())
  assert programs(compiled.jitted("forward")) == 1


@pytest.mark.parametrize("decorates", [True, False])
def test_buckets_as_options_in_a_dict(decorates):
  options = {"buckets": POW2}
  f = lambda x: x.mean(1)  # noqa: E731
  jitted = jax_jit(**options)(f) if decorates else jax_jit(f, options)
  for n in (5, 7):
    jitted(numbers(2, n))
  assert programs(jitted) == 1


# State, gradients and draws -----------------------------------------------------------


class Block(nn.Module):
  def __init__(self):
    super().__init__()
    self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    self.dropout = nn.Dropout(0.2)

  def forward(self, x):
    batch, length, _ = x.shape
    query, key, value = [
      each.view(batch, length, HEADS, -1).transpose(1, 2)
      for each in self.qkv(self.norm1(x)).split(WIDTH, -1)
    ]
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
    return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class LanguageModel(nn.Module):
  def __init__(self):
    super().__init__()
    self.words = nn.Embedding(WORDS, WIDTH)
    self.positions = nn.Parameter(torch.randn(MOST, WIDTH))
    self.block, self.norm = Block(), nn.LayerNorm(WIDTH)

  def forward(self, tokens):
    x = self.words(tokens) + self.positions[: tokens.shape[1]]
    return self.norm(self.block(x)) @ self.words.weight.T


class Recurrent(nn.Module):
  def __init__(self, kind):
    super().__init__()
    self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    self.layers = kind(WIDTH, WIDTH, batch_first=True)

  def forward(self, tokens):
    return self.head(self.layers(self.words(tokens))[0])


class Convolutional(nn.Module):
  def __init__(self):
    super().__init__()
    self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)

  def forward(self, tokens):
    return self.head(self.norm(self.conv(self.words(tokens).mT)).relu().mT)


class Training:
  """Steps on batches of several sizes and lengths."""

  def __init__(self, make, optimizer, device, wrap):
    torch.manual_seed(0)
    self.device, self.model = device, make().to(device)
    self.optimizer = optimizer(self.model.parameters())
    self.run_step = wrap(self.step)

  def step(self, tokens, targets):
    self.optimizer.zero_grad()
    logits = self.model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    self.optimizer.step()
    return loss

  def run(self, shapes):
    torch.manual_seed(1)
    losses = []
    for shape in shapes:
      generator = torch.Generator().manual_seed(sum(shape))
      pair = torch.randint(WORDS, (2, *shape), generator=generator).to(self.device)
      losses.append(self.run_step(pair[0], pair[1]).item())
    return torch.tensor(losses)


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
CPU = ("cpu", lambda step: step)


@pytest.mark.parametrize(
  ("make", "optimizer", "reference"),
  [
    # CPU torch draws other masks of dropout.
    (LanguageModel, SGD, ("jax", jax_jit)),
    (functools.partial(Recurrent, nn.LSTM), SGD, CPU),
    (functools.partial(Recurrent, nn.GRU), ADAM, CPU),
    (Convolutional, SGD, CPU),
  ],
  ids=["transformer", "LSTM", "GRU, AdamW", "convolution"],
)
def test_padded_training_step_equals_unpadded(make, optimizer, reference):
  # Padded in both dimensions, in none and in one, then with the first program again.
  shapes = ((3, 9), (4, 16), (2, 9), (3, 9))
  buckets = {name: {0: "pow2", 1: "pow2"} for name in ("tokens", "targets")}
  padded = Training(make, optimizer, "jax", jax_jit(buckets=buckets))
  plain = Training(make, optimizer, *reference)
  torch.testing.assert_close(padded.run(shapes), plain.run(shapes))
  for ours, theirs in zip(
    padded.model.state_dict().values(), plain.model.state_dict().values()
  ):
    # JAX narrows the counter of the normalization.
    theirs = theirs.to("jax")
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-4, atol=2e-5)
  assert programs(padded.run_step) == 2


def test_argument_written_in_place_keeps_its_size():
  f = jax_jit(lambda x: x.sub_(x.mean(1, keepdim=True)), buckets=POW2)
  for n in (5, 7):
    x = numbers(2, n)
    expected = x.cpu() - x.cpu().mean(1, keepdim=True)
    f(x)
    torch.testing.assert_close(x.cpu(), expected)


def test_backward_outside_of_padded_function_is_padded_too():
  model = nn.Linear(4, 3).to("jax")

  def loss(x):
    return F.dropout(model(x), 0.5).softmax(1).square().sum((0, 2)) / x.shape[1]

  padded, plain = jax_jit(loss, buckets=POW2), jax_jit(loss)
  inputs = [numbers(2, n, 4) for n in (5, 6, 8, 7)]
  weights = [torch.linspace(1, 2, x.shape[1]).to("jax") for x in inputs]
  found = []
  for function in (padded, plain):
    torch.manual_seed(0)
    for x, weight in zip(inputs, weights):
      x = x.detach().requires_grad_()
      function(x).backward(weight)
      found.append((x.grad.cpu(), model.weight.grad.cpu()))
      model.weight.grad = None
  for ours, theirs in zip(found[:4], found[4:]):
    torch.testing.assert_close(ours, theirs)
  (bucket,) = padded._jitted._padded._young.values()
  assert [each._counted.programs for each in bucket.backward] == [1]


def test_second_derivative_of_padded_function():
  f = jax_jit(lambda x: (x**3).cumsum(1).sum(), buckets=POW2)
  for n in (5, 7):
    x = numbers(2, n).requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    counts = torch.arange(n, 0, -1)
    torch.testing.assert_close(second.cpu(), 6 * x.detach().cpu() * counts)


def test_draws_after_padded_call_are_those_of_unpadded():
  results = []
  for options in ({"buckets": POW2}, {}):
    torch.manual_seed(3)
    f = jax_jit(lambda x: F.dropout(x, 0.5), **options)
    results.append(
      [f(numbers(2, n)).cpu() for n in (5, 7, 6)] + [torch.rand(3, device="jax").cpu()]
    )
  assert all(map(torch.equal, *results))


# Errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("sizes", "argument", "kind", "message"),
  [
    ({1: [2, 4]}, (2, 5), ValueError, "dimension 1 of 'x' is 5, .* bucket is 4"),
    ({2: "pow2"}, (2, 5), IndexError, "dimension 2 .* shape \\[2, 5\\]"),
    ({1: lambda n: 4}, (2, 5), ValueError, "at least 5 .* returned 4"),
    ({1: "pow2"}, 3, TypeError, "has to be a tensor, but got 3"),
  ],
)
def test_wrong_size_raises_before_anything_runs(sizes, argument, kind, message):
  ran = []

  def f(x):
    ran.append(x)
    return F.dropout(x, 0.5)

  jitted = jax_jit(f, buckets={"x": sizes})
  state = torch.jax.get_rng_state()
  with pytest.raises(kind, match=message):
    jitted(numbers(*argument) if isinstance(argument, tuple) else argument)
  assert not ran and torch.equal(torch.jax.get_rng_state(), state)


def test_refused_operation_advances_no_state():
  counter = torch.zeros((), device="jax")

  def f(x):
    counter.add_(1)
    return torch.fft.fft(F.dropout(x, 0.5)).real

  state = torch.jax.get_rng_state()
  with pytest.raises(BucketError, match=r"`fft` \(.*test_bucketed.py:\d+\) cannot"):
    jax_jit(f, buckets=POW2)(numbers(2, 5))
  assert counter.item() == 0 and torch.equal(torch.jax.get_rng_state(), state)


def test_function_that_fails_at_padded_size_names_it():
  def f(x):
    if x.shape[1] > 6:
      raise ValueError("too long")
    return x

  with pytest.raises(ValueError, match="too long") as caught:
    jax_jit(f, buckets=POW2)(numbers(2, 5))
  assert any("padded sizes [[2, 8]]" in note for note in caught.value.__notes__)
