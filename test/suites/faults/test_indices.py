"""Indices, labels, lengths and offsets out of range: never a plausible number.

Each row is a call that CPU torch refuses. If the numbers are known, jax raises torch's
error. In a compiled function the result is unmistakable, and
`Configuration.check_indices` makes it raise.
"""

import contextlib
import re

import jax
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax.interop import jax_jit

W = torch.arange(12.0).reshape(4, 3) + 1
ONE = torch.ones(1, 1)
ROW = torch.ones(1, 3)


def at(*places, **options) -> torch.Tensor:
  return torch.tensor(places, **options)


class Row:
  """Call with a table and a bad index, which both move to jax.

  Args:
    call: `(table, index, *rest) -> tensor`.
    index: bad index.
    table: tensor that is indexed.
    rest: other tensors.
    why: reason why torch's message differs from ours.
  """

  def __init__(self, call, index, table=W, rest=(), why=""):
    self.call, self.tensors = call, (table, index, *rest)
    self.why = why

  def on(self, device):
    return [tensor.to(device) for tensor in self.tensors]


def _put_(x, i, v):
  return x.clone().index_put_((i,), v)


def _ctc(x, labels, steps, lengths):
  return F.ctc_loss(x, labels, steps, lengths)


LOG_PROBS = torch.linspace(0, 1, 15).reshape(5, 1, 3).log_softmax(-1)
PLANE = torch.ones(1, 1, 2, 2)
BAG = "CPU torch has other words for each kernel"

ROWS = {
  "embedding": Row(lambda w, i: F.embedding(i, w), at(9)),
  "embedding of -1": Row(lambda w, i: F.embedding(i, w), at(-1)),
  "embedding with padding": Row(lambda w, i: F.embedding(i, w, 0), at(-1)),
  "embedding_bag": Row(lambda w, i: F.embedding_bag(i, w), at([0, 9])),
  "embedding_bag of -1": Row(lambda w, i: F.embedding_bag(i, w), at([-1])),
  "embedding_bag max": Row(
    lambda w, i: F.embedding_bag(i, w, mode="max"), at([9]), why=BAG
  ),
  "embedding_bag sum": Row(lambda w, i: F.embedding_bag(i, w, mode="sum"), at([9])),
  "offsets beyond": Row(
    lambda w, o: F.embedding_bag(at(1, 2).to(w.device), w, o), at(0, 9)
  ),
  "offsets from 1": Row(
    lambda w, o: F.embedding_bag(at(1, 2).to(w.device), w, o), at(1, 2), why=BAG
  ),
  "gather": Row(lambda w, i: w.gather(0, i), at([9])),
  "gather of -1": Row(lambda w, i: w.gather(1, i), at([-1])),
  "gather from integers": Row(lambda w, i: w.gather(0, i), at([9]), W.int()),
  "gather from a number": Row(lambda w, i: w.gather(0, i), at(1), torch.tensor(2.0)),
  "take": Row(torch.take, at(99)),
  "take from the end": Row(torch.take, at(-13)),
  "take_along_dim": Row(lambda w, i: w.take_along_dim(i), at(99)),
  "index_select": Row(lambda w, i: w.index_select(0, i), at(9)),
  "index_select of -1": Row(lambda w, i: w.index_select(0, i), at(-1)),
  "index": Row(lambda w, i: w[i], at(9)),
  "index from the end": Row(lambda w, i: w[i], at(-5)),
  "index of the second dimension": Row(
    lambda w, i: w[:, i], at(3), why="CPU torch counts the dimensions with an index"
  ),
  "index of both": Row(lambda w, i: w[torch.zeros_like(i), i], at(3)),
  "index of integers": Row(lambda w, i: w[i], at(9), W.to(torch.uint8)),
  "index by a number": Row(lambda w, i: w[i], at(9)[0]),
  "index_put": Row(_put_, at(9), rest=(ROW,)),
  "index_put from the end": Row(_put_, at(0, -5), rest=(ROW,)),
  "index_put added": Row(
    lambda x, i, v: x.index_put((i,), v, accumulate=True), at(9), rest=(ROW,)
  ),
  "index_put of integers added": Row(
    lambda x, i, v: x.index_put((i,), v, accumulate=True),
    at(9, -5),
    W.int(),
    (ROW.int(),),
  ),
  "assignment": Row(lambda x, i: _assigned(x, i), at(9)),
  "assignment by a number": Row(lambda x, i: _assigned(x, i), at(9)[0]),
  "index_add": Row(lambda x, i, v: x.index_add(0, i, v), at(9), rest=(ROW,)),
  "index_add of -1": Row(
    lambda x, i, v: x.index_add(1, i, v), at(-1), rest=(torch.ones(4, 1),)
  ),
  "index_add to a row": Row(
    lambda x, i, v: x.index_add(0, i, v), at(9), torch.ones(3), (torch.ones(1),)
  ),
  "index_copy": Row(lambda x, i, v: x.index_copy(0, i, v), at(9), rest=(ROW,)),
  "index_copy of -1": Row(lambda x, i, v: x.index_copy(0, i, v), at(-1), rest=(ROW,)),
  "index_fill": Row(lambda x, i: x.index_fill(0, i, 1.0), at(9)),
  "index_fill from the end": Row(lambda x, i: x.index_fill(0, i, 1.0), at(-5)),
  "index_reduce": Row(
    lambda x, i, v: x.index_reduce(0, i, v, "prod"), at(9), rest=(ROW,)
  ),
  "index_reduce of -1": Row(
    lambda x, i, v: x.index_reduce(0, i, v, "amax", include_self=False),
    at(-1),
    rest=(ROW,),
  ),
  "scatter": Row(lambda x, i, v: x.scatter(0, i, v), at([9]), rest=(ONE,)),
  "scatter of -1": Row(lambda x, i, v: x.scatter(0, i, v), at([-1]), rest=(ONE,)),
  "scatter of a number": Row(lambda x, i: x.scatter(0, i, 1.0), at([9])),
  "scatter of integers": Row(lambda x, i: x.scatter(0, i, 1), at([9]), W.int()),
  "scatter_": Row(lambda x, i: x.clone().scatter_(0, i, 1.0), at([9])),
  "scatter_add": Row(lambda x, i, v: x.scatter_add(0, i, v), at([9]), rest=(ONE,)),
  "scatter_add of integers": Row(
    lambda x, i, v: x.scatter_add(0, i, v),
    at([9], [-1]),
    W.int(),
    (torch.ones(2, 1, dtype=torch.int32),),
  ),
  "scatter_reduce": Row(
    lambda x, i, v: x.scatter_reduce(0, i, v, "amax"), at([-1]), rest=(ONE,)
  ),
  "scatter_reduce mean": Row(
    lambda x, i, v: x.scatter_reduce(0, i, v, "mean", include_self=False),
    at([9]),
    rest=(ONE,),
  ),
  "scatter with reduce": Row(
    lambda x, i: x.scatter(0, i, 2.0, reduce="multiply"), at([9])
  ),
  "put": Row(lambda x, i, v: x.put(i, v), at(99), rest=(torch.ones(1),)),
  "put from the end": Row(
    lambda x, i, v: x.put(i, v, accumulate=True), at(-13), rest=(torch.ones(1),)
  ),
  "masked_scatter": Row(
    lambda x, m, v: x.masked_scatter(m, v), W > 1, rest=(torch.ones(2),)
  ),
  "nll_loss": Row(F.nll_loss, at(0, 1, 2, 3)),
  "nll_loss of -3": Row(F.nll_loss, at(0, 1, 2, -3)),
  "nll_loss of each": Row(
    lambda x, t: F.nll_loss(x, t, reduction="none"), at(0, 1, 2, 3)
  ),
  "nll_loss of one": Row(F.nll_loss, torch.tensor(3), W[0]),
  "nll_loss of planes": Row(F.nll_loss, at([[0], [1], [4]]), W.reshape(1, 4, 3, 1)),
  "cross_entropy": Row(F.cross_entropy, at(0, 1, 2, -3)),
  "cross_entropy that ignores": Row(F.cross_entropy, at(0, 1, -100, -3)),
  "cross_entropy smoothed": Row(
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), at(0, 1, 2, -3)
  ),
  "cross_entropy weighted": Row(
    lambda x, t, w: F.cross_entropy(x, t, w), at(0, 1, 2, 3), rest=(torch.ones(3),)
  ),
  "multi_margin_loss": Row(F.multi_margin_loss, at(0, 1, 2, 3)),
  "multi_margin_loss of -1": Row(F.multi_margin_loss, at(0, 1, 2, -1)),
  "multilabel_margin_loss": Row(F.multilabel_margin_loss, at(3, -1, -1), W[0]),
  "multilabel_margin_loss of -2": Row(F.multilabel_margin_loss, at(-2, -1, -1), W[0]),
  "one_hot": Row(lambda _, i: F.one_hot(i, 3), at(5)),
  "one_hot of -1": Row(lambda _, i: F.one_hot(i, 3), at(-1)),
  "ctc_loss of too many steps": Row(_ctc, at([1, 1]), LOG_PROBS, (at(9), at(2))),
  "ctc_loss of too many labels": Row(_ctc, at([1, 1]), LOG_PROBS, (at(5), at(9))),
  "ctc_loss of a negative length": Row(_ctc, at([1, 1]), LOG_PROBS, (at(5), at(-2))),
  "max_unpool1d": Row(
    lambda x, i: F.max_unpool1d(x, i, 2), at([[0, 9]]), PLANE[0, :, :1]
  ),
  "max_unpool2d": Row(
    lambda x, i: F.max_unpool2d(x, i, 2), at([[0, 1], [2, 99]]), PLANE[0]
  ),
  "max_unpool3d": Row(
    lambda x, i: F.max_unpool3d(x, i, 2), at([[[0, 1], [2, -1]]]), PLANE
  ),
  "segment_reduce": Row(
    lambda x, n: torch.segment_reduce(x, "sum", lengths=n), at(9), W[:, 0]
  ),
  "segment_reduce of negative lengths": Row(
    lambda x, n: torch.segment_reduce(x, "max", lengths=n), at(-1, 5), W[:, 0]
  ),
  "searchsorted": Row(
    lambda x, s: torch.searchsorted(x, x, sorter=s), at(0, 9, 1), W[0].contiguous()
  ),
  "histc": Row(lambda x, _: torch.histc(x), at(0), at(1.0, float("nan")), why="words"),
  "lu_unpack": Row(
    lambda x, p: torch.lu_unpack(x, p)[0], at(9, 9, dtype=torch.int32), torch.eye(2)
  ),
  "lu_solve": Row(
    lambda x, p: torch.linalg.lu_solve(x, p, x),
    at(9, 9, dtype=torch.int32),
    torch.eye(2),
  ),
  "ldl_solve": Row(
    lambda x, p: torch.linalg.ldl_solve(x, p, x),
    at(9, 9, dtype=torch.int32),
    torch.eye(2),
  ),
}


def _assigned(x, i):
  x = x.clone()
  x[i] = 5.0
  return x


def _refusal(row, device) -> Exception:
  with pytest.raises((RuntimeError, IndexError, ValueError)) as caught:
    row.call(*row.on(device))
  return caught.value


# In-place calls: nothing is written if the operation raises.
WRITES = {
  "index_put_": lambda x, i: x.index_put_((i,), torch.ones_like(x[:1])),
  "assignment": lambda x, i: x.__setitem__(i, 5.0),
  "index_add_": lambda x, i: x.index_add_(0, i, torch.ones_like(x[:1])),
  "index_copy_": lambda x, i: x.index_copy_(0, i, torch.ones_like(x[:1])),
  "index_fill_": lambda x, i: x.index_fill_(0, i, 1.0),
  "scatter_": lambda x, i: x.scatter_(0, i[:, None], 1.0),
  "scatter_add_": lambda x, i: x.scatter_add_(0, i[:, None], torch.ones_like(x[:1])),
  "put_": lambda x, i: x.put_(i + 90, torch.ones_like(x[0, :1])),
  "a limit for an embedding's rows": lambda x, i: F.embedding(i, x, max_norm=1.0),
  "a view": lambda x, i: x[1:].scatter_(0, i[:, None], 1.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_write_that_raises_changes_nothing(write):
  tensor, index = W.to("jax"), at(9).to("jax")
  with pytest.raises((RuntimeError, IndexError)) as expected:
    write(W.clone(), at(9))
  with pytest.raises(type(expected.value)):
    write(tensor, index)
  assert torch.equal(tensor.cpu(), W)


def test_no_random_number_is_drawn_where_an_index_raises():
  env, weight = torchax.default_env(), W.to("jax")
  with env:
    torch.rand(1, device="jax")
    before = env.rng.state
    with pytest.raises(RuntimeError):
      torch.multinomial(-weight, 1)
    with pytest.raises(IndexError):
      F.dropout(F.embedding(at(9).to("jax"), weight))
    assert int(env.rng.state.count) == int(before.count)


VIEWS = {
  "slice": lambda i: i[1:2],
  "element": lambda i: i[1:2][0].reshape(1),
  "row": lambda i: i.reshape(3, 1)[1],
  "transposed": lambda i: i.reshape(1, 3).t()[1],
  "expanded": lambda i: i[1:2].expand(4),
  "every other": lambda i: i[1::2],
  "strided": lambda i: i.as_strided((1,), (1,), 1),
  "detached": lambda i: i.detach()[1:2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_of_a_view_the_shown_numbers_count(view):
  weight = W.to("jax")
  right, wrong = view(at(9, 1, 9).to("jax")), view(at(1, 9, 1).to("jax"))
  assert torch.equal(F.embedding(right, weight).cpu(), W[view(at(9, 1, 9))])
  with pytest.raises(IndexError):
    F.embedding(wrong, weight)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in the environment"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_eager_operation_raises_torchs_error(row, inside):
  expected = _refusal(row, "cpu")
  with torchax.default_env() if inside else contextlib.nullcontext():
    error = _refusal(row, "jax")
  assert type(error) is type(expected)
  if not row.why:
    assert str(error).startswith(str(expected).partition("\n")[0])


def _is_unmistakable(result: torch.Tensor) -> bool:
  if result.is_floating_point():
    return bool(result.isnan().any())
  limits = torch.iinfo(result.dtype)
  return bool((result == (limits.min or limits.max)).any())


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_compiled_function_gives_nothing_plausible(row):
  assert _is_unmistakable(jax_jit(row.call)(*row.on("jax")).cpu())


GRADIENTS = {
  "embedding": lambda w, i: F.embedding(i, w),
  "embedding_bag": lambda w, i: F.embedding_bag(i[None], w),
  "gather": lambda w, i: w.gather(0, i[:, None]),
  "index": lambda w, i: w[i],
  "index_select": lambda w, i: w.index_select(0, i),
  "take": lambda w, i: w.take(i + 90),
  "nll_loss": lambda w, i: F.nll_loss(w[:1], i),
  "cross_entropy": lambda w, i: F.cross_entropy(w[:1], i),
  "multi_margin_loss": lambda w, i: F.multi_margin_loss(w[:1], i),
}


@pytest.mark.parametrize("call", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("way", ["torch", "jax"])
def test_a_gradient_is_nothing_plausible(call, way):
  def by_torch(weight, index):
    weight = weight.detach().requires_grad_()
    call(weight, index).sum().backward()
    return weight.grad

  gradient = by_torch
  if way == "jax":
    loss = torchax.interop.jax_value_and_grad(lambda w, i: call(w, i).sum())
    gradient = lambda weight, index: loss(weight, index)[1]  # noqa: E731
  found = jax_jit(gradient)(W.to("jax"), at(9).to("jax"))
  assert found.isnan().any()


@pytest.fixture(name="checks")
def _checks():
  config = torchax.default_env().config
  before, config.check_indices = config.check_indices, True
  yield
  config.check_indices = before


def _line(call) -> str:
  """Return the source line of a row's call, as a message quotes it."""
  return f"{__file__}:{call.__code__.co_firstlineno}"


COMPILED = {
  "embedding": ("aten.embedding", lambda w, i: F.embedding(i, w)),
  "gather": ("aten.gather", lambda w, i: w.gather(0, i[:, None])),
  "index": ("aten.index", lambda w, i: w[i]),
  "index_put": ("aten.index_put", lambda w, i: w.index_put((i,), w[:1])),
  "scatter": ("aten.scatter", lambda w, i: w.scatter(0, i[:, None], 1.0)),
  "cross_entropy": ("aten.nll_loss", lambda w, i: F.cross_entropy(w[:1], i)),
  "one_hot": ("one_hot", lambda w, i: F.one_hot(i, 3)),
  "take_along_dim": ("take_along_dim", lambda w, i: w.take_along_dim(i + 90)),
}


@pytest.mark.parametrize("name, call", COMPILED.values(), ids=COMPILED)
@pytest.mark.usefixtures("checks")
def test_a_compiled_function_says_where_an_index_is_wrong(name, call):
  with torchax.default_env(), pytest.raises(jax.errors.JaxRuntimeError) as caught:
    jax.block_until_ready(jax_jit(call)(W.to("jax"), at(9).to("jax")).jax())
  assert name in str(caught.value) and _line(call) in str(caught.value)


@pytest.mark.parametrize("transform", ["vmap", "grad", "scan", "remat"])
@pytest.mark.usefixtures("checks")
def test_the_check_is_made_in_transformations(transform):
  def look_up(weight, index):
    return torchax.default_env().t2j_iso(
      F.embedding(*torchax.default_env().j2t_iso((index, weight)))
    )

  calls = {
    "vmap": lambda w, i: jax.vmap(look_up, (None, 0))(w, i),
    "grad": lambda w, i: jax.grad(lambda w: look_up(w, i).sum())(w),
    "scan": lambda w, i: jax.lax.scan(lambda c, j: (c, look_up(w, j)), 0, i)[1],
    "remat": lambda w, i: jax.checkpoint(look_up)(w, i),
  }
  weight, good, bad = (t.to("jax").jax() for t in (W, at(1, 2), at(1, 9)))
  call = jax.jit(calls[transform])
  jax.block_until_ready(call(weight, good))
  with pytest.raises(jax.errors.JaxRuntimeError, match="index out of range"):
    jax.block_until_ready(call(weight, bad))


@pytest.mark.usefixtures("checks")
def test_torch_compile_names_the_line_of_the_model():
  def model(weight, index):
    return F.embedding(index, weight) * 2

  compiled = torch.compile(model, backend="jax", fullgraph=True)
  with pytest.raises(jax.errors.JaxRuntimeError) as caught:
    jax.block_until_ready(compiled(W.to("jax"), at(9).to("jax")).jax())
  line = model.__code__.co_firstlineno + 1
  assert re.search(
    rf"aten\.embedding.*{re.escape(__file__)}:{line}\b", str(caught.value)
  )


def test_changing_check_indices_retraces_a_compiled_function():
  config = torchax.default_env().config
  look_up = jax_jit(lambda index, table: F.embedding(index, table))
  given = torch.tensor([5]).to("jax"), torch.ones(2, 3).to("jax")
  assert look_up(*given).isnan().all()
  config.check_indices = True
  try:
    with pytest.raises(Exception, match="index out of range in self"):
      look_up(*given).tolist()
  finally:
    config.check_indices = False
  assert look_up(*given).isnan().all()


def test_the_derivative_of_a_maximum_with_an_index_out_of_range():
  given = [torch.ones(1, 1, 1), torch.ones(1, 2, 2), torch.full((1, 1, 1), 9)]
  backward = torch.ops.aten.max_pool2d_with_indices_backward
  found = jax_jit(
    lambda g, x, i: backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i)
  )(*[tensor.to("jax") for tensor in given])
  assert found.isnan().any()
