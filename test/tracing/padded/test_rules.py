"""Operations at padded sizes: results, gradients and draws equal the unpadded ones.

Each row runs at all sizes of one bucket with one program. The padding of the arguments
is NaN, or an integer out of range, so padding that reaches a result shows.
"""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tracing.padded.sizes import SIZES, C, close, x_of

from torchax.errors import BucketError
from torchax.interop import jax_jit, torch_view


def with_gradient(function):
  """Return a function of x, with its result and gradient."""

  def both(x):
    x = x.detach().requires_grad_()
    y = function(x)
    weights = torch.linspace(1, 2, y.numel(), device=y.device).reshape(y.shape)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    return y.detach(), gradient

  return both


def causal_attention(x):
  return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def masked_attention(x):
  scores = x @ x.transpose(1, 2) / x.shape[1] ** 0.5
  mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
  return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ x


INDEX = torch.tensor([0, 2, 1])
WEIGHT = torch.linspace(-1, 1, 5 * C).reshape(5, C)
KERNEL = torch.linspace(-1, 1, C * 6 * 3).reshape(6, C, 3)

DIFFERENTIABLE = {
  "elementwise": lambda x: x.tanh() * 2 + x.exp(),
  "sum": lambda x: x.sum(1),
  "mean": lambda x: x.mean(1),
  "mean of all": lambda x: x.mean(),
  "product": lambda x: x.prod(1),
  "maximum": lambda x: x.amax(1),
  "maximum with index": lambda x: x.max(1).values,
  "minimum": lambda x: x.min(1).values,
  "variance": lambda x: x.var(1),
  "norm": lambda x: x.norm(dim=1),
  "logsumexp": lambda x: x.logsumexp(1),
  "softmax": lambda x: x.softmax(1),
  "log_softmax": lambda x: F.log_softmax(x, 1),
  "layer_norm of channels": lambda x: F.layer_norm(x, (C,)),
  "layer_norm of positions": lambda x: F.layer_norm(x.mT, x.mT.shape[-1:]),
  "batch_norm": lambda x: F.batch_norm(x.mT, None, None, training=True),
  "group_norm": lambda x: F.group_norm(x.mT, 2),
  "rms_norm": lambda x: F.rms_norm(x, (C,)),
  "linear": lambda x: F.linear(x, WEIGHT.to(x.device)),
  "matmul over positions": lambda x: x.mT @ x,
  "matmul of positions": lambda x: x @ x.mT,
  "einsum": lambda x: torch.einsum("bnc,bmc->bnm", x, x),
  "causal attention": causal_attention,
  "masked attention": masked_attention,
  "cumsum": lambda x: x.cumsum(1),
  "cumprod": lambda x: x.cumprod(1),
  "cummax": lambda x: x.cummax(1).values,
  "logcumsumexp": lambda x: x.logcumsumexp(1),
  "sort": lambda x: x.sort(1).values,
  "sort descending": lambda x: x.sort(1, descending=True).values,
  "topk": lambda x: x.topk(2, 1).values,
  "topk of all": lambda x: x.topk(x.shape[1], 1).values,
  "median": lambda x: x.median(1).values,
  "flip": lambda x: x.flip(1),
  "roll": lambda x: x.roll(1, 1),
  "first": lambda x: x[:, 0],
  "last": lambda x: x[:, -1],
  "last three": lambda x: x[:, -3:],
  "all but the first": lambda x: x[:, 1:],
  "all but the last": lambda x: x[:, :-1],
  "every second": lambda x: x[:, ::2],
  "shifted difference": lambda x: x[:, 1:] - x[:, :-1],
  "halves": lambda x: x[:, x.shape[1] // 2 :].sum(1),
  "concatenation": lambda x: torch.cat((x, 2 * x), 1),
  "concatenation with fixed": lambda x: torch.cat((x[:, :2], x, x[:, :1]), 1),
  "stack": lambda x: torch.stack((x, x), 1),
  "pad": lambda x: F.pad(x, (0, 0, 2, 1), value=3.0),
  "pad to a fixed size": lambda x: F.pad(x, (0, 0, 0, 9 - x.shape[1])),
  "pad in front to a fixed size": lambda x: F.pad(x, (0, 0, 9 - x.shape[1], 0)),
  "flatten": lambda x: x.flatten(0, 1),
  "flatten positions and channels": lambda x: x.flatten(1),
  "flatten and back": lambda x: x.flatten(0, 1).cumsum(0).view(x.shape),
  "flatten all": lambda x: x.flatten().cumsum(0),
  "repeat": lambda x: x.repeat(1, 2, 1),
  "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
  "expand": lambda x: x[:, None].expand(-1, 2, -1, -1) * 2,
  "index by a constant": lambda x: x[:, INDEX.to(x.device)],
  "index by a range": lambda x: x[:, torch.arange(x.shape[1], device=x.device) // 2],
  "gather": lambda x: x.gather(1, x.argsort(1)),
  "index_select": lambda x: x.index_select(1, torch.arange(3, device=x.device)),
  "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
  "where": lambda x: torch.where(x.sum(1, keepdim=True) > 0, x, -x),
  "tril": lambda x: (x @ x.mT).tril(),
  "diagonal": lambda x: (x @ x.mT).diagonal(0, 1, 2),
  "conv1d": lambda x: F.conv1d(x.mT, KERNEL.to(x.device)),
  "conv1d with padding": lambda x: F.conv1d(x.mT, KERNEL.to(x.device), padding=1),
  "conv1d with stride": lambda x: F.conv1d(x.mT, KERNEL.to(x.device), stride=2),
  "conv_transpose1d": lambda x: F.conv_transpose1d(
    x.mT, KERNEL.to(x.device).transpose(0, 1), stride=2
  ),
  "depthwise conv1d": lambda x: F.conv1d(
    x.mT, KERNEL[:C, :1].to(x.device), padding=1, groups=C
  ),
  "depthwise conv1d of positions": lambda x: F.conv1d(
    x, torch.ones(x.shape[1], 1, 2, device=x.device), groups=x.shape[1]
  ),
  "max_pool1d": lambda x: F.max_pool1d(x.mT, 2),
  "avg_pool1d": lambda x: F.avg_pool1d(x.mT, 2),
  "mean by the size": lambda x: x.sum(1) / x.shape[1],
  "in-place write": lambda x: x.clone().index_fill_(1, INDEX.to(x.device)[1:2], 0.0),
  "slice write": lambda x: torch.slice_scatter(x, x[:, :2] * 3, 1, 1, 3),
  "interpolate": lambda x: F.interpolate(x.mT, scale_factor=2, mode="nearest"),
  "unfold": lambda x: x.unfold(1, 2, 1),
  "chunk": lambda x: x.chunk(2, -1)[1],
  "cdist": lambda x: torch.cdist(x, x[:, :2]),
}


# Lengths that are equal at the first size and differ at a later one.
PROGRAMS = {"conv1d with stride": 2}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_padded_result_and_gradient_equal_unpadded(name):
  function = with_gradient(DIFFERENTIABLE[name])
  padded, inputs = jax_jit(function, buckets={"x": {1: "pow2"}}), [*map(x_of, SIZES)]
  results = [padded(x.to("jax")) for x in inputs]
  assert padded._jitted._counted.programs == PROGRAMS.get(name, 1)
  for x, result in zip(inputs, results):
    close(result, function(x))


def constant(length):
  """Return an array that no operation of the trace has made."""
  return torch_view(jax.device_put(np.arange(float(length), dtype=np.float32)))


OTHERS = {
  "constant of another length": lambda x: (
    x * constant(2 * x.shape[1] + 1)[3].to(x.device)
  ),
  "argmax": lambda x: x.argmax(1),
  "argmin": lambda x: x.argmin(1),
  "argsort": lambda x: x.argsort(1),
  "any": lambda x: (x > 2).any(1),
  "all": lambda x: (x > -2).all(1),
  "count": lambda x: (x > 0).sum(1),
  "count_nonzero": lambda x: torch.count_nonzero(x > 0),
  "mode of integers": lambda x: (x > 0).int().cumsum(1).amax(1),
  "one_hot": lambda x: F.one_hot(x.argmax(-1), C),
  "range": lambda x: torch.arange(x.shape[1], device=x.device),
  "range of floats": lambda x: torch.linspace(0, 1, x.shape[1], device=x.device),
  "reversed cumsum": lambda x: x.flip(1).cumsum(1).flip(1),
  "eye": lambda x: torch.eye(x.shape[1], device=x.device),
  "scatter_add": lambda x: torch.zeros(3, 2, C, device=x.device).scatter_add(
    1, (x > 0).long(), x
  ),
  "index_add": lambda x: torch.zeros(3, x.shape[1], C, device=x.device).index_add(
    1, torch.arange(x.shape[1], device=x.device) // 2, x
  ),
  "index_put": lambda x: torch.index_put(
    x, (torch.arange(3, device=x.device),), x[:, 0, None]
  ),
  "write to the last": lambda x: torch.slice_scatter(x, x[:, :1], 1, -1),
  "bucketize": lambda x: torch.bucketize(x, WEIGHT.to(x.device).flatten()),
  "searchsorted": lambda x: torch.searchsorted(
    x.mT.sort(-1).values.contiguous(), x.mT.contiguous()
  ),
  "quantile": lambda x: x.quantile(0.3, 1),
  "std of all": lambda x: x.std(),
  "cov": lambda x: torch.cov(x[0].mT),
  "nan to num": lambda x: torch.where(x > 0, x, torch.nan).nan_to_num(),
  "number of elements": lambda x: torch.full((2,), float(x.numel()), device=x.device),
  "outer": lambda x: torch.outer(x[0, :, 0], x[0, :, 1]),
  "meshgrid": lambda x: torch.meshgrid(x[0, :, 0], x[1, :, 0], indexing="ij")[1],
  "solve of batches": lambda x: torch.linalg.cholesky(
    x[..., None] * x[..., None, :] + 2 * torch.eye(C, device=x.device)
  ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_padded_result_equals_unpadded(name):
  function = OTHERS[name]
  padded, inputs = jax_jit(function, buckets={"x": {1: "pow2"}}), [*map(x_of, SIZES)]
  results = [padded(x.to("jax")) for x in inputs]
  assert padded._jitted._counted.programs <= 2
  for x, result in zip(inputs, results):
    close([result], [function(x)])


DRAWS = {
  "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5),
  "dropout of channels": lambda x: F.dropout1d(torch.ones_like(x), 0.5),
  "rand": lambda x: torch.rand_like(x),
  "rand in another shape": lambda x: torch.rand(x.shape[1], 3, device=x.device),
  "randn": lambda x: torch.randn(2, x.shape[1], device=x.device),
  "randint": lambda x: torch.randint(0, 100, x.shape, device=x.device),
  "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
  "normal": lambda x: torch.empty_like(x).normal_(1.0, 2.0),
  "exponential": lambda x: torch.empty_like(x).exponential_(),
  "half precision": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
  "multinomial": lambda x: torch.multinomial(x[:, :, 0].exp(), 2),
  "multinomial with replacement": lambda x: torch.multinomial(
    x[:, :, 0].exp(), 2, replacement=True
  ),
  "two draws": lambda x: torch.rand_like(x) + F.dropout(x.exp(), 0.1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_padded_draws_equal_unpadded_bit_for_bit(name):
  function = DRAWS[name]
  padded, plain = jax_jit(function, buckets={"x": {1: "pow2"}}), jax_jit(function)
  inputs = [x_of(n).to("jax") for n in SIZES]
  torch.manual_seed(1)
  results = [padded(x) for x in inputs]
  assert padded._jitted._counted.programs == 1
  torch.manual_seed(1)
  for x, result in zip(inputs, results):
    assert torch.equal(result.cpu(), plain(x).cpu())


REFUSED = {
  "fft": (lambda x: torch.fft.fft(x, dim=1).real, "fft"),
  "solve": (lambda x: torch.linalg.inv(x @ x.mT), "the matrices themselves"),
  "groups of positions": (
    lambda x: F.conv1d(
      torch.cat((x, x), 1),
      torch.ones(x.shape[1], 2, 2, device=x.device),
      groups=x.shape[1],
    ),
    # JAX has the primitive `unstack` since 0.12.
    "A result of `slice` .* at the padded one|The function runs `unstack` .* but",
  ),
  "shrinking size": (lambda x: x[:, : 9 - x.shape[1]].exp(), "shrink"),
  "shrinking constant": (
    lambda x: x * constant(9 - x.shape[1])[0],
    "A constant has the shape .*shrink",
  ),
  "integers below a power of two": (
    lambda x: torch.randint(x.shape[1], (4,), device=x.device),
    "`random_unwrap` .* at this size, but `random_bits`",
  ),
  "other operations": (
    lambda x: x.sin() if x.shape[1] < 7 else x.cos(),
    "`sin` .* at this size, but `cos`",
  ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operation_without_padding_is_refused_by_name(name):
  function, message = REFUSED[name]
  padded = jax_jit(function, buckets={"x": {1: "pow2"}})
  with pytest.raises(BucketError, match=message):
    padded(x_of(5).to("jax"))
