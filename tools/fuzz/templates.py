"""Templates of statements: functions that write a statement for a variable."""

import dataclasses
import random
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Context:
  """Input of a template.

  Attributes:
    rng: source of choices.
    tensors: variables so far.
    name: name of the variable to use.
    other: name of a second variable.
    new: name of the variable to define.
  """

  rng: random.Random
  tensors: dict[str, torch.Tensor]
  name: str
  other: str
  new: str

  @property
  def tensor(self) -> torch.Tensor:
    """Tensor of the variable to use."""
    return self.tensors[self.name]

  def dim(self) -> int:
    """Return a dim of the variable, counted from either end."""
    count = max(1, self.tensor.dim())
    return self.rng.randrange(-count, count)

  def like(self) -> str:
    """Return the name of a variable of the same shape, or a number."""
    same = [n for n, t in self.tensors.items() if t.shape == self.tensor.shape]
    return self.rng.choice((*same, self.number()))

  def number(self) -> str:
    """Return a number as text."""
    return self.rng.choice(("2", "-1", "0.5", "-1.5", "3", "0"))

  def shape(self) -> str:
    """Return another shape with the same number of elements."""
    count = self.tensor.numel()
    sizes = [d for d in (1, 2, 3, 4, 6) if count % d == 0]
    first = self.rng.choice(sizes or [1])
    return self.rng.choice((f"{first}, -1", f"-1, {first}", "-1", f"-1, {first}, 1"))


def _of(*rows: str) -> Callable[[Context], str]:
  """Return a template that chooses a row and fills in the names of a `Context`.

  `{v}` is the variable, `{w}` another one, `{l}` one of its shape, `{n}` a number,
  `{d}` and `{e}` dims, `{shape}` another shape.
  """

  def write(context: Context) -> str:
    row = context.rng.choice(rows)
    size = tuple(context.tensor.shape)
    return row.format(
      v=context.name,
      w=context.other,
      l=context.like(),
      n=context.number(),
      d=context.dim(),
      e=context.dim(),
      shape=context.shape(),
      a=context.rng.randrange(4),
      b=context.rng.randrange(1, 4),
      size=size,
      order=tuple(context.rng.sample(range(len(size)), len(size))),
    )

  return write


_VIEW = _of(
  *("{v}[:, ::2]", "{v}[1:]", "{v}[..., 0]", "{v}[-1]", "{v}[:, 1:]", "{v}[None]"),
  *("{v}[::2]", "{v}[..., -2:]", "{v}[:2, 1]", "{v}[..., None, :]", "{v}[{a}]"),
  *("{v}.t()", "{v}.T", "{v}.mT", "{v}.transpose({d}, {e})", "{v}.swapaxes({d}, {e})"),
  *("{v}.permute({order})", "{v}.movedim({d}, {e})", "{v}.adjoint()"),
  *("{v}.unsqueeze({d})", "{v}.squeeze()", "{v}.squeeze({d})", "{v}.flatten()"),
  *("{v}.view(-1)", "{v}.view({shape})", "{v}.reshape({shape})", "{v}.view_as({v})"),
  *("{v}.expand(2, *{size})", "{v}.broadcast_to((2, *{size}))", "{v}.contiguous()"),
  *("{v}.narrow({d}, {a}, {b})", "{v}.select({d}, {a})", "{v}.diagonal()"),
  *(
    "{v}.diagonal({n}, {d}, {e})",
    "{v}.unfold({d}, {b}, {b})",
    "{v}.unfold({d}, 2, 1)",
  ),
  *("{v}.split({b})[{a}]", "{v}.split({b}, {d})[0]", "{v}.chunk(2, {d})[-1]"),
  *("{v}.unbind({d})[{a}]", "{v}.tensor_split(2, {d})[0]", "{v}.hsplit(2)[0]"),
  *("{v}.as_strided((2, 2), (1, 2))", "{v}.as_strided((2, 3), (3, 1), {a})"),
  *("{v}.detach()", "{v}.unflatten({d}, (-1, {b}))", "{v}.ravel()", "{v}.data"),
  *(
    "{v}.real",
    "{v}.imag",
    "torch.view_as_real({v})",
    "{v}.conj()",
    "{v}.view({v}.dtype)",
  ),
  *(
    "{v}.float().view(torch.int32)",
    "({v} * 1).int().view(torch.int16)",
    "torch.atleast_2d({v})",
    "{v}",
  ),
)

_COPY = _of(
  *(
    "{v} + {w}",
    "{v} * {w}",
    "{v} - {n}",
    "{v} * {n}",
    "-{v}",
    "{v}.abs()",
    "{v} + {l}",
  ),
  *("torch.where({v} > 0.3, {v}, {w})", "torch.maximum({v}, {l})", "{v}.clamp(-1, 1)"),
  *("torch.tanh({v})", "torch.sin({v})", "{v} @ {w}", "torch.outer({v}, {w})"),
  *(
    "torch.cat([{v}, {l}])",
    "torch.stack([{v}, {l}], {d})",
    "{v}.flip({d})",
    "{v} // 2",
  ),
  *(
    "{v}.roll(1, {d})",
    "{v}.repeat(1, 2)",
    "torch.tril({v})",
    "{v}.clone()",
    "{v} % 3",
  ),
  *(
    "{v}[i]",
    "{v}[[0, 2]]",
    "{v}[:, [1, 0, 1]]",
    "{v}[{v} > 0.3]",
    "{v}[[0, 1], [1, 0]]",
  ),
  *(
    "{v}[torch.tensor([1, 0])]",
    "{v}[..., [0]]",
    "{v}[None, [1, 0], 0]",
    "{v}[[0], 1:]",
  ),
  *("{v}.index_select({d}, torch.tensor([0, 1, 0], device={v}.device))", "{v} > {w}"),
  *("torch.gather({v}, {d}, {v}.argsort({d}))", "{v}.masked_fill({v} > 0.3, {n})"),
  *("torch.take_along_dim({v}, {v}.argsort({d}), {d})", "{v} == {w}", "F.relu({v})"),
  *(
    "F.softmax({v}, {d})",
    "F.pad({v}, (1, 1))",
    "{v}.contiguous() * 2",
    "{v}.square()",
  ),
  *(
    "{v}.cumsum({d})",
    "{v}.sort({d}).values",
    "{v}.detach().topk(2, {d}).values",
    "{v}.diff()",
  ),
  *("torch.kron({v}, {w})", "torch.einsum('ij,kj->ik', {v}, {w})", "{v}.diag()"),
  *("torch.lerp({v}, {l}, 0.5)", "torch.addcmul({v}, {l}, {l})", "{v}.sign()"),
  *(
    "torch.zeros_like({v})",
    "torch.ones({size}, device={v}.device)",
    "{v}.new_zeros(3)",
  ),
)

_REDUCTION = _of(
  *(
    "{v}.sum()",
    "{v}.sum({d})",
    "{v}.sum({d}, keepdim=True)",
    "{v}.mean()",
    "{v}.mean({d})",
  ),
  *("{v}.amax({d})", "{v}.amin()", "{v}.max({d}).values", "{v}.max()", "{v}.prod({d})"),
  *("{v}.var({d})", "{v}.logsumexp({d})", "{v}.norm()", "{v}.argmax({d})", "{v}.any()"),
  *("{v}.all({d})", "({v} > 0.3).sum()", "{v}.median({d}).values", "{v}.std()"),
  *("torch.count_nonzero({v}, {d})", "{v}.sum(({d}, {e}))", "{v}.cummax({d}).values"),
)

_DTYPE = _of(
  *("{v}.to(torch.float32)", "({v} * 2).int()", "({v} * 2).long()", "{v}.bool()"),
  *(
    "{v} + 1j",
    "({v} * 1).to({w}.dtype)",
    "{v}.float()",
    "({v} * 1).type_as({w})",
    "{v} + True",
  ),
  *("{v} / 2", "{v}.sum(dtype=torch.float32)", "torch.true_divide({v}, 4)", "{v} ** 2"),
  *("({v} * 2).to(torch.int8)", "({v} * 2).to(torch.int16)", "{v}.to(torch.complex64)"),
)

_ANYWHERE = _of(
  *("{v}.add_(1)", "{v}.mul_({n})", "{v}.sub_({l})", "{v}.copy_({w})", "{v}.zero_()"),
  *("{v}.fill_({n})", "{v}.clamp_(-1, 1)", "{v}.relu_()", "{v}.neg_()", "{v}.abs_()"),
  *(
    "{v}.tanh_()",
    "{v}[0] = {n}",
    "{v}[{a}] += {n}",
    "{v}[:, 0] = {w}",
    "{v}[...] = {w}",
  ),
  *("{v}[{v} > 0.3] = {n}", "{v}[[0, 2]] = {n}", "{v}[[1, 0]] += {w}", "{v} += {w}"),
  *(
    "{v} *= {l}",
    "{v}[1:] = {v}[:-1].clone()",
    "{v}[..., -1].mul_({n})",
    "{v}.pow_(2)",
  ),
  *("{v}.masked_fill_({v} > 0.3, {n})", "{v}.index_fill_({d}, i, {n})", "{v}[i] = {n}"),
  *("{v}.index_add_({d}, torch.tensor([0, 1], device={v}.device), {v}[:2].clone())",),
  *("{v}.index_copy_(0, torch.tensor([1, 0], device={v}.device), {v}[:2].clone())",),
  *(
    "{v}.scatter_({d}, {v}.argsort({d}), {n})",
    "{v}.addcmul_({l}, {l})",
    "{v}.t().add_(1)",
  ),
  *(
    "{v}.cumsum_({d})",
    "{v}.lerp_({l}, 0.5)",
    "{v}.data.mul_({n})",
    "{v}.detach().add_(1)",
  ),
  *(
    "{v}.masked_scatter_({v} > 0.3, {w}.clone())",
    "{v}.view(-1)[1] = {n}",
    "{v}.diagonal().add_(1)",
  ),
  *(
    "{v}.expand(2, *{size})[0].add_(1)",
    "{v}.put_(torch.tensor([0, 2], device={v}.device), {v}.flatten()[:2].clone())",
  ),
  *(
    "{v}.logical_not_()",
    "{v}[[0, 1], [1, 0]] = {n}",
    "{v}[None, ..., 0] = {n}",
    "{v}.fill_diagonal_({n})",
  ),
  *(
    "{v}.sin_()",
    "{v}.floor_()",
    "{v}.tril_()",
    "{v}.swapaxes({d}, {e}).mul_({n})",
    "{v}[:, [1, 0]] = {w}",
  ),
)

# Writes to tensors that show an element several times, each once.
_IN_PART = ("{v}[..., 0].mul_({n})", "{v}[..., -1].add_(1)", "{v}[{a}].add_(1)")


def _overlaps(tensor: torch.Tensor) -> bool:
  """True if two elements share their memory."""
  shown = torch.zeros(tensor.shape, dtype=torch.int64)
  for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
    steps = torch.arange(size) * stride
    shown += steps.reshape(-1, *(1,) * (tensor.dim() - dim - 1))
  return shown.unique().numel() < shown.numel()


def _shares_memory(context: Context) -> bool:
  pointers = [
    context.tensors[name].untyped_storage().data_ptr()
    for name in (context.name, context.other)
  ]
  return pointers[0] == pointers[1]


def _in_place(context: Context) -> str | None:
  if not _overlaps(context.tensor):
    statement = _ANYWHERE(context)
    # torch runs cumsum_ of bool only for tensors without dims.
    is_odd = "cumsum_" in statement and context.tensor.dtype is torch.bool
    return None if is_odd else statement
  if not _overlaps(context.tensor[..., 0]):
    return _of(*_IN_PART[:2])(context)
  return None if _overlaps(context.tensor[0]) else _of(*_IN_PART[2:])(context)


def _out(context: Context) -> str | None:
  target = context.tensors[context.other]
  if not target.numel() or _overlaps(target) or _shares_memory(context):
    return None
  return _OUT(context)


_RESHAPED = _of(
  *("{v}.t_()", "{v}.transpose_({d}, {e})", "{v}.swapaxes_({d}, {e})"),
  *("{v}.swapdims_({d}, {e})", "{v}.squeeze_()", "{v}.squeeze_({d})"),
  *("{v}.unsqueeze_({d})", "{v}.as_strided_((2, 2), (1, 2))"),
  "{v}.t_().mul_({n})",
)


def _shape(context: Context) -> str | None:
  """Return a change of shape; torch does not define writes to overlapping elements."""
  statement = _RESHAPED(context)
  return None if "mul_" in statement and _overlaps(context.tensor) else statement


_OUT = _of(
  *(
    "torch.add({v}, {n}, out={w})",
    "torch.mul({v}, {l}, out={w})",
    "torch.neg({v}, out={w})",
  ),
  *(
    "torch.sum({v}, {d}, out={w})",
    "torch.amax({v}, {d}, out={w})",
    "torch.sin({v}, out={w}[:])",
  ),
  *(
    "torch.cumsum({v}, {d}, out={w})",
    "torch.mul({v}, 2, out={v})",
    "torch.abs({v}, out={w}.t())",
  ),
  *("torch.where({v} > 0.3, {v}, {l}, out={w})", "torch.clamp({v}, -1, 1, out={w})"),
  *("torch.matmul({v}, {v}.t(), out={w})", "torch.cat([{v}, {v}], out={w})"),
)

_DRAW = _of(
  *(
    "torch.rand_like({v})",
    "torch.randn(4, 3, device={v}.device)",
    "F.dropout({v}, 0.5)",
  ),
  *("torch.bernoulli({v}.sigmoid())", "torch.randint(0, 3, (4,), device={v}.device)"),
  *(
    "torch.randperm(4, device={v}.device)",
    "torch.randn_like({v})",
    "F.rrelu({v}, training=True)",
  ),
  *("torch.normal({v}, 1.0)", "torch.multinomial({v}.abs() + 0.1, 2)"),
)

_DRAW_IN_PLACE = _of(
  *("{v}.uniform_()", "{v}.bernoulli_(0.5)", "{v}.normal_()", "{v}.exponential_()"),
  *("{v}[0].uniform_()", "{v}.t().normal_()", "F.dropout({v}, 0.5, True, True)"),
)


def _new(expression: Callable) -> Callable:
  return lambda context: f"{context.new} = {expression(context)}"


def _pure(context: Context) -> str:
  return context.rng.choice((_VIEW, _COPY, _COPY, _REDUCTION))(context)


def _no_grad(context: Context) -> str | None:
  body = context.rng.choice((_in_place, _new(_VIEW), _new(_COPY), _shape))(context)
  if body is None:
    return None
  mode = context.rng.choice(("no_grad", "no_grad", "enable_grad"))
  return f"with torch.{mode}():\n  {body}"


def _hook(context: Context) -> str | None:
  if not context.tensor.requires_grad:
    return None
  body = context.rng.choice(("g * 2", "g.clone().mul_(2)", "g + 1", "None"))
  # The product is a copy: torch crashes on hooks of some views.
  return (
    f"{context.new} = {context.name} * 1\n{context.new}.register_hook(lambda g: {body})"
  )


def _on_local(context: Context) -> Context:
  """Return a context with the variable alone, under the name `a`."""
  return Context(context.rng, {"a": context.tensor}, "a", "a", "b")


def _nested(context: Context) -> str | None:
  local = _on_local(context)
  body = context.rng.choice((_in_place, _in_place, _new(_VIEW), _new(_COPY)))(local)
  result = context.rng.choice(("a", _VIEW(local), _COPY(local)))
  # The argument of `jit` has no storage beyond it.
  if body is None or "as_strided" in body + result:
    return None
  return (
    f"def f(a):\n  {body}\n  return ({result}) * 2\n"
    f"{context.new} = jit(f)({context.name})"
  )


def _checkpoint(context: Context) -> str:
  local = _on_local(context)
  function = f"lambda a: ({_pure(local)}) * 2"
  return f"{context.new} = checkpoint({function}, {context.name}, use_reentrant=False)"


def _vmap(context: Context) -> str | None:
  if context.tensor.dim() < 1:
    return None
  row = Context(
    context.rng, {"a": torch.zeros(context.tensor.shape[1:])}, "a", "a", "b"
  )
  body = _pure(row)
  # In vmap, Dynamo captures no lists as indices, and torch requires 64-bit indices.
  if "[[" in body or ", [" in body or "argsort" in body:
    return None
  return f"{context.new} = torch.vmap(lambda a: {body})({context.name})"


def _scan(context: Context) -> str | None:
  if context.tensor.dim() < 1 or not context.tensor.is_floating_point():
    return None
  body = context.rng.choice(("(c + a, c * a)", "(c * 0.5 - a, c[..., None])"))
  return (
    f"{context.new} = scan(lambda c, a: {body}, {context.name}[0], {context.name})"
    f"[{context.rng.randrange(2)}]"
  )


_WEIGHTS: tuple[tuple[Callable, int], ...] = (
  (_new(_VIEW), 28),
  (_new(_COPY), 18),
  (_new(_REDUCTION), 5),
  (_new(_DTYPE), 5),
  (_in_place, 26),
  (_shape, 7),
  (_out, 4),
  (_no_grad, 4),
  (_hook, 2),
  (_nested, 3),
  (_checkpoint, 2),
  (_vmap, 2),
  (_scan, 1),
)
_DRAWING = ((_new(_DRAW), 20), (_DRAW_IN_PLACE, 12))


def choose(rng: random.Random, draws: bool) -> Callable[[Context], str | None]:
  """Return a template, which returns None if it does not fit the variable."""
  rows = _WEIGHTS + _DRAWING * draws
  return rng.choices([row for row, _ in rows], [weight for _, weight in rows])[0]
