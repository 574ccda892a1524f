"""LSTM, GRU and RNN in `torch.compile`: one node each, equal to CPU torch and eager."""

import copy
import importlib

import pytest
import torch
from compare import assert_close
from ops.harness import floats, ints
from packaging import version
from torch import fx, nn
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchax
import torchax.dynamo
from torchax.dynamo import recurrent_graphs

TIME, BATCH, FEATURES, HIDDEN = 5, 3, 4, 6
X = floats(TIME, BATCH, FEATURES)


def compiled(function, **settings):
  return torch.compile(function, backend="jax", **{"fullgraph": True, **settings})


def network(kind, *args, **options) -> nn.Module:
  torch.manual_seed(1)
  return kind(FEATURES, HIDDEN, *args, **options)


def results_and_gradients(run, module, *inputs) -> list[torch.Tensor]:
  """Return all results of a network, and gradients of its inputs and parameters."""
  inputs = [value.detach().clone().requires_grad_() for value in inputs]
  found = pytree.tree_leaves(run(*inputs))
  loss = sum((value.float() * value).mean() for value in found)
  return [*found, *torch.autograd.grad(loss, [*inputs, *module.parameters()])]


def assert_all_close(actual, expected):
  assert len(actual) == len(expected)
  for place, (have, want) in enumerate(zip(actual, expected)):
    assert have.stride() == want.stride(), place
    assert_close(have.detach().cpu(), want.detach(), f"result {place}")


ROWS = {
  "LSTM of two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
  "projected LSTM, batch first": (nn.LSTM, {"proj_size": 2, "batch_first": True}),
  "LSTM without biases": (nn.LSTM, {"bias": False, "proj_size": 2}),
  "GRU both ways, batch first": (nn.GRU, {"bidirectional": True, "batch_first": True}),
  "RNN with tanh both ways": (nn.RNN, {"bidirectional": True}),
  "RNN with relu, two layers": (nn.RNN, {"num_layers": 2, "nonlinearity": "relu"}),
  "LSTM cell": (nn.LSTMCell, {}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", ROWS)
def test_outputs_and_gradients_equal_cpu_torch(name):
  kind, options = ROWS[name]
  module = network(kind, **options)
  x = X[0] if kind is nn.LSTMCell else X
  expected = results_and_gradients(module, module, x)
  assert_all_close(results_and_gradients(compiled(module), module, x), expected)


def test_one_sequence_without_a_batch():
  module = network(nn.LSTM)
  expected = results_and_gradients(module, module, X[:, 0])
  assert_all_close(results_and_gradients(compiled(module), module, X[:, 0]), expected)


def test_initial_state_has_a_gradient():
  module = network(nn.LSTM)
  given = (X, floats(1, BATCH, HIDDEN, seed=1), floats(1, BATCH, HIDDEN, seed=2))

  def last_state(x, hidden, cell):
    return module(x, (hidden, cell))[1]

  expected = results_and_gradients(last_state, module, *given)
  actual = results_and_gradients(compiled(last_state), module, *given)
  assert_all_close(actual, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_inference_equals_cpu_torch(kind):
  module = network(kind, 2, dropout=0.5, bidirectional=True).eval()
  run = compiled(module)
  for context in (torch.no_grad, torch.inference_mode):
    with context():
      assert_all_close(*(pytree.tree_leaves(f(X)) for f in (run, module)))


def test_double_precision_is_kept_with_x64():
  module = network(nn.GRU).double()
  run = compiled(module, options={"x64": True})
  with torch.no_grad():
    actual, expected = run(X.double())[0], module(X.double())[0]
  assert actual.dtype is torch.float64
  torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


AUTOCAST = {
  "LSTM": (nn.LSTM, {}),
  "projected LSTM": (nn.LSTM, {"proj_size": 2}),
  "GRU": (nn.GRU, {}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_gives_the_dtypes_of_cpu_torch(name):
  kind, options = AUTOCAST[name]
  module = network(kind, **options)
  with torch.autocast("cpu", torch.bfloat16):
    try:
      expected = results_and_gradients(module, module, X)
    except RuntimeError as error:
      if "primitive descriptor" not in str(error):
        raise
      pytest.skip(f"CPU torch has no {name} of bfloat16 for this processor: {error}")
    actual = results_and_gradients(compiled(module), module, X)
  assert [value.dtype for value in actual] == [value.dtype for value in expected]
  for have, want in zip(actual, expected):
    torch.testing.assert_close(have, want, rtol=1.6e-2, atol=1e-2)  # in bfloat16


# Random numbers -----------------------------------------------------------------------


def test_dropout_between_layers_draws_as_in_eager_mode():
  module = network(nn.RNN, 3, dropout=0.4)
  run = compiled(module)
  torch.manual_seed(3)
  actual = [results_and_gradients(run, module, X) for _ in range(2)]
  assert not torch.equal(actual[0][0], actual[1][0])

  with torchax.default_env():
    on_jax = copy.deepcopy(module).to("jax")
    torch.manual_seed(3)
    for have in actual:
      want = results_and_gradients(on_jax, on_jax, X.to("jax"))
      for place, (one, other) in enumerate(zip(have, want, strict=True)):
        assert_close(one, other.detach().cpu(), f"result {place}")


def test_checkpoint_recomputes_dropout():
  module = network(nn.RNN, 2, dropout=0.5)

  def in_checkpoint(x):
    return checkpoint(module, x, use_reentrant=False)

  torch.manual_seed(3)
  expected = results_and_gradients(compiled(module), module, X)
  torch.manual_seed(3)
  actual = results_and_gradients(compiled(in_checkpoint), module, X)
  assert_all_close(actual, expected)


def test_dropout_follows_train_and_eval():
  module = network(nn.GRU, 2, dropout=0.5)
  run = compiled(module)
  with torch.no_grad():
    for is_training in (True, False, True):
      module.train(is_training)
      same = torch.equal(run(X)[0], run(X)[0])
      assert same is not is_training


# Graphs -------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch) -> list[list[str]]:
  """Return the operations of each graph that is compiled."""
  found = []

  def record(name, module, rng):
    found.append([str(node.target) for node in module.graph.nodes])

  # In the package, the name `backend` is the function, not the module.
  module = importlib.import_module("torchax.dynamo.backend")
  monkeypatch.setattr(module, "_log", record)
  return found


def _layers(graph: list[str], kind: str) -> int:
  return graph.count(f"torchax.{kind}.default")


def test_graph_size_is_independent_of_the_sequence_length(graphs):
  module = network(nn.RNN, bidirectional=True)
  run = compiled(module, dynamic=False)
  for time in (2, 30):
    results_and_gradients(run, module, floats(time, BATCH, FEATURES))
  forward, backward, *longer = graphs
  assert longer == [forward, backward]
  assert _layers(forward, "recurrent_layer") == 2
  assert _layers(backward, "recurrent_layer_backward") == 2


def test_changing_batch_sizes_are_traced_once(graphs):
  module = network(nn.LSTM)
  run = compiled(module, dynamic=True)
  with torch.no_grad():
    for batch in (6, 2):
      x = floats(TIME, batch, FEATURES)
      assert_close(run(x)[0], module(x)[0])
  assert len(graphs) == 1


def test_a_derivative_inside_the_graph_is_unrolled(graphs):
  module = network(nn.GRU)

  def derivative(x):
    return torch.func.grad(lambda value: module(value)[0].sin().sum())(x)

  assert_close(compiled(derivative)(X), derivative(X))
  assert not any("recurrent_layer" in operation for operation in graphs[0])


@pytest.mark.skipif(
  version.parse(torch.__version__) < version.parse("2.13"),
  reason="with recurrent layers in graphs, Dynamo before torch 2.13 fails on "
  "pad_packed_sequence, with any backend",
)
def test_packed_sequence_breaks_the_graph():
  module = network(nn.LSTM)

  def packed(x, lengths):
    sequence = rnn.pack_padded_sequence(x.tanh(), lengths, enforce_sorted=False)
    return rnn.pad_packed_sequence(module(sequence)[0])[0].sin()

  lengths = torch.tensor([TIME, 2, 3])
  actual = compiled(packed, fullgraph=False)(X, lengths)
  assert_close(actual.detach(), packed(X, lengths))


def test_graph_of_a_checkpoint_is_not_modified():
  inner, outer = fx.Graph(), fx.Graph()
  made = [inner.placeholder(name) for name in ("x", "hx", "w_ih", "w_hh")]
  options = (False, 1, 0.0, True, False, False)
  inner.output(inner.call_function(torch.gru, (*made[:2], made[2:], *options)))
  outer.output(outer.get_attr("body"))
  body = fx.GraphModule({}, inner)
  module = fx.GraphModule({"body": body}, outer)
  recurrent_graphs.replace(module)
  graphs = (inner, module.body.graph)
  kept = [torch.gru in [node.target for node in graph.nodes] for graph in graphs]
  assert kept == [True, False]


# Models -------------------------------------------------------------------------------


class LanguageModel(nn.Module):
  """Model that predicts the next word."""

  def __init__(self, words: int = 11):
    super().__init__()
    self.embedding = nn.Embedding(words, FEATURES)
    self.lstm = nn.LSTM(FEATURES, HIDDEN, num_layers=2, batch_first=True)
    self.head = nn.Linear(HIDDEN, words)

  def forward(self, words):
    states, _ = self.lstm(self.embedding(words[:, :-1]))
    logits = self.head(states)
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def trained(compile_model) -> list[torch.Tensor]:
  """Return the losses of some steps, and the parameters after them."""
  torch.manual_seed(0)
  model = LanguageModel()
  run, losses = compile_model(model), []
  optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
  for seed in range(3):
    optimizer.zero_grad()
    loss = run(ints(BATCH, TIME + 1, high=11, seed=seed))
    loss.backward()
    optimizer.step()
    losses.append(loss)
  return [*losses, *model.parameters()]


def test_a_language_model_trains_as_on_cpu_torch():
  assert_all_close(trained(compiled), trained(lambda model: model))
