"""View operators of torch, by schema: records, aliasing, and under `jax_jit`.

A new view operator of torch needs a row here. Public functions are tested in
`test_view.py`.
"""

import pytest
import torch
from accelerators import ON_CPU
from compare import assert_same
from ops.harness import floats

import torchax
from torchax.compat import torch_compat
from torchax.dispatch import views
from torchax.interop import jax_jit
from torchax.registry.schema import schema_of

aten = torch.ops.aten
BASE = floats(4, 6)
CUBE = floats(2, 2, 6)
COMPLEX = torch.complex(floats(3, 2), floats(3, 2, seed=1))
PAIRS = floats(3, 2)

# (overload, source, arguments)
ROWS = [
  ("_conj", COMPLEX),
  ("_neg_view", BASE),
  ("_reshape_alias", BASE, [2, 12], [12, 1]),
  ("adjoint", COMPLEX),
  ("adjoint", CUBE),
  ("_unsafe_view", BASE, [3, 8]),
  ("alias", BASE),
  ("as_strided", BASE, [2, 3], [6, 2], 1),
  ("as_strided", BASE, [3, 2], [1, 3]),
  ("as_strided", BASE, [], [], 5),
  ("broadcast_to", BASE, [4, 6]),
  ("chunk", BASE, 3, 1),
  ("chunk", BASE, 3),
  ("conj", COMPLEX),
  ("conj", BASE),
  ("contiguous", BASE),
  ("detach", BASE),
  ("diagonal", BASE, 1),
  ("diagonal", CUBE, -1, 2, 0),
  ("diagonal", BASE, 6),
  ("dsplit.array", CUBE, [1, 4]),
  ("dsplit.int", CUBE, 3),
  ("expand", BASE, [1, 4, -1]),
  ("expand_as", BASE, BASE),
  ("flatten.using_ints", CUBE, 1),
  ("flatten.using_ints", BASE, 0, 0),
  ("hsplit.array", BASE, [2, 3]),
  ("hsplit.int", BASE, 2),
  ("imag", COMPLEX),
  ("imag", COMPLEX.conj()),
  ("lift_fresh", BASE),
  ("linalg_diagonal", CUBE),
  ("mH", COMPLEX),
  ("mT", CUBE),
  ("matrix_H", COMPLEX),
  ("moveaxis.int", CUBE, 0, 2),
  ("moveaxis.intlist", CUBE, [0, 2], [1, 0]),
  ("movedim.int", CUBE, 0, -1),
  ("movedim.intlist", CUBE, [0, 1], [2, 0]),
  ("narrow", BASE, 1, 2, 3),
  ("narrow", BASE, 0, -2, 2),
  ("narrow.Tensor", BASE, 1, torch.tensor(2), 3),
  ("numpy_T", BASE),
  ("permute", CUBE, [2, 0, 1]),
  ("permute", CUBE, [-1, 0, 1]),
  ("positive", BASE),
  ("ravel", BASE),
  ("real", COMPLEX),
  ("real", BASE),
  ("reshape", BASE, [3, -1]),
  ("reshape_as", BASE, CUBE),
  ("resolve_conj", COMPLEX),
  ("resolve_neg", BASE),
  ("select.int", BASE, -1, -2),
  ("slice.Tensor", BASE, 1, 1, 100, 2),
  ("slice.Tensor", BASE, 0, -3, -1),
  ("slice.Tensor", BASE, 0, 3, 2),
  ("slice.Tensor", BASE),
  ("split.Tensor", BASE, 4, 1),
  ("split.sizes", BASE, [1, 3]),
  ("split_with_sizes", BASE, [2, 0, 4], -1),
  ("squeeze", BASE[:1]),
  ("squeeze.dim", BASE[:1], 0),
  ("squeeze.dims", BASE[:1, :1], [0, 1]),
  ("swapaxes", CUBE, 0, 2),
  ("swapdims", CUBE, -1, 1),
  ("t", BASE),
  ("t", BASE[0]),
  ("tensor_split.indices", BASE, [1, 2]),
  ("tensor_split.sections", BASE, 4, 1),
  ("tensor_split.tensor_indices_or_sections", BASE, torch.tensor([1, 3])),
  ("transpose.int", CUBE, 0, -1),
  ("transpose.int", BASE, 1, 1),
  ("unbind.int", BASE, 1),
  ("unflatten.int", BASE, 1, [2, -1]),
  ("unfold", BASE, 1, 2, 3),
  ("unfold", BASE, -2, 2, 2),
  ("unfold", floats(), 0, 1, 1),
  ("unsqueeze", BASE, -1),
  ("view", BASE, [2, 2, -1]),
  ("view", BASE, [4, 6]),
  ("view.dtype", BASE, torch.int32),
  ("view.dtype", BASE, torch.int16),
  ("view.dtype", BASE, torch.complex64),
  ("view.dtype", COMPLEX, torch.float32),
  ("view.dtype", BASE > 0, torch.uint8),
  ("view_as", BASE, CUBE),
  ("view_as_complex", PAIRS),
  ("view_as_real", COMPLEX),
  ("vsplit.array", BASE, [1]),
  ("vsplit.int", BASE, 2),
]
# Overload without a row here -> reason.
_SPARSE = "takes a sparse tensor, which torchax refuses"
_NESTED = "makes or takes a nested tensor, which torchax refuses"
_MOVES = "the tensor itself, or a copy of another dtype or device: test_transfer.py"
_DUAL = "a part of forward-mode AD: test_func.py"
_CALLED_BY_TORCH = "called by torch's own machinery alone"
WITHOUT_ROW = {
  "_autocast_to_full_precision": _MOVES,
  "_autocast_to_reduced_precision": _MOVES,
  "_fw_primal": _DUAL,
  "_make_dual": _DUAL,
  "_unpack_dual": _DUAL,
  "_nested_get_values": _NESTED,
  "_nested_view_from_buffer": _NESTED,
  "_nested_view_from_jagged": _NESTED,
  "_indices": _SPARSE,
  "_sparse_broadcast_to": _SPARSE,
  "_values": _SPARSE,
  "ccol_indices": _SPARSE,
  "coalesce": _SPARSE,
  "col_indices": _SPARSE,
  "crow_indices": _SPARSE,
  "indices": _SPARSE,
  "row_indices": _SPARSE,
  "values": _SPARSE,
  "_test_autograd_multiple_dispatch_view": _CALLED_BY_TORCH,
  "slice_inverse": _CALLED_BY_TORCH,
  "pin_memory": "memory of the host",
  "to.device": _MOVES,
  "to.dtype": _MOVES,
  "to.dtype_layout": _MOVES,
  "to.other": _MOVES,
}


def test_views_with_a_step_are_not_composite():
  # Therefore code that finds a step need not ask whether the operator is composite.
  steps = {*views.STEPS, *views.MULTIPLE_STEPS}
  assert not [op for op in steps if torch_compat.is_composite(op)]


def _overload(name: str):
  packet, _, overload = name.partition(".")
  return getattr(getattr(aten, packet), overload or "default")


def _names_dimensions(overload) -> bool:
  """Return True for forms with named dimensions, which newer versions of torch lack."""
  arguments = {argument.name for argument in overload._schema.arguments}
  name = overload.name().lower()
  return (
    "dimname" in name or "align_to" in name or bool({"names", "out_dim"} & arguments)
  )


def _all_views() -> set[str]:
  names = [n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names()]
  aten_names = [n for n in names if "::" not in n]
  overloads = {n: _overload(n) for n in aten_names}
  return {
    name
    for name, overload in overloads.items()
    if schema_of(overload).is_view and not _names_dimensions(overload)
  }


def test_every_view_operator_of_torch_has_a_row_or_a_reason():
  tested = {row[0] for row in ROWS}
  assert not tested & set(WITHOUT_ROW)
  assert _all_views() == tested | set(WITHOUT_ROW)


def _name(row) -> str:
  shape = "x".join(map(str, row[1].shape))
  return f"{row[0]}-{shape}-" + "-".join(
    "x".join(map(str, a.shape)) if isinstance(a, torch.Tensor) else str(a)
    for a in row[2:]
  )


each_row = pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))


def _sources(row):
  """Return a CPU and a jax tensor that own their memory, and the arguments of both.

  Index tensors stay on the CPU, as torch requires.
  """
  name, source, *args = row
  cpu = source.resolve_conj().clone()
  tensor = cpu.to("jax")
  others = [_to_jax(arg) for arg in args]
  if source.is_conj():
    return (cpu, cpu.conj(), args), (tensor, tensor.conj(), others)
  return (cpu, cpu, args), (tensor, tensor, others)


def _to_jax(arg):
  is_values = isinstance(arg, torch.Tensor) and arg.is_floating_point()
  return arg.to("jax") if is_values else arg


def _listed(views) -> list:
  return list(views) if isinstance(views, list | tuple) else [views]


def _multiply(tensor, factor):
  """Change all elements: multiply them, or negate a mask."""
  if tensor.dtype in (torch.uint8, torch.bool):
    tensor.logical_not_()
  else:
    tensor.mul_(factor)


@each_row
def test_autograd_records_views_as_in_torch(row):
  (cpu, source, args), (tensor, jax_source, jax_args) = _sources(row)
  op = _overload(row[0])
  expected = _listed(op(source, *args))
  actual = _listed(op(jax_source, *jax_args))
  assert_same(actual, expected)
  for have, want in zip(actual, expected):
    assert have.stride() == want.stride()
    assert have.storage_offset() == want.storage_offset()
    assert have.is_contiguous() == want.is_contiguous()
    assert have._is_view() == want._is_view()
    assert (have._base is tensor) == (want._base is cpu)
    assert (have is jax_source) == (want is source)
    assert have.is_set_to(tensor) == want.is_set_to(cpu)
    assert have.is_set_to(actual[-1]) == want.is_set_to(expected[-1])
    assert (have.is_conj(), have.is_neg()) == (want.is_conj(), want.is_neg())


@each_row
def test_writes_go_both_ways(row):
  (cpu, source, args), (tensor, jax_source, jax_args) = _sources(row)
  op = _overload(row[0])
  expected = _listed(op(source, *args))
  actual = _listed(op(jax_source, *jax_args))
  flat, jax_flat = cpu.view(-1), tensor.view(-1)
  _multiply(expected[0], 3)
  _multiply(actual[0], 3)
  assert_same((tensor, jax_flat, actual), (cpu, flat, expected), "after the view")
  _multiply(cpu, -2)
  _multiply(tensor, -2)
  assert_same((jax_flat, actual), (flat, expected), "after the base")


# Compiling a program for each row would take most of the time.
CHUNKS = [ROWS[start::4] for start in range(4)]


def _chunk(number: int):
  aborts = number == 2 and not ON_CPU
  reason = "XLA of JAX 0.11.2 aborts while it compiles this program for a GPU"
  marks = [pytest.mark.xfail(reason=reason, run=False)] if aborts else []
  return pytest.param(CHUNKS[number], marks=marks, id=str(number))


@pytest.mark.parametrize("rows", map(_chunk, range(4)))
def test_writes_go_both_ways_in_a_compiled_function(rows):
  sources = [_sources(row) for row in rows]

  def change(bases, all_args):
    results = []
    for row, base, args in zip(rows, bases, all_args):
      views = _listed(
        _overload(row[0])(base.conj() if row[1].is_conj() else base, *args)
      )
      flat = base.view(-1)
      _multiply(views[0], 3)
      _multiply(base, -2)
      _multiply(views[-1], 5)
      results.append(([view.clone() for view in views], flat.clone()))
    return results

  cpu, cpu_args = (
    [cpu for (cpu, _, _), _ in sources],
    [args for (*_, args), _ in sources],
  )
  bases, args = (
    [base for _, (base, _, _) in sources],
    [args for _, (*_, args) in sources],
  )
  actual = jax_jit(lambda *bases: change(bases, args))(*bases)
  expected = change(cpu, cpu_args)
  for row, *results in zip(rows, actual, expected, bases, cpu):
    have, want, base, cpu_base = results
    assert_same((have, base), (want, cpu_base), _name(row))


@pytest.mark.parametrize("number", [2j, 1 - 3j, 2.0, 3, True])
def test_view_of_a_number_promotes_as_the_number(number):
  """Graphs of gradients have numbers in place of tensors."""
  dispatch = torchax.default_env().dispatch
  expected = torch.tensor(number)
  conjugates = expected.is_complex()
  op = aten._conj.default if conjugates else aten.alias.default
  view = dispatch(op, (), (number,), None)
  assert_same(view.resolve_conj(), expected.conj().resolve_conj())
  expanded = dispatch(aten.expand.default, (), (number, [2, 2]), None)
  assert_same(expanded, expected.expand(2, 2))
  # Newer versions of torch cannot multiply a bfloat16 tensor by a complex number.
  dtype = torch.float32 if conjugates else torch.bfloat16
  factor = torch.full((3, 2), 0.5, dtype=dtype)
  product = dispatch(aten.mul.Tensor, (), (factor.to("jax"), view), None)
  assert_same(product, factor * expected.conj())


def test_a_compiled_gradient_conjugates_a_number():
  def loss(z):
    return (z * (2j - 1)).abs().sum()

  gradients = []
  for run in (loss, torch.compile(loss, backend="jax")):
    z = COMPLEX.clone().requires_grad_()
    run(z).backward()
    gradients.append(z.grad)
  torch.testing.assert_close(*gradients)


SHAPE_CHANGES = [
  ("t_",),
  ("transpose_", 0, 1),
  ("swapaxes_", 0, -1),
  ("swapdims_", 1, 0),
  ("unsqueeze_", 0),
  ("squeeze_",),
]


def change_shape_between_views(x, name, *args):
  u = x * 1
  older = u[:, :2]
  flat = u.view(-1)
  getattr(u, name)(*args)
  older.mul_(3)
  u.mul_(2)
  return (older**2).sum() + (u**3).sum() + flat[1] * 5


@pytest.mark.parametrize("call", SHAPE_CHANGES, ids=lambda call: call[0])
@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_older_views_stay_right_when_a_shape_changes_in_place(call, wrap):
  run = wrap(lambda x: change_shape_between_views(x, *call))
  # A square, so that views of another shape are no error.
  ours = torch.arange(16.0, device="jax").reshape(4, 4).requires_grad_()
  theirs = torch.arange(16.0).reshape(4, 4).requires_grad_()
  run(ours).backward()
  change_shape_between_views(theirs, *call).backward()
  assert_same(ours.grad, theirs.grad)


def test_a_view_reshaped_in_place_writes_to_its_base():
  def run(x):
    u = x * 1
    view = u[:, :2]
    view.t_()
    view.mul_(2)
    u.mul_(3)
    return (view**2).sum() + (u**3).sum()

  ours = torch.arange(16.0, device="jax").reshape(4, 4).requires_grad_()
  theirs = torch.arange(16.0).reshape(4, 4).requires_grad_()
  run(ours).backward()
  run(theirs).backward()
  assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_shape_of_a_view_of_a_leaf_does_not_change_in_place(wrap):
  x = torch.ones(4, 4, device="jax", requires_grad=True)
  with pytest.raises(RuntimeError, match="view of a leaf|argument in place"):
    wrap(lambda x: x[1:].t_())(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
def test_shape_of_view_changes_under_no_grad_with_its_gradient(wrap):
  def run(x):
    view = x.mT.expand(2, 4, 4)
    with torch.no_grad():
      view.swapaxes_(-2, -3)
    return (view * weights.to(x.device)).sum()

  weights = torch.arange(32.0).reshape(4, 2, 4)
  ours = torch.ones(4, 4, device="jax", requires_grad=True)
  theirs = torch.ones(4, 4, requires_grad=True)
  wrap(run)(ours).backward()
  run(theirs).backward()
  assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("wrap", [lambda f: f, jax_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("offset", ((), (5,)), ids=("own offset", "offset"))
def test_as_strided_under_no_grad_shows_elements_of_the_base(wrap, offset):
  def run(x):
    view = x[:, 1:3]
    with torch.no_grad():
      view.as_strided_((2, 3), (2, 1), *offset)
    return (view * weights.to(x.device)).sum()

  weights = torch.arange(6.0).reshape(2, 3)
  ours = torch.ones(4, 4, device="jax", requires_grad=True)
  theirs = torch.ones(4, 4, requires_grad=True)
  wrap(run)(ours).backward()
  run(theirs).backward()
  assert_same(ours.grad, theirs.grad)


def test_a_tensor_of_changed_shape_can_be_trained_and_detached():
  x = torch.ones(2, 3, device="jax")
  x.t_()
  x.requires_grad_()
  (x[0] * 2).sum().backward()
  assert_same(x.grad, torch.tensor([[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))
  u = x * 2
  u.t_().detach_()
  assert not u.requires_grad and u.shape == (2, 3)


@pytest.mark.parametrize(
  "write",
  [
    lambda x: x.unfold(0, 2, 1)[:, 1].mul_(0),
    lambda x: x.expand(2, 6)[1].add_(5),
    lambda x: x.as_strided((3, 3), (1, 1))[1:, 2].add_(5),
    lambda x: [x.unfold(0, 3, 1)[k % 4, k % 3].mul_(2) for k in range(12)],
  ],
  ids=["unfold", "expand", "as_strided", "many"],
)
def test_write_to_a_part_of_an_overlapping_view_runs_once(write):
  ours, theirs = torch.arange(6.0, device="jax"), torch.arange(6.0)
  write(ours)
  write(theirs)
  assert_same(ours, theirs)
