"""Labels of torch's profiler in JAX's programs, and jax operations in the profiler."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from torchax.interop import jax_jit


def ones(*shape):
  return torch.ones(shape or (2, 3), device="jax")


def counts(function) -> dict[str, int]:
  """Return the number of calls of each name that torch's profiler shows."""
  function()  # the first call also runs torch's checks of the arguments
  with profile(activities=[ProfilerActivity.CPU]) as found:
    function()
  return {event.key: event.count for event in found.key_averages()}


@torch.no_grad()
def linear():
  torch.nn.Linear(3, 3, device="jax")(ones())


@pytest.mark.parametrize(
  ("name", "run"),
  [
    ("aten::add", lambda: ones() + 1),
    ("aten::mm", lambda: ones(3, 3) @ ones(3, 3)),
    ("aten::linear", linear),
    ("aten::layer_norm", lambda: F.layer_norm(ones(), (3,))),
    ("aten::dropout", lambda: F.dropout(ones())),
    ("aten::softmax", lambda: ones().softmax(-1)),
    ("aten::add_", lambda: ones().add_(1)),
    ("jit(double)", lambda: double(ones())),
    ("a label", lambda: record_function("a label")(ones)()),
  ],
)
def test_profiler_shows_each_operation_once(name, run):
  assert counts(run)[name] == 1


@jax_jit
def double(x):
  return 2 * x


def test_profiler_shows_backward_passes():
  x = ones().requires_grad_()
  assert counts(lambda: F.layer_norm(x, (3,)).sum().backward())["SumBackward0"] == 1


def names_of(function) -> str:
  return jax_jit(function).lower(ones()).compile().as_text()


def test_label_is_a_named_scope_of_a_traced_function():
  def labelled(x):
    with record_function("first"):
      y = x.exp()
    return y.tanh()

  text = names_of(labelled)
  assert "jit(labelled)/first/exp" in text
  assert "jit(labelled)/tanh" in text


def test_step_of_an_optimizer_is_a_named_scope():
  model = torch.nn.Linear(3, 1, device="jax")
  optimizer = torch.optim.SGD(model.parameters(), 0.1)

  def step(x):
    model(x).sum().backward()
    optimizer.step()

  assert "jit(step)/Optimizer.step#SGD.step/" in names_of(step)


def test_label_ends_after_an_exception():
  def labelled(x):
    try:
      with record_function("fails"):
        raise KeyError("no")
    except KeyError:
      return x.exp()

  assert "jit(labelled)/exp" in names_of(labelled)


def test_label_of_a_function_that_calls_itself_ends():
  @record_function("again")
  def power(x, n):
    return x * power(x, n - 1) if n else x

  text = names_of(lambda x: power(x, 2).tanh())
  assert "/again/again/mul" in text
  assert "jit(<lambda>)/tanh" in text or "jit(lambda)/tanh" in text


def test_torch_script_and_dynamo_accept_labels():
  def labelled(x):
    with record_function("label"):
      return x + 1

  x = torch.ones(2)
  assert torch.jit.script(labelled)(x).equal(x + 1)
  compiled = torch.compile(labelled, backend="eager", fullgraph=True)
  assert compiled(x).equal(x + 1)
