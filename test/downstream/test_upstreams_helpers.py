"""What upstream's helpers compute, called as its lowerings call them: with arrays.

CPU torch is the oracle; where torch has no such function, the numbers are written out.
"""

import jax
import jax.numpy as jnp
import pytest
import torch
from compare import assert_same
from jax import lax
from torch.utils import _pytree as pytree

import torchax
from torchax.interop import torch_view
from torchax.ops import jaten, jtorch

F = torch.nn.functional
aten = torch.ops.aten

X = torch.tensor([[3.0, -1.0, 2.0], [0.0, 5.0, -4.0]])
SQUARE = torch.tensor([[4.0, 1.0], [2.0, 3.0]])
RIGHT = torch.tensor([[1.0, 0.0], [2.0, 5.0]])
ROWS = torch.tensor([[0.0, 1.0], [2.0, 3.0], [2.0, 7.0]])
IMAGE = torch.arange(36.0).reshape(1, 1, 6, 6) % 7
FLAT = torch.arange(4.0)
MASK = torch.tensor([True, False, True, False])
AT = torch.tensor([[1, 0, 1]])
ONES = torch.ones(3)

# Sizes, steps and dilations of windows.
_WINDOWS = ([3, 3], [2, 2], [1, 1])


def _arrays(tree):
  """The tensors of a tree as arrays."""
  return pytree.tree_map_only(torch.Tensor, lambda t: jnp.asarray(t.numpy()), tree)


def _tensors(tree):
  return pytree.tree_map_only(jax.Array, torch_view, tree)


def _interpolate(size, mode, align_corners, antialias, **options):
  return F.interpolate(
    IMAGE, size, mode=mode, align_corners=align_corners, antialias=antialias, **options
  )


def _row(*args):
  """The name of a case, its positional arguments and what is expected."""
  name, *args, expected = args
  return pytest.param(name, args, expected, id=f"{name}-{len(args)}")


HELPERS = (
  _row("_aten_erfcx", X, torch.special.erfcx(X)),
  _row("_aten_local_scalar_dense", torch.tensor(2.5), 2.5),
  _row("_aten_local_scalar_dense", torch.tensor([True]), True),
  _row("_aten_to_device", X, "jax", torch.int32, X.int()),
  _row("_aten_to_dtype", X, torch.int32, X.int()),
  _row("_aten_to_dtype", X, None, X),
  _row("_broadcast_indices", AT, (2, 3), AT.expand(2, 3)),
  _row("_indices_along_axis", X, 0, torch.tensor([[0], [1]]).int()),
  _row("_indices_along_axis", X, -1, torch.tensor([[0, 1, 2]]).int()),
  _row("_generate_indices", (2, 2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
  _row("_generate_indices", (2, 3), [0], [[0, 0], [0, 1], [0, 2]]),
  _row("_strided_index", (2, 2), (1, 2), 1, torch.tensor([[1, 3], [2, 4]]).int()),
  _row("_get_median_index", X, 1, X.median(1).indices),
  _row("_get_median_index", X, 0, True, X.median(0, True).indices),
  _row("_get_median_index", X, torch.tensor(3)),
  _row("_hamming_distance", ROWS, ROWS, torch.cdist(ROWS, ROWS, 0)),
  _row("_euclidean_direct", ROWS, RIGHT, torch.cdist(ROWS, RIGHT)),
  _row("_euclidean_mm", ROWS, RIGHT, torch.cdist(ROWS, RIGHT)),
  _row("_is_int", 3, True),
  _row("_is_int", 3.0, False),
  _row("_is_int", AT, True),
  _row("_is_int", MASK, False),
  _row("_run_binary_pointwise_operator", jnp.add, AT, 2.5, AT + 2.5),
  _row(
    "_run_binary_pointwise_operator",
    jnp.multiply,
    X.half(),
    FLAT[2],
    X.half() * FLAT[2],
  ),
  _row("_with_reduction_scalar", jnp.sum, X, 1, True, X.sum(1, True)),
  _row("_with_reduction_scalar", jnp.sum, torch.tensor(3.0), -1, True, FLAT[3]),
  _row(
    "diag_indices_with_offset",
    *((3, 4), 1),
    [torch.tensor([0, 1, 2]).int(), torch.tensor([1, 2, 3]).int()],
  ),
  _row(
    "diag_indices_with_offset",
    *((2, 3, 4), -1, 1, 2),
    [torch.tensor([1, 2]).int(), torch.tensor([0, 1]).int()],
  ),
  _row("max_pool", IMAGE, (2, 2), F.max_pool2d(IMAGE, 2)),
  _row("max_pool", IMAGE[0, 0], (3,), (2,), 1, F.max_pool1d(IMAGE[0, 0], 3, 2, 1)),
  _row(
    "max_pool",
    *(IMAGE, (3, 3), (2, 2), 1, 1, True, True),
    F.max_pool2d(IMAGE, 3, 2, 1, 1, True, True),
  ),
  _row(
    "pool",
    *(IMAGE, 0.0, lax.add, (2, 3), (2, 1), ((0, 0), (1, 1))),
    F.avg_pool2d(IMAGE, (2, 3), (2, 1), (0, 1)) * 6,
  ),
  _row("pool", X, -jnp.inf, lax.max, (3,), None, "VALID", F.max_pool1d(X, 3, 1)),
  _row("_ceil_mode_padding", [1, 1], [1, 1, 5, 6], *_WINDOWS, False, [(1, 1), (1, 1)]),
  _row("_ceil_mode_padding", [1, 1], [1, 1, 5, 6], *_WINDOWS, True, [(1, 1), (1, 2)]),
  _row("_ceil_mode_padding", [0], [1, 1, 6], [3], [2], [1], True, [(0, 1)]),
  _row(
    "_shape_static_boolean_index_put",
    *(FLAT, MASK, FLAT[2:] + 6),
    FLAT.index_put([MASK], FLAT[2:] + 6),
  ),
  _row(
    "_shape_static_boolean_index_put",
    *(X, MASK[:2], X[0], True),
    X.index_put([MASK[:2]], X[0], True),
  ),
  _row(
    "_shape_static_boolean_index_put",
    *(FLAT, MASK, FLAT + 6, False, False, False),
    torch.where(MASK, FLAT + 6, FLAT),
  ),
  *(
    _row(
      "_aten_upsample",
      *(IMAGE, [3, 4], corners, antialias, mode),
      _interpolate((3, 4), mode, corners, antialias),
    )
    for mode in ("bilinear", "bicubic")
    for corners, antialias in ((True, False), (False, True))
  ),
  _row(
    "_aten_upsample",
    *(IMAGE, None, False, False, "bilinear", [2.0, 1.5]),
    _interpolate(None, "bilinear", False, False, scale_factor=(2.0, 1.5)),
  ),
  _row(
    "_aten_upsample_billinear_aa",
    *(IMAGE, [3, 4], False, None),
    _interpolate((3, 4), "bilinear", False, True),
  ),
)

# Lowerings with arguments that ATen's do not have, and those of tensors here.
LOWERINGS = (
  _row("_aten_log_softmax", X, X.log_softmax(-1)),
  _row(
    "_aten_native_group_norm",
    *(IMAGE, None, None, 1, 1, 36, 1),
    torch.native_group_norm(IMAGE, None, None, 1, 1, 36, 1, 1e-5),
  ),
  _row(
    "_aten_native_layer_norm", X, [3], torch.native_layer_norm(X, [3], None, None, 1e-5)
  ),
  _row("_aten_nonzero_static", MASK, 3, torch.tensor([[0], [2], [-1]])),
  _row("_aten_nonzero", MASK, MASK.nonzero()),
  _row("_aten_nonzero", X > 0, True, (X > 0).nonzero(as_tuple=True)),
  _row("_aten_sort", X, 1, True, True, tuple(X.sort(1, True))),
  _row(
    "_aten_scatter_reduce",
    FLAT,
    0,
    AT[0],
    ONES,
    "sum",
    FLAT.scatter_add(0, AT[0], ONES),
  ),
  _row("_aten_scatter_reduce", X, 0, AT, X[:1], X.scatter(0, AT, X[:1])),
  _row("_aten_scatter", X, 0, AT, 7.0, X.scatter(0, AT, 7.0)),
  _row(
    "_aten_scatter_src", X, 0, AT, X[:1], "add", X.scatter(0, AT, X[:1], reduce="add")
  ),
  _row("_aten__linalg_slogdet", SQUARE, tuple(aten._linalg_slogdet(SQUARE))),
  _row("_aten__linalg_check_errors", torch.tensor(0), None),
  _row(
    "_aten_linalg_solve_triangular",
    SQUARE.triu(),
    RIGHT,
    torch.linalg.solve_triangular(SQUARE, RIGHT, upper=True),
  ),
  _row("_aten_flatten", IMAGE, 2, IMAGE.flatten(2)),
  _row("_aten_dim", IMAGE, 4),
  _row("_aten_tensor_split", FLAT, 3, FLAT.tensor_split(3)),
  _row(
    "_aten_broadcast_tensors", X[:1], X[:, :1], torch.broadcast_tensors(X[:1], X[:, :1])
  ),
  _row("_aten_imag", torch.complex(X, X), X),
  _row("_aten_to_dtype_layout", X, X),
)

FUNCTIONS = (
  _row("_aten_allclose", X, X + 1e-9, torch.tensor(True)),
  _row("_aten_isclose", X, X + 1.0, torch.zeros_like(X, dtype=torch.bool)),
  _row("_as_tensor", [1.0, 2.0], torch.tensor([1.0, 2.0])),
  _row("_cdist", ROWS, ROWS, 1.0, torch.cdist(ROWS, ROWS, 1.0)),
  _row("_corrcoef", X, X.corrcoef()),
  _row("_diag", FLAT, 1, FLAT.diag(1)),
  _row("_einsum", "ij,kj->ik", X, X, X @ X.T),
  _row("_einsum", "ij->j", [X], X.sum(0)),
  _row("_eye", 2, torch.eye(2)),
  _row("_eye", 2, 3, torch.eye(2, 3)),
  _row("_full", (2, 3), 1.5, torch.full((2, 3), 1.5)),
  _row("_functional_max_pool2d", IMAGE, 2, F.max_pool2d(IMAGE, 2)),
  _row(
    "_functional_max_pool2d",
    *(IMAGE, 3, 2, 0, 1, False, True),
    F.max_pool2d(IMAGE, 3, 2, return_indices=True),
  ),
  _row("_ones", 2, 3, torch.ones(2, 3)),
  _row(
    "_pad_sequence",
    [FLAT, ONES],
    True,
    -1.0,
    torch.nn.utils.rnn.pad_sequence([FLAT, ONES], True, -1.0),
  ),
  _row("_sparse_mm", X, X.T.contiguous(), X @ X.T),
  _row("_tensor", [[1, 2]], torch.tensor([[1, 2]])),
  _row("_torch_angle", X, X.angle()),
  _row("_torch_argsort", X, 0, True, True, torch.argsort(X, 0, True)),
  _row("_zeros", (2, 3), torch.zeros(2, 3)),
  _row("arange", 3, torch.arange(3)),
  _row("arange", 1, 7, 2, None, torch.float32, torch.arange(1.0, 7.0, 2.0)),
  _row(
    "functional_interpolate",
    IMAGE,
    (3, 3),
    None,
    "bilinear",
    False,
    False,
    True,
    _interpolate((3, 3), "bilinear", False, True),
  ),
  _row(
    "functional_linear",
    X,
    ROWS.repeat(1, 2)[:, :3],
    F.linear(X, ROWS.repeat(1, 2)[:, :3]),
  ),
  _row("getitem", X, (0, slice(1, None)), X[0, 1:]),
  _row("linalg_det", SQUARE, SQUARE.det()),
  _row("linalg_slogdet", SQUARE, tuple(torch.linalg.slogdet(SQUARE))),
  _row("linalg_solve", SQUARE, RIGHT, torch.linalg.solve(SQUARE, RIGHT)),
  _row("linalg_solve_ex", SQUARE, RIGHT, tuple(torch.linalg.solve_ex(SQUARE, RIGHT))),
  _row(
    "linalg_tensorsolve", SQUARE, FLAT[:2], torch.linalg.tensorsolve(SQUARE, FLAT[:2])
  ),
  _row("logdet", SQUARE, SQUARE.logdet()),
  _row("lu", SQUARE, tuple(torch.linalg.lu_factor(SQUARE))),
  _row(
    "lu_solve",
    RIGHT,
    *torch.linalg.lu_factor(SQUARE),
    torch.linalg.solve(SQUARE, RIGHT),
  ),
  _row("matrix_power", SQUARE, 3, SQUARE @ SQUARE @ SQUARE),
  _row("one_hot", AT[0], 3, F.one_hot(AT[0], 3)),
  _row("pad", X, (1, 2), "constant", 7.0, F.pad(X, (1, 2), value=7.0)),
  _row("tensor_split", FLAT, 3, FLAT.tensor_split(3)),
  _row("torch_Tensor_repeat_interleave", X, 2, 1, X.repeat_interleave(2, 1)),
  _row("unravel_index", AT[0], (2, 3), torch.unravel_index(AT[0], (2, 3))),
)


def _compute(module, name, args):
  return _tensors(getattr(module, name)(*_arrays(args)))


@pytest.mark.parametrize(("name", "args", "expected"), (*HELPERS, *LOWERINGS))
def test_names_of_jaten_compute_with_arrays(name, args, expected):
  assert_same(_compute(jaten, name, args), expected)


@pytest.mark.parametrize(("name", "args", "expected"), FUNCTIONS)
def test_names_of_jtorch_compute_with_arrays(name, args, expected):
  assert_same(_compute(jtorch, name, args), expected)


@pytest.mark.parametrize("full", [False, True])
def test_singular_values_multiply_to_the_matrix(full):
  u, s, vh = jtorch.linalg_svd(_arrays(X), full)
  assert u.shape == (2, 2) and vh.shape == ((3, 3) if full else (2, 3))
  assert_same(torch_view(u * s @ vh[:2]), X)
  u, s, v = jtorch.svd(_arrays(X))
  assert_same(torch_view(u * s @ v.T), X)


def test_an_embedding_bag_of_rows_needs_no_offsets():
  weight, rows = IMAGE[0, 0], torch.tensor([[0, 1], [2, 2]])
  output, bags, sizes, _ = jaten._aten__embedding_bag(*_arrays((weight, rows)))
  assert_same(torch_view(output), F.embedding_bag(rows, weight, mode="sum"))
  assert bags.tolist() == [0, 0, 1, 1] and sizes.tolist() == [2, 2]


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_norm_takes_arrays(training):
  mean, var = torch.zeros(3), torch.full((3,), 4.0)
  out = jaten._aten_native_batch_norm(*_arrays((X, None, None, mean, var)), training)
  expected = F.batch_norm(X, mean.clone(), var.clone(), training=training)
  assert_same(torch_view(out[0]), expected)


@pytest.mark.parametrize(
  ("first", "second", "wider"),
  [("int8", "int32", "int32"), ("uint8", "int8", "uint8"), ("int8", "uint8", "int8")],
)
def test_the_wider_integer_is_found(first, second, wider):
  arrays = (jnp.zeros(1, dtype) for dtype in (first, second))
  assert jaten.highest_precision_int_dtype(*arrays) == wider


def test_numbers_have_torchs_dtype_beside_arrays():
  half = jnp.ones(1, jnp.bfloat16)
  assert jaten._torch_binary_scalar_type(2.5, half) == jnp.bfloat16
  assert jaten._torch_binary_scalar_type(2.5, _arrays(AT)) == jnp.float32


def test_scatters_places_are_those_of_torch():
  for dim in (0, -1):
    places, read = jaten._scatter_index(dim, _arrays(AT))
    out = _arrays(X).at[places].set(_arrays(X + 9)[read])
    assert_same(torch_view(out), X.scatter(dim, AT, X + 9))


@pytest.mark.parametrize(
  "function",
  [
    lambda x: jtorch.linalg_det(x @ x.T),
    lambda x: jaten._shape_static_boolean_index_put(x, x > 0, x[:1].sum()),
    lambda x: jaten.max_pool(x, (2,)),
    lambda x: jtorch.getitem(x, (0, slice(1, None))),
  ],
)
def test_they_are_traced_by_jax(function):
  x = _arrays(X)
  assert jnp.allclose(jax.jit(function)(x), function(x))
  gradient = jax.grad(lambda x: function(x).sum())(x)
  assert gradient.shape == x.shape and jnp.isfinite(gradient).all()


def test_tensors_give_tensors():
  assert_same(jtorch.linalg_det(SQUARE.to("jax")), SQUARE.det())
  assert_same(jaten._aten_flatten(X.to("jax")), X.flatten())


DRAWN = {
  "_rand": lambda env: jaten._rand(500, 2, env=env),
  "_aten_randn": lambda env: jaten._aten_randn((500, 2), env=env),
  "_aten_bernoulli": lambda env: jaten._aten_bernoulli(jnp.zeros(1000), 0.25, env=env),
  "_aten_normal": lambda env: jaten._aten_normal(jnp.zeros(1000), 10, 2, env=env),
  "_aten_randint_like": lambda env: jaten._aten_randint_like(
    jnp.zeros(1000), 2, 5, env=env
  ),
  "rand": lambda env: jtorch.rand(500, 2, env=env),
  "randn": lambda env: jtorch.randn(500, 2, env=env),
  "randint": lambda env: jtorch.randint(2, 5, (1000,), env=env),
}
UNIFORM, NORMAL, INTEGERS = (0.5, 12**-0.5), (0.0, 1.0), (3.0, (2 / 3) ** 0.5)
MOMENTS = {
  "_rand": UNIFORM,
  "_aten_randn": NORMAL,
  "_aten_bernoulli": (0.25, 0.1875**0.5),
  "_aten_normal": (10.0, 2.0),
  "_aten_randint_like": INTEGERS,
  "rand": UNIFORM,
  "randn": NORMAL,
  "randint": INTEGERS,
}


@pytest.mark.parametrize("name", DRAWN)
def test_samplers_draw_from_the_environment(name):
  env = torchax.Environment(seed=5)
  first, second = DRAWN[name](env), DRAWN[name](env)
  assert isinstance(first, jax.Array) and not jnp.array_equal(first, second)
  assert jnp.array_equal(first, DRAWN[name](torchax.Environment(seed=5)))
  numbers = jnp.concatenate([first.ravel(), second.ravel()]).astype(jnp.float32)
  mean, deviation = MOMENTS[name]
  # Five standard errors of the mean of 2000 numbers.
  assert abs(numbers.mean() - mean) < 5 * deviation / 2000**0.5
  assert abs(numbers.std() / deviation - 1) < 0.15


REFUSED = {
  "method": (lambda: jaten._aten_upsample(_arrays(IMAGE), [2, 2], True, False, "area")),
  "width": lambda: jaten.highest_precision_int_dtype(_arrays(X), _arrays(AT)),
  "reduce": lambda: jtorch._sparse_mm(_arrays(X), _arrays(X.T), "amax"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name):
  with pytest.raises(ValueError):
    REFUSED[name]()
