"""Single lines of programs for upstream, one a row."""

import collections
import copy
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import torchax
from torchax import interop
from torchax.interop import call_jax, call_torch, jax_jit, jax_view, torch_view
from torchax.ops import mappings, op_base
from torchax.tensor import Tensor

F = torch.nn.functional
Point = collections.namedtuple("Point", "a b")


@pytest.fixture(autouse=True)
def _globally():
  torchax.enable_globally()
  yield
  torchax.disable_globally()


def env():
  return torchax.default_env()


def ones(*size, **options):
  return torch.ones(*size, device="jax", **options)


def _sharding():
  mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
  return NamedSharding(mesh, PartitionSpec("x"))


def _numbers(value):
  """Convert the tensors and arrays of a result to numbers."""
  if isinstance(value, torch.Tensor | jax.Array):
    return value.tolist()
  if isinstance(value, tuple | list):
    return [_numbers(part) for part in value]
  return value


TENSORS = {
  "made of an array": (lambda: Tensor(jnp.ones(2), env()), [1, 1]),
  "with a gradient": (lambda: Tensor(jnp.ones(2), env(), True).requires_grad, True),
  "its array": (lambda: ones(2)._elem, [1, 1]),
  "its sharding": (
    lambda: ones(2).apply_jax(jax.device_put, _sharding()).jax().sharding.spec,
    PartitionSpec("x"),
  ),
  "its shards": (lambda: ones(2)._elem.addressable_shards[0].data, [1, 1]),
  "a function of JAX on it": (lambda: ones(2).apply_jax(jnp.add, 2), [3, 3]),
  "numpy": (lambda: np.asarray(ones(2)).sum() + ones(2).numpy().sum(), 4),
  "with an array": (lambda: ones(2) + jnp.ones(2), [2, 2]),
  "with a number of numpy": (lambda: ones(2) * np.float32(2), [2, 2]),
  "an attribute": (lambda: vars(_with_attribute())["weight_loader"], 3),
  "pickled": (lambda: pickle.loads(pickle.dumps(ones(2))), [1, 1]),
  "copied": (lambda: copy.deepcopy(ones(2)).device.type, "jax"),
  "in a format": (lambda: f"{ones(()):.2f}", "1.00"),
  "moved without blocking": (
    lambda: torch.ones(2, device="cpu").to("jax", non_blocking=True),
    [1, 1],
  ),
  "waited for": (lambda: jax.block_until_ready(jax_view(ones(2))), [1, 1]),
  "a parameter of a view": (
    lambda: isinstance(torch.nn.Parameter(torch_view(jnp.ones(2))), Tensor),
    True,
  ),
}


def _with_attribute():
  tensor = torch_view(jnp.ones(2))
  tensor.weight_loader = 3
  return tensor


VIEWS = {
  "of a dtype": (lambda: jax_view(torch.bfloat16), jnp.dtype("bfloat16")),
  "of what is no tensor": (lambda: jax_view((None, 1, "a")), [None, 1, "a"]),
  "of a tree": (lambda: torch_view({"a": (jnp.ones(1),)})["a"], [[1]]),
  "of a compiled function": (lambda: torch_view(jax.jit(jnp.cos))(ones(1) * 0), [1]),
  "of an exported one": (
    lambda: torch_view(
      jax.export.export(jax.jit(jax_view(torch.square)))(
        jax.ShapeDtypeStruct((2,), "float32")
      ).call
    )(ones(2) * 3),
    [9, 9],
  ),
  "of a mapped one": (
    lambda: jax.vmap(lambda x: jax_view(torch_view(x).sum()))(jnp.ones((2, 3))),
    [3, 3],
  ),
  "of a differentiated one": (
    lambda: jax.grad(jax_view(lambda x: (x**2).sum()))(jnp.ones(2)),
    [2, 2],
  ),
  "in a loop": (
    lambda: jax.lax.while_loop(
      lambda c: jax_view(torch_view(c) < 3), lambda c: jax_view(torch_view(c) + 1), 0.0
    ),
    3,
  ),
  "shapes alone": (
    lambda: (
      jax.eval_shape(
        jax_view(lambda x: x.sum(0)), jax.ShapeDtypeStruct((2, 3), "float32")
      ).shape
    ),
    [3],
  ),
  "sharded": (
    lambda: torch_view(
      jax.shard_map(
        jax_view(lambda x: x * 2),
        mesh=_sharding().mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
      )
    )(ones(2)),
    [2, 2],
  ),
}


def _double(x_ref, out_ref):
  out_ref[...] = x_ref[...] * 2


CALLS = {
  "with names": (
    lambda: call_jax(jnp.sum, ones(2, 3), axis=0, keepdims=True),
    [[2] * 3],
  ),
  "with None": (
    lambda: call_jax(lambda x, y: x if y is None else y, ones(1), None),
    [1],
  ),
  "a branch": (
    lambda: call_jax(jax.lax.cond, True, lambda x: x + 1, lambda x: x - 1, ones(1)),
    [2],
  ),
  "a kernel": (
    lambda: call_jax(
      lambda x: pallas.pallas_call(
        _double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
      )(x),
      ones(2),
    ),
    [2, 2],
  ),
  "a callback": (
    lambda: call_jax(
      lambda x: jax.pure_callback(
        lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
      ),
      ones(2),
    ),
    [2, 2],
  ),
  "torch from JAX": (lambda: call_torch(torch.square, jnp.ones(2) * 3), [9, 9]),
  "a placement": (lambda: call_jax(jax.device_put, ones(1), jax.devices()[0]), [1]),
  "a loop of torch": (
    lambda: interop.fori_loop(0, 3, lambda i, c: c + i, ones(())),
    4,
  ),
}

JIT = {
  "static arguments": (
    lambda: jax_jit(lambda x, n: x * n, {"static_argnums": (1,)})(ones(1), 3),
    [3],
  ),
  "static names": (
    lambda: jax_jit(lambda x, n: x * n, {"static_argnames": ("n",)})(ones(1), n=3),
    [3],
  ),
  "donated names": (
    lambda: jax_jit(lambda a, b: a + b, {"donate_argnames": ("a",)})(
      ones(1), b=ones(1)
    ),
    [2],
  ),
  "shardings of results": (
    lambda: jax_jit(lambda x: x * 2, {"out_shardings": _sharding()})(ones(2)),
    [2, 2],
  ),
  "named tuples": (
    lambda: jax_jit(lambda p: Point(p.a + 1, p.b))(Point(ones(1), ones(1))),
    [[2], [1]],
  ),
  "None": (lambda: jax_jit(lambda a, b: (a, b))(ones(1), None), [[1], None]),
  "arrays": (lambda: jax_jit(lambda a: a + 1)(jnp.ones(1)), [2]),
  "closures": (lambda: jax_jit(functools.partial(torch.add, ones(1)))(ones(1)), [2]),
  "writing at slots": (lambda: jax_jit(_write)(torch.zeros(2, 2, 1).to("jax")), [5, 5]),
  "classes of numbers": (
    lambda: jax_jit(lambda i: F.one_hot(i, 3))(torch.tensor([2]).to("jax")),
    [[0, 0, 1]],
  ),
}


def _write(cache):
  cache.view(-1, 1)[torch.tensor([1, 3], device="jax")] = 5 * ones(2, 1)
  return cache[:, 1, 0]


ENVIRONMENT = {
  "a tree is moved": (lambda: env().to_xla({"a": [torch.ones(1), 2]})["a"], [[1], 2]),
  "copies": (lambda: env().j2t_copy(env().t2j_copy(torch.ones(1))), [1]),
  "its own dispatch": (
    lambda: env().dispatch(torch.ops.aten.add.Tensor, (), (ones(1), ones(1)), {}),
    [2],
  ),
  "a cast and a move": (
    lambda: str(env()._to_copy(ones(1), torch.bfloat16, "jax").dtype),
    "torch.bfloat16",
  ),
  "a key": (lambda: _is_same_with_key(), True),
  "a seed": (lambda: _is_same_with_seed(env().manual_seed), True),
  "a seed of torch": (lambda: _is_same_with_seed(torch.manual_seed), True),
  "a thread": (lambda: _in_a_thread(lambda: (ones(1) + 1).item()), [2]),
  "off for a while": (lambda: _kind_when_off(), "Tensor"),
  "an array of a parameter": (
    lambda: mappings.t2j(torch.nn.Parameter(torch.ones(1, device="cpu"))),
    [1],
  ),
  "an array of a transposed tensor": (
    lambda: mappings.t2j(torch.eye(2, device="cpu").t(), use_dlpack=False),
    [[1, 0], [0, 1]],
  ),
  "an in-place variant": (lambda: op_base.InplaceOp(torch.add)(ones(1), ones(1)), [2]),
}


def _is_same_with_key():
  key, drawn = jax.random.key(0), []
  for _ in range(2):
    with env().override_property(prng=key):
      drawn.append(torch.rand(3, device="jax"))
  return torch.equal(*drawn)


def _is_same_with_seed(seed):
  drawn = []
  for _ in range(2):
    seed(3)
    drawn.append(torch.rand(3, device="jax"))
  return torch.equal(*drawn)


def _in_a_thread(function):
  found = []

  def run():
    with env():
      found.append(function())

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  return found


def _kind_when_off():
  with torchax.disable_temporarily():
    assert not isinstance(torch.ones(1), Tensor)
  return type(ones(1)).__name__


MODULES = {
  "data is replaced": (lambda: _layer_with(lambda w: w * 0).weight.sum(), 0),
  "data is cast": (
    lambda: str(_layer_with(torch.Tensor.half).weight.dtype),
    "torch.float16",
  ),
  "a part of the data is written": (lambda: _loaded().weight[:, 0], [1, 0]),
  "made inside of a device": (lambda: _made_on_jax().weight.device.type, "jax"),
  "emptied onto jax": (
    lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device="jax").bias.shape,
    [2],
  ),
  "loaded from the CPU": (
    lambda: len(
      _layer().load_state_dict(torch.nn.Linear(2, 2, device="cpu").state_dict())
    ),
    2,
  ),
  "a parametrization": (
    lambda: (
      torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
      .to("jax")(ones(1, 2))
      .shape
    ),
    [1, 2],
  ),
  "a list of parameters": (
    lambda: (
      torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))]).to("jax")[0].tolist()
    ),
    [1],
  ),
}


def _layer():
  return torch.nn.Linear(2, 2).to("jax")


def _layer_with(change):
  layer = _layer()
  layer.weight.data = change(layer.weight.data)
  return layer


def _loaded():
  layer = _layer_with(lambda w: w * 0)
  layer.weight.data.narrow(0, 0, 1).copy_(torch.ones(1, 2, device="cpu"))
  return layer


def _made_on_jax():
  with torch.device("jax"):
    return torch.nn.Linear(2, 2)


ROWS = [
  pytest.param(*row, id=f"{theme}-{name}")
  for theme, table in {
    "tensors": TENSORS,
    "views": VIEWS,
    "calls": CALLS,
    "jit": JIT,
    "environment": ENVIRONMENT,
    "modules": MODULES,
  }.items()
  for name, row in table.items()
]


@pytest.mark.parametrize(("run", "expected"), ROWS)
def test_a_line_of_a_program_runs(run, expected):
  found = _numbers(run())
  if isinstance(expected, list):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
  assert found == expected
