"""Dynamo, fake tensors and functional calls."""

import importlib

import torch
from functorch.compile import aot_module_simplified, make_boxed_func

from torchax.compat import torch_compat


def test_reparametrized_module_uses_the_given_tensors():
  model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
  model[1].weight = model[0].weight
  own = model[0].weight
  other = torch.zeros(2, 2)
  with torch_compat.reparametrize(model, {"0.weight": other}):
    assert model[0].weight is other
    assert model[1].weight is other  # tied weights stay tied
  assert model[0].weight is own and model[1].weight is own


def test_hooks_are_counted():
  module = torch.nn.ReLU()
  before = torch_compat.count_of_hooks()
  module.register_forward_hook(lambda *args: None)
  assert torch_compat.count_of_hooks() > before


# torch.compile ------------------------------------------------------------------------


def test_fakes_are_known_and_made_where_a_graph_is_traced():
  seen = []

  def backend(graph, inputs):
    example = torch_compat.to_fake(torch.ones(3))
    seen.append((torch_compat.is_tracing(), torch_compat.is_fake(example)))
    return graph

  torch.compiler.reset()
  torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
  torch.compiler.reset()
  assert seen == [(True, True)]
  plain = torch.ones(3)
  assert not torch_compat.is_tracing()
  assert torch_compat.to_fake(plain) is plain
  assert not torch_compat.is_fake(plain)


def test_recurrent_layers_are_traced():
  import torch._dynamo

  before = torch._dynamo.config.allow_rnn
  try:
    torch._dynamo.config.allow_rnn = False
    torch_compat.trace_recurrent_layers()
    assert torch._dynamo.config.allow_rnn
  finally:
    torch._dynamo.config.allow_rnn = before


def test_a_compiled_module_has_its_class():
  compiled = torch.compile(torch.nn.ReLU(), backend="eager")
  assert type(compiled) is torch_compat.compiled_module_class()


def inner_function(x):
  return x + 1


def outer_function(x):
  return inner_function(x)


def test_dynamo_skips_functions_kept_from_it():
  graphs = []

  def backend(graph, inputs):
    graphs.append(graph)
    return graph

  torch.compiler.reset()
  torch_compat.keep_from_dynamo(outer_function)
  run = torch.compile(outer_function, backend=backend)
  assert run(torch.ones(2)).tolist() == [2.0, 2.0]
  assert not graphs
  torch.compile(inner_function, backend=backend)(torch.ones(2))
  assert len(graphs) == 1
  torch.compiler.reset()


class _Kept:
  """Class whose code Dynamo must skip."""

  @property
  def value(self):
    return outer_function(torch.ones(2))

  @classmethod
  def make(cls):
    return lambda x: outer_function(x)


def test_the_code_of_classes_and_modules_is_found():
  found = {code.co_name for code in torch_compat.graphs._code_of(_Kept)}
  assert found == {"value", "make", "<lambda>"}
  names = {
    code.co_name for code in torch_compat.graphs._code_of(torch_compat.mode_state)
  }
  assert {"is_watched", "ignore_compile_internals"} <= names


def test_fake_tensors_raise_for_their_values():
  error = torch_compat.DataDependentOutputException("Tensor.answer")
  assert isinstance(error, RuntimeError) and error.func == "Tensor.answer"


def test_dynamo_breaks_graphs_at_packages():
  trace_rules = importlib.import_module("torch._dynamo.trace_rules")
  path = importlib.import_module("jax.numpy").__file__
  torch_compat.leave_frames_of("jax")
  assert trace_rules.check_file(path).skipped
  assert not trace_rules.check_file(__file__).skipped


def test_unused_draws_stay_in_graphs():
  found = []

  def backend(graph, inputs):
    def keep(module, inputs):
      found.append([str(node.target) for node in module.graph.nodes])
      return make_boxed_func(module.forward)

    with torch_compat.keep_unused_draws():
      return aot_module_simplified(graph, inputs, fw_compiler=keep)

  torch.compiler.reset()
  torch.compile(lambda x: (torch.rand_like(x), x + 1)[1], backend=backend)(
    torch.ones(2)
  )
  torch.compiler.reset()
  assert any("rand_like" in target for target in found[0])
