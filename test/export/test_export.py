"""Exported programs compute, draw and change state as the module does, in JAX alone."""

import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import nn
from torch.export import Dim

import torchax
from torchax.errors import (
  TracedDrawError,
  UnsupportedDtypeError,
)
from torchax.export import (
  exported_program_to_jax,
  exported_program_to_stablehlo,
  extract_avals,
)
from torchax.interop import extract_jax, jax_jit
from torchax.rng import RngState, address_by, as_key, current, rng_scope


def array(tensor):
  return jnp.asarray(tensor.detach().numpy())


def arrays(tree):
  return torch.utils._pytree.tree_map(
    lambda leaf: array(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
  )


def assert_equals(actual, expected: torch.Tensor):
  """Assert that an array has the shape, dtype and numbers of a CPU tensor."""
  assert_close(torch.from_numpy(np.array(actual)), expected)


class Function(nn.Module):
  """Module of a function of one tensor, for `torch.export`."""

  def __init__(self, function):
    super().__init__()
    self.function = function

  def forward(self, x):
    return self.function(x)


class Function2(Function):
  """Module of a function of two tensors."""

  def forward(self, x, y):
    return self.function(x, y)


def export_of(function, *inputs, **options):
  module = Function(function) if len(inputs) == 1 else Function2(function)
  return torch.export.export(module, inputs, **options)


def program_of(function, *inputs, **options):
  """Return the JAX form of a function without states."""
  states, program = exported_program_to_jax(export_of(function, *inputs, **options))
  assert not states
  return program


# Models -------------------------------------------------------------------------------


class Recurrent(nn.Module):
  def __init__(self):
    super().__init__()
    self.lstm = nn.LSTM(8, 4, 2, dropout=0.5, batch_first=True, bidirectional=True)

  def forward(self, x):
    return self.lstm(x)[0]


class Embedding(nn.Module):
  def __init__(self):
    super().__init__()
    self.embedding = nn.Embedding(10, 8)
    self.head = nn.Linear(8, 3)

  def forward(self, tokens):
    return self.head(self.embedding(tokens).mean(1))


def convolutional():
  return nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
  )  # fmt: skip


def perceptron():
  return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))


def encoder():
  return nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)


FLOATS, IMAGE, SEQUENCE = (4, 8), (4, 3, 8, 8), (4, 3, 8)
MODELS = {
  "perceptron": (perceptron, FLOATS),
  "convolutional": (convolutional, IMAGE),
  "encoder": (encoder, SEQUENCE),
  "recurrent": (Recurrent, SEQUENCE),
  "embedding": (Embedding, (4, 5)),
}


@functools.cache
def model_and_input(name: str):
  make, shape = MODELS[name]
  torch.manual_seed(0)
  model = make()
  inputs = torch.randint(0, 10, shape) if name == "embedding" else torch.randn(shape)
  return model, inputs


def exported(name: str, train: bool, batch=None):
  model, inputs = model_and_input(name)
  shapes = None if batch is None else ({0: batch},)
  return torch.export.export(model.train(train), (inputs,), dynamic_shapes=shapes)


@functools.cache
def evaluated(name: str) -> torch.Tensor:
  model, inputs = model_and_input(name)
  return model.eval()(inputs).detach()


each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_model_in_eval_mode_equals_cpu_torch(name):
  _, inputs = model_and_input(name)
  states, program = exported_program_to_jax(exported(name, train=False))
  (output,) = jax.jit(program)(states, (array(inputs),))
  assert_equals(output, evaluated(name))


@each_model
def test_batch_size_may_change(name):
  _, inputs = model_and_input(name)
  batch = Dim("batch", min=1, max=64)
  states, stablehlo = exported_program_to_stablehlo(exported(name, False, batch))
  assert str(stablehlo.in_avals[-1].shape[0]).startswith("s")
  (output,) = stablehlo.call(states, (array(inputs)[:3],))
  assert_equals(output, evaluated(name)[:3])


@pytest.mark.parametrize(
  "name, is_dynamic", [*[(name, False) for name in MODELS], ("recurrent", True)]
)
def test_model_in_train_mode_draws_as_in_eager_mode(name, is_dynamic):
  model, inputs = model_and_input(name)
  batch = Dim("batch", min=1, max=64) if is_dynamic else None
  states, program = exported_program_to_jax(exported(name, True, batch))
  output, updates = jax.jit(program.with_updates)(states, (array(inputs),), rng=7)
  expected, buffers = trained(name)
  np.testing.assert_allclose(output[0], expected, rtol=1e-5, atol=1e-6)
  assert set(updates) == set(program.mutated)
  for state, value in updates.items():
    np.testing.assert_allclose(value, buffers[state], rtol=1e-5, atol=1e-6)


@functools.cache
def trained(name: str):
  """Return output and buffers of one call on jax with seed 7."""
  make, _ = MODELS[name]
  model, inputs = model_and_input(name)
  moved = make()
  moved.load_state_dict(model.state_dict())
  moved = moved.to("jax").train()
  with torchax.default_env(), torch.no_grad():
    torch.manual_seed(7)
    output = jax_jit(moved)(inputs.to("jax")).jax()
  return output, {key: value.jax() for key, value in moved.named_buffers()}


def test_program_for_inference_is_accepted():
  _, inputs = model_and_input("convolutional")
  decomposed = exported("convolutional", train=False).run_decompositions()
  states, program = exported_program_to_jax(decomposed)
  (output,) = jax.jit(program)(states, (array(inputs),))
  assert_equals(output, evaluated("convolutional"))


# States -------------------------------------------------------------------------------


class Holder(nn.Module):
  """Module with tied parameters, both kinds of buffers and a constant."""

  def __init__(self):
    super().__init__()
    self.first = nn.Linear(3, 3)
    self.second = nn.Linear(3, 3)
    self.second.weight = self.first.weight
    self.register_buffer("kept", torch.full((3,), 2.0))
    self.register_buffer("dropped", torch.full((3,), 3.0), persistent=False)
    self.constant = torch.tensor([1.0, 2.0, 3.0])

  def forward(self, x):
    return self.second(self.first(x)) * self.kept + self.dropped + self.constant


def test_states_are_parameters_buffers_and_constants():
  holder, x = Holder(), torch.randn(2, 3)
  names, tensors, program = exported_program_to_jax(
    torch.export.export(holder, (x,)), export_raw=True
  )
  assert names == program.names
  assert set(names) == {
    *("first.weight", "first.bias", "second.weight", "second.bias"),
    *("kept", "dropped", "constant"),
  }
  assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
  (output,) = program([array(tensor) for tensor in tensors], (array(x),))
  assert_equals(output, holder(x))


def test_tied_parameters_are_one_array():
  holder = Holder()
  states, program = exported_program_to_jax(
    torch.export.export(holder, (torch.ones(1, 3),))
  )
  named = dict(zip(program.names, states))
  assert named["first.weight"] is named["second.weight"]


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, "quantize"])
def test_state_that_is_not_dense_raises_and_is_named(convert):
  if convert == "quantize":
    convert = functools.partial(
      torch.quantize_per_tensor, scale=0.1, zero_point=0, dtype=torch.qint8
    )
  program = torch.export.export(Holder(), (torch.ones(1, 3),))
  program.state_dict["kept"] = convert(torch.ones(3))
  with pytest.raises(UnsupportedDtypeError, match="kept is "):
    exported_program_to_jax(program)


# Changes in place ---------------------------------------------------------------------


def test_running_statistics_are_carried_between_steps():
  norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
  states, program = exported_program_to_jax(torch.export.export(norm, (x,)))
  assert program.mutated == ("running_mean", "running_var", "num_batches_tracked")
  step = jax.jit(program.with_updates)
  for scale in (1.0, 3.0):
    outputs, updates = step(states, (array(x) * scale,))
    states = program.updated(states, updates)
    assert_equals(outputs[0], norm(x * scale))
  for name, state in zip(program.names, states):
    assert_equals(state, norm.state_dict()[name])


def test_call_returns_no_updates():
  x = torch.randn(4, 3)
  states, program = exported_program_to_jax(
    torch.export.export(nn.BatchNorm1d(3), (x,))
  )
  (output,) = program(states, (array(x),))
  assert output.shape == (4, 3)


def test_stablehlo_returns_updates_if_there_are_any():
  norm, x = nn.BatchNorm1d(3), torch.randn(4, 3)
  states, stablehlo = exported_program_to_stablehlo(torch.export.export(norm, (x,)))
  (output,), updates = stablehlo.call(states, (array(x),))
  assert_equals(output, norm(x))
  assert_equals(updates["running_var"], norm.running_var)


def test_changed_inputs_are_returned_by_name():
  def change(x, y):
    x.add_(1)
    y[0] = 5.0
    return x * y

  x, y = torch.ones(2, 3), torch.zeros(2, 3)
  program = export_of(change, x.clone(), y.clone())
  states, program = exported_program_to_jax(program)  # 5.0 is a constant state
  assert program.mutated == ()
  assert program.mutated_inputs == ("x", "y")
  (output,), updates = program.with_updates(states, (array(x), array(y)))
  assert_equals(output, change(x, y))
  assert_equals(updates["x"], x)
  assert_equals(updates["y"], y)


# Inputs and outputs -------------------------------------------------------------------


class Trees(nn.Module):
  def forward(self, x, parts, n=2, *, scale=None, flag=True):
    first = x * n + parts["b"]
    return {"z": first * scale if flag else first, "a": (parts["a"], None, n)}


TREE = (torch.ones(2, 3), {"b": torch.ones(3), "a": torch.zeros(2)}, 3)
KEYWORDS = {"flag": True, "scale": torch.full((1,), 2.0)}


@functools.cache
def tree_program():
  return exported_program_to_jax(torch.export.export(Trees(), TREE, KEYWORDS))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_arguments_and_results_are_trees(transform):
  states, program = tree_program()
  keywords = {"scale": jnp.full((1,), 2.0), "flag": True}
  outputs = transform(program)(states, arrays(TREE), keywords)
  assert type(outputs) is tuple
  found, expected = program.unflatten(outputs), Trees()(*TREE, **KEYWORDS)
  assert_equals(found["z"], expected["z"])
  assert_equals(found["a"][0], expected["a"][0])
  assert found["a"][1] is None
  assert found["a"][2] == 3


@pytest.mark.parametrize("with_constants", [False, True])
def test_arguments_may_be_leaves(with_constants):
  states, program = tree_program()
  leaves = torch.utils._pytree.tree_leaves((arrays(TREE), arrays(KEYWORDS)))
  if not with_constants:
    leaves = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
  assert_equals(program(states, leaves)[0], Trees()(*TREE, **KEYWORDS)["z"])


def test_avals_match_the_arrays():
  avals = extract_avals(torch.export.export(Trees(), TREE, KEYWORDS))
  assert [aval.shape for aval in avals] == [(2, 3), (3,), (2,), (1,)]


X = jnp.ones((2, 3))
PARTS = {"b": jnp.ones(3), "a": jnp.zeros(2)}
BAD_ARGUMENTS = {
  "shape": ((jnp.ones((2, 4)), PARTS, 3), ValueError, r"x .*\[2, 3\].*\[2, 4\]"),
  "rank": ((jnp.ones(3), PARTS, 3), ValueError, r"x .*\[2, 3\].*\[3\]"),
  "dtype": ((X.astype(int), PARTS, 3), TypeError, "x .*float32.*int32"),
  "no array": (("x", PARTS, 3), TypeError, "x .*array.*str"),
  "constant": ((X, PARTS, 4), ValueError, "n was 3 .* got 4"),
  "number": ((X, PARTS), ValueError, r"'x', 'parts_b', 'parts_a', 'n'.*got 5"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_a_wrong_argument_is_named(case):
  states, program = tree_program()
  inputs, error, message = BAD_ARGUMENTS[case]
  with pytest.raises(error, match=message):
    program(states, inputs, {"flag": True, "scale": jnp.ones(1)})


def test_a_wrong_number_of_states_raises():
  _, program = tree_program()
  with pytest.raises(ValueError, match="0 states, but got 1"):
    program([1], arrays(TREE), arrays(KEYWORDS))


# Random numbers -----------------------------------------------------------------------

RANDOM = {
  "rand_like": torch.rand_like,
  "randn": lambda x: x + torch.randn(4, 8, device=x.device),
  "randint": lambda x: x + torch.randint(0, 9, (4, 8), device=x.device),
  "randperm": lambda x: x + torch.randperm(8, device=x.device),
  "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
  "uniform_": lambda x: x.clone().uniform_(1, 2),
  "exponential_": lambda x: x.clone().exponential_(),
  "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2).float(),
  "normal": lambda x: torch.normal(x, x.abs()),
  "dropout_": lambda x: F.dropout(x * 1, 0.1, True, inplace=True),
  "dropout of all": lambda x: F.dropout(x, 1.0) + torch.rand_like(x),
  "dropout2d": lambda x: F.dropout2d(x[:, :, None, None]),
  "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
  "rrelu": lambda x: F.rrelu(x, training=True),
  "attention": lambda x: F.scaled_dot_product_attention(
    x[None], x[None], x[None], dropout_p=0.3
  ),
  "unused": lambda x: (torch.rand_like(x), torch.rand_like(x))[1],
  "two": lambda x: torch.rand_like(x) - torch.rand_like(x),
}


@pytest.mark.parametrize("name", RANDOM)
def test_program_draws_as_in_eager_mode(name):
  x = torch.randn(4, 8)
  (output,) = program_of(RANDOM[name], x)([], (array(x),), rng=3)
  with torchax.default_env():
    torch.manual_seed(3)
    expected = RANDOM[name](x.to("jax")).jax()
  np.testing.assert_array_equal(output, expected)


@functools.cache
def noise():
  return program_of(torch.rand_like, torch.zeros(4))


def test_rng_is_a_seed_a_key_or_a_state():
  state = RngState.from_seed(3)
  draws = [noise()([], (jnp.zeros(4),), rng=rng)[0] for rng in (3, state.key, state)]
  assert (draws[0] == draws[1]).all() and (draws[0] == draws[2]).all()
  later = noise()([], (jnp.zeros(4),), rng=state.advance(1))[0]
  assert (draws[0] != later).all()


def test_without_rng_the_current_stream_advances():
  before = current().state.count
  first, second = (noise()([], (jnp.zeros(4),))[0] for _ in range(2))
  assert (first != second).all()
  assert current().state.count == before + 2


def test_a_draw_without_rng_raises_in_a_transformation():
  with pytest.raises(TracedDrawError):
    jax.jit(noise())([], (jnp.zeros(4),))


def test_draws_from_a_key_follow_the_environments_addressing():
  """A module draws by site here; a state carries its own addressing."""
  (by_order,) = noise()([], (jnp.zeros(4),), rng=3)
  address_by("site")
  try:
    (by_site,) = noise()([], (jnp.zeros(4),), rng=3)
    (of_state,) = noise()([], (jnp.zeros(4),), rng=RngState.from_seed(3))
    with rng_scope(3):
      expected = torch.rand(4, device="jax").numpy()
  finally:
    address_by("order")
    current()  # take over the change here, not in the trace of the next test
  np.testing.assert_array_equal(of_state, by_order)
  np.testing.assert_array_equal(by_site, expected)
  assert (by_site != by_order).any()


def test_stablehlo_that_draws_takes_key_data_and_count():
  dropout, x = Function(lambda x: F.dropout(F.dropout(x, 0.5), 0.5)), torch.ones(64)
  program = torch.export.export(dropout, (x,))
  states, stablehlo = exported_program_to_stablehlo(program)
  assert [str(aval) for aval in stablehlo.in_avals] == [
    "float32[64]", "uint32[2]", "uint32[]",
  ]  # fmt: skip
  words = jax.random.key_data(jax.random.key(5))
  (first,) = stablehlo.call(states, (array(x),), words, np.uint32(0))
  (later,) = stablehlo.call(states, (array(x),), words, np.uint32(2))
  _, program = exported_program_to_jax(program)
  state = RngState.from_seed(5)
  np.testing.assert_array_equal(first, program([], (array(x),), rng=state)[0])
  state = state.advance(2)
  np.testing.assert_array_equal(later, program([], (array(x),), rng=state)[0])
  assert (first != later).any()


def test_stablehlo_without_draws_has_no_key():
  program = torch.export.export(nn.Dropout(0.5).eval(), (torch.ones(4),))
  _, stablehlo = exported_program_to_stablehlo(program)
  assert [str(aval) for aval in stablehlo.in_avals] == ["float32[4]"]


# Files --------------------------------------------------------------------------------

ALONE = """
import pickle, sys
import jax, numpy as np

path = sys.argv[1]
exported = jax.export.deserialize(bytearray(open(path + ".jax", "rb").read()))
states, x, rng = pickle.load(open(path + ".arrays", "rb"))
output = exported.call(states, (x,), *rng)
assert "torch" not in sys.modules and "torchax" not in sys.modules
np.save(path + ".npy", output[0])
"""


@pytest.mark.parametrize("train", [False, True])
def test_file_runs_in_a_process_without_torch(train, tmp_path):
  pytest.importorskip("flatbuffers", reason="jax.export writes files with it")
  model, x = model_and_input("perceptron")
  states, stablehlo = exported_program_to_stablehlo(exported("perceptron", train))
  rng = (np.asarray(jax.random.key_data(jax.random.key(7))), np.uint32(0))
  rng = rng if train else ()
  (tmp_path / "m.jax").write_bytes(stablehlo.serialize())
  values = (jax.tree.map(np.asarray, states), x.numpy(), rng)
  (tmp_path / "m.arrays").write_bytes(pickle.dumps(values))
  command = [sys.executable, "-c", ALONE, str(tmp_path / "m")]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  expected = trained("perceptron")[0] if train else evaluated("perceptron").numpy()
  output = np.load(tmp_path / "m.npy")
  np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)


# extract_jax --------------------------------------------------------------------------


def test_extract_jax_exports_with_the_key_as_an_operand():
  model, x = model_and_input("perceptron")
  states, function = extract_jax(model.train())

  def drawing(states, x, words, count):
    return function(states, (x,), rng=RngState(as_key(words), count))

  words = jax.random.key_data(jax.random.key(7))
  args = (states, array(x), words, jnp.uint32(0))
  stablehlo = jax.export.export(jax.jit(drawing))(*args)
  np.testing.assert_allclose(
    stablehlo.call(*args), trained("perceptron")[0], rtol=1e-5, atol=1e-6
  )


def test_extract_jax_narrows_wide_inputs():
  model, tokens = model_and_input("embedding")
  states, function = extract_jax(model.eval())
  stablehlo = jax.export.export(jax.jit(function))(states, (array(tokens),))
  assert stablehlo.in_avals[-1].dtype == jnp.int32
  assert_equals(stablehlo.call(states, (array(tokens),)), evaluated("embedding"))


def test_extract_jax_points_to_torch_export_for_symbolic_sizes():
  model, _ = model_and_input("perceptron")
  states, function = extract_jax(model.eval())
  shape = jax.export.symbolic_shape("batch, 8")
  aval = jax.ShapeDtypeStruct(shape, jnp.float32)
  with pytest.raises(TypeError, match="torch.export"):
    jax.export.export(jax.jit(function))(states, (aval,))
