"""Views of values and functions between torch and JAX, and calls across.

That random draws agree across these boundaries is asserted in `rng/`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from compare import assert_same
from ops.harness import floats

import torchax
from torchax import interop
from torchax.errors import MixedDeviceError, MutationError
from torchax.tensor import Tensor

A = floats(3, 4)
B = floats(3, 4, seed=1)
env = torchax.default_env()


def test_trees_convert_without_copies(x):
  tree = {"a": [x, 1, "s", None], "b": (x, 2.5)}
  arrays = interop.jax_view(tree)
  assert arrays["a"][0] is x.jax() and arrays["a"][1:] == [1, "s", None]
  back = interop.torch_view(arrays)
  assert back["b"][0].jax() is x.jax() and back["b"][1] == 2.5
  assert isinstance(back["a"][0], Tensor)


DTYPES = {
  torch.float32: jnp.dtype("float32"),
  torch.bfloat16: jnp.dtype("bfloat16"),
  torch.int32: jnp.dtype("int32"),
  torch.bool: jnp.dtype("bool"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_convert(dtype):
  assert interop.jax_view(dtype) == DTYPES[dtype]
  assert interop.torch_view(DTYPES[dtype]) == dtype


@pytest.mark.parametrize("scalar_type", [np.float32, np.int32], ids=str)
def test_numpy_scalar_types_are_dtypes(scalar_type):
  assert interop.torch_view(scalar_type) == interop.torch_view(np.dtype(scalar_type))


def test_elem_views_convert_one_value_not_a_tree(x):
  assert interop.jax_view_elem(x) is x.jax()
  assert interop.torch_view_elem(x.jax()).jax() is x.jax()
  assert interop.jax_view_elem("s") == interop.torch_view_elem("s") == "s"
  assert interop._jax_view(x) is x.jax()
  assert interop._torch_view(x.jax()).jax() is x.jax()


def test_other_values_are_unchanged():
  values = [1, 2.5, "s", None, True, slice(1)]
  assert interop.jax_view(values) == values
  assert interop.torch_view(values) == values
  assert interop.torch_view(int) is int and interop.jax_view(int) is int


def test_typed_keys_stay_keys():
  key = jax.random.key(0)
  assert interop.torch_view(key) is key


def test_a_cpu_tensor_is_no_jax_value():
  with pytest.raises(MixedDeviceError, match=r'to\("jax"\)'):
    interop.jax_view([A])


def test_a_view_reads_its_base(x):
  assert jnp.array_equal(interop.jax_view(x.t()[1]), x.jax().T[1])


# Functions ----------------------------------------------------------------------------


def test_a_torch_function_is_a_jax_function(x):
  function = interop.jax_view(torch.nn.functional.gelu)
  result = function(x.jax())
  assert isinstance(result, jax.Array)
  assert_same(interop.torch_view(result), torch.nn.functional.gelu(A))
  assert function.__name__ == "gelu" and "gelu" in repr(function)


TRANSFORMS = {
  "jit": jax.jit,
  "vmap": jax.vmap,
  "jit_of_vmap": lambda f: jax.jit(jax.vmap(f)),
  "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_torch_function_takes_jax_transformations(transform, x):
  function = interop.jax_view(lambda a: torch.softmax(a * 2, -1) + a.sum(-1, True))
  expected = torch.softmax(A * 2, -1) + A.sum(-1, True)
  assert_same(interop.torch_view(transform(function)(x.jax())), expected)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_a_torch_function_takes_numpy_arrays(transform):
  function = transform(interop.jax_view(lambda tree: tree["a"].size(0) * tree["a"]))
  expected = A * (3 if transform is not jax.vmap else 4)
  assert_same(interop.torch_view(function({"a": A.numpy()})), expected)


def test_a_torch_function_takes_jax_differentiation(x):
  function = interop.jax_view(lambda a, w: ((a @ w.t()) ** 2).sum())
  value, grads = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(
    x.jax(), jnp.asarray(B.numpy())
  )
  a, w = A.clone().requires_grad_(), B.clone().requires_grad_()
  expected = ((a @ w.t()) ** 2).sum()
  expected.backward()
  assert_same(interop.torch_view(value), expected.detach())
  assert_same(interop.torch_view(list(grads)), [a.grad, w.grad])


def test_a_module_is_a_jax_function(x):
  model = torch.nn.Linear(4, 2)
  expected = model(A)
  function = jax.jit(interop.jax_view(model.to("jax")))
  assert_same(interop.torch_view(function(x.jax())), expected.detach())


def test_a_jax_function_is_a_torch_function(x):
  function = interop.torch_view(lambda a, b, scale=1: {"sum": (a + b) * scale})
  result = function(x, x, scale=2)
  assert isinstance(result["sum"], Tensor)
  assert_same(result, {"sum": A * 4})


def test_call_jax_converts_arguments_and_results(x):
  assert_same(interop.call_jax(jnp.matmul, x, x.t()), A @ A.t())
  assert_same(
    interop.call_jax(
      lambda tree, dtype: tree["a"].astype(dtype), {"a": x}, torch.int32
    ),
    A.int(),
  )
  assert interop.call_jax(lambda a: a.shape, x) == (3, 4)


def test_call_jax_takes_functions_as_arguments(x):
  doubled = interop.call_jax(jax.vmap, lambda row: row * 2)(x)
  assert_same(doubled, A * 2)
  carry, rows = interop.call_jax(
    jax.lax.scan, lambda c, row: (c + row, c * 1.0), torch.zeros(4, device="jax"), x
  )
  assert_same(carry, A.sum(0))
  assert_same(rows, torch.stack([torch.zeros(4), A[0], A[0] + A[1]]))


def test_call_torch_converts_arguments_and_results(x):
  result = interop.call_torch(torch.matmul, x.jax(), x.jax().T)
  assert isinstance(result, jax.Array)
  assert_same(interop.torch_view(result), A @ A.t())
  cast = interop.call_torch(lambda a, dtype: a.to(dtype), x.jax(), jnp.dtype("int8"))
  assert cast.dtype == jnp.int8
  assert interop.call_torch(lambda a: a.shape[0], x.jax()) == 3


def test_call_torch_enables_the_environment_for_the_call():
  assert interop.call_torch(lambda: env.enabled)
  assert not env.enabled


def test_call_torch_ends_after_an_error():
  def fail():
    raise KeyError("stop")

  with pytest.raises(KeyError, match="stop"):
    interop.call_torch(fail)
  assert not env.enabled


def test_call_torch_changes_outer_tensors_outside_of_a_trace(x):
  interop.call_torch(lambda a: x.add_(a), jnp.ones(()))
  assert_same(x, A + 1)


def test_raw_transformation_rejects_a_captured_write(x):
  function = interop.jax_view(lambda a: x.add_(a) * 1)
  with pytest.raises(MutationError, match="jax_jit") as error:
    jax.jit(function)(jnp.ones(()))
  assert "[3, 4]" in str(error.value)
  assert_same(x, A)


def test_raw_transformation_keeps_an_argument_write_inside(x):
  function = jax.jit(interop.jax_view(lambda a: a.add_(1) * 2))
  assert_same(interop.torch_view(function(x.jax())), (A + 1) * 2)
  assert_same(x, A)
