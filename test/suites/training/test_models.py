"""Small models train on jax as on the CPU, with torch's own optimizers."""

import contextlib
import copy

import pytest
import torch
from compare import assert_same
from ops.harness import floats, ints

import torchax

env = torchax.default_env()


class LastOfLSTM(torch.nn.Module):
  """Recurrent network that answers from its last step."""

  def __init__(self):
    super().__init__()
    self.lstm = torch.nn.LSTM(4, 5, num_layers=2, batch_first=True)
    self.head = torch.nn.Linear(5, 3)

  def forward(self, x):
    out, _ = self.lstm(x)
    return self.head(out[:, -1])


class SelfAttention(torch.nn.Module):
  """Self-attention and an average over positions."""

  def __init__(self):
    super().__init__()
    self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    self.head = torch.nn.Linear(4, 3)

  def forward(self, x):
    out, weights = self.attention(x, x, x)
    return self.head(out.mean(1)) + weights.sum() * 0.01


class Encoder(torch.nn.Module):
  """Model of one transformer layer and an average over positions."""

  def __init__(self):
    super().__init__()
    self.layer = torch.nn.TransformerEncoderLayer(
      4, 2, 8, dropout=0.0, batch_first=True
    )
    self.head = torch.nn.Linear(4, 3)

  def forward(self, x):
    return self.head(self.layer(x).mean(1))


def cnn() -> torch.nn.Module:
  """Return convolution, BatchNorm, pooling, linear."""
  return torch.nn.Sequential(
    torch.nn.Conv2d(1, 3, 3, padding=1),
    torch.nn.BatchNorm2d(3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(3, 4, 2),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(4, 3),
  )


def mlp() -> torch.nn.Module:
  """Return two layers with a GELU."""
  return torch.nn.Sequential(
    torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 3)
  )


SEQUENCE = floats(5, 6, 4)
IMAGES = floats(5, 1, 6, 6)
MODELS = {
  "mlp": (mlp, floats(5, 4)),
  "cnn": (cnn, IMAGES),
  "lstm": (LastOfLSTM, SEQUENCE),
  "transformer": (Encoder, SEQUENCE),
  "attention": (SelfAttention, SEQUENCE),
}
OPTIMIZERS = {
  "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
  "adam": lambda p: torch.optim.Adam(p, 1e-2),
  "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
}
LOSSES = {
  "cross_entropy": (torch.nn.CrossEntropyLoss(), ints(5, high=3)),
  "mse": (torch.nn.MSELoss(), floats(5, 3)),
}
STEPS = 4


def train(model, optimizer, loss_function, inputs, targets) -> list[float]:
  losses = []
  for _ in range(STEPS):
    optimizer.zero_grad()
    loss = loss_function(model(inputs), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
  return losses


def trained_twins(model_name, optimizer_name, loss_name, environment):
  """Train a model on the CPU and on jax from the same parameters."""
  make, inputs = MODELS[model_name]
  loss_function, targets = LOSSES[loss_name]
  torch.manual_seed(0)
  cpu = make()
  model = copy.deepcopy(cpu).to("jax")
  make_optimizer = OPTIMIZERS[optimizer_name]
  expected = train(
    cpu, make_optimizer(cpu.parameters()), loss_function, inputs, targets
  )
  with environment:
    actual = train(
      model,
      make_optimizer(model.parameters()),
      loss_function,
      inputs.to("jax"),
      targets.to("jax"),
    )
  return (cpu, expected), (model, actual)


# Rounding differs, and each step depends on the one before: the tolerance of one
# operation in float32 grows with the number of steps. If a gradient is zero up to
# rounding, an optimizer that divides by its size makes the difference as large as a
# step. Such parameters are compared by their losses only.
TRAINING_RTOL, TRAINING_ATOL = 1e-4, 1e-5


def assert_trained_alike(twins) -> None:
  (cpu, expected), (model, actual) = twins
  assert actual == pytest.approx(expected, rel=TRAINING_RTOL)
  assert expected[-1] < expected[0]
  for name, value in cpu.state_dict().items():
    torch.testing.assert_close(
      model.state_dict()[name].cpu(),
      value,
      rtol=TRAINING_RTOL,
      atol=TRAINING_ATOL,
      check_dtype=False,  # BatchNorm counts in int64, int32 on jax without x64
      msg=lambda message, name=name: f"{name}: {message}",
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_on_jax_as_on_the_cpu(model):
  assert_trained_alike(trained_twins(model, "sgd", "cross_entropy", env))


@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_without_the_environment_too(model):
  twins = trained_twins(model, "sgd", "cross_entropy", contextlib.nullcontext())
  assert_trained_alike(twins)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_an_optimizer_takes_the_steps_of_torch(optimizer, loss):
  assert_trained_alike(trained_twins("mlp", optimizer, loss, env))


@pytest.mark.parametrize("model", ["cnn", "lstm", "transformer"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_an_adaptive_optimizer_lowers_the_loss_as_on_the_cpu(model, optimizer):
  (_, expected), (_, actual) = trained_twins(model, optimizer, "mse", env)
  assert actual == pytest.approx(expected, rel=TRAINING_RTOL)
  assert actual[-1] < actual[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("with_env", [False, True], ids=["without_env", "with_env"])
def test_a_model_predicts_in_eval_mode(model, with_env):
  make, inputs = MODELS[model]
  torch.manual_seed(0)
  cpu = make().eval()
  twin = copy.deepcopy(cpu).to("jax")
  with torch.no_grad():
    expected = cpu(inputs)
    with env if with_env else contextlib.nullcontext():
      assert_same(twin(inputs.to("jax")), expected)


def test_an_optimizer_state_is_saved_and_restored():
  model = mlp().to("jax")
  optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
  inputs, targets = floats(5, 4).to("jax"), floats(5, 3).to("jax")
  train(model, optimizer, torch.nn.MSELoss(), inputs, targets)
  twin = copy.deepcopy(model)
  restored = torch.optim.AdamW(twin.parameters(), 1e-2)
  # torch shares the tensors of a loaded state.
  restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
  first = train(model, optimizer, torch.nn.MSELoss(), inputs, targets)
  assert train(twin, restored, torch.nn.MSELoss(), inputs, targets) == first


def test_gradients_are_clipped_as_on_the_cpu():
  cpu = mlp()
  model = copy.deepcopy(cpu).to("jax")
  for net, x in ((cpu, floats(5, 4)), (model, floats(5, 4).to("jax"))):
    (net(x) ** 2).sum().mul(100).backward()
  expected = torch.nn.utils.clip_grad_norm_(cpu.parameters(), 1.0)
  actual = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  assert_same(actual, expected)
  for have, want in zip(model.parameters(), cpu.parameters()):
    assert_same(have.grad, want.grad)


def test_a_learning_rate_schedule_is_followed():
  model = mlp().to("jax")
  optimizer = torch.optim.SGD(model.parameters(), 1.0)
  scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
  before = model[0].weight.detach().clone()
  for _ in range(2):
    optimizer.zero_grad()
    (model[0].weight * 1.0).sum().backward()
    optimizer.step()
    scheduler.step()
  assert_same(model[0].weight.detach(), before.cpu() - 1.5)
