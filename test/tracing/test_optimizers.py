"""torch.optim on jax: steps, state, saved state, clipping, schedules, averages."""

import copy

import pytest
import torch
from compare import assert_same
from ops.harness import floats
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler, swa_utils

from torchax.interop import jax_jit
from torchax.tensor import Tensor

optim = torch.optim
STEPS = 5

pytestmark = pytest.mark.usefixtures("env")


class Model(torch.nn.Module):
  """Model with two parameters of different shape."""

  def __init__(self):
    super().__init__()
    self.weight = torch.nn.Parameter(floats(3, 4))
    self.bias = torch.nn.Parameter(floats(3, seed=1))

  def forward(self, x):
    return torch.tanh(x @ self.weight.T + self.bias)


X, Y = floats(6, 4, seed=2), floats(6, 3, seed=3)


def models():
  """Return the same model on the CPU and on jax, with inputs and targets."""
  return [(Model(), X, Y), (Model().to("jax"), X.to("jax"), Y.to("jax"))]


def loss_of(model, x, y):
  return ((model(x) - y) ** 2).sum()


def train(make_optimizer, model, x, y, steps=STEPS):
  """Train some steps; return the optimizer."""
  optimizer = make_optimizer(model.parameters())

  def closure():
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    return loss

  for _ in range(steps):
    optimizer.step(closure)
  return optimizer


def state_of(optimizer) -> dict:
  """Return the state with every tensor on the CPU, where torch keeps some counters."""
  return torch.utils._pytree.tree_map(
    lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value,
    optimizer.state_dict()["state"],
  )


def assert_trained_alike(cpu, jax):
  """Assert that two (model, optimizer) have the same parameters and state."""
  for (name, expected), actual in zip(cpu[0].named_parameters(), jax[0].parameters()):
    assert isinstance(actual, Tensor)
    torch.testing.assert_close(
      actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5, msg=name
    )
  # Tolerance for roundings of the gradients, summed over the steps.
  torch.testing.assert_close(state_of(jax[1]), state_of(cpu[1]), rtol=1e-4, atol=1e-5)


def both(make_optimizer, **options):
  """Train on the CPU and on jax; return (model, optimizer) of each."""
  return [
    (model, train(make_optimizer, model, x, y, **options)) for model, x, y in models()
  ]


# Optimizer -> options that select other operations.
VARIANTS = {
  optim.Adadelta: ({}, {"weight_decay": 0.1, "maximize": True, "capturable": True}),
  optim.Adagrad: ({"lr_decay": 0.1, "weight_decay": 0.1}, {"maximize": True}),
  optim.Adam: ({"weight_decay": 0.1}, {"amsgrad": True, "capturable": True}),
  optim.AdamW: ({"amsgrad": True, "maximize": True}, {"capturable": True}),
  optim.Adamax: ({"weight_decay": 0.1}, {"maximize": True, "capturable": True}),
  optim.ASGD: ({"weight_decay": 0.1}, {"maximize": True, "capturable": True}),
  optim.NAdam: (
    {"weight_decay": 0.1},
    {"decoupled_weight_decay": True, "weight_decay": 0.1, "capturable": True},
  ),
  optim.RAdam: (
    {"weight_decay": 0.1},
    {"decoupled_weight_decay": True, "weight_decay": 0.1, "capturable": True},
  ),
  optim.RMSprop: (
    {"weight_decay": 0.1},
    {"centered": True, "momentum": 0.9, "maximize": True, "capturable": True},
  ),
  optim.Rprop: ({}, {"maximize": True, "capturable": True}),
  optim.SGD: (
    {"weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.1, "maximize": True},
    {"momentum": 0.9, "nesterov": True},
  ),
  optim.Adafactor: ({}, {"weight_decay": 0.1, "maximize": True}),
}
ROWS = [
  pytest.param(cls, options, foreach, id=f"{cls.__name__}-{number}-{foreach}")
  for cls, variants in VARIANTS.items()
  for number, options in enumerate(variants)
  for foreach in (True, False)
]


def on_cpu(options) -> dict:
  """Leave out `capturable`, which is for accelerators and changes no result."""
  return {name: value for name, value in options.items() if name != "capturable"}


@pytest.mark.parametrize(("cls", "options", "foreach"), ROWS)
def test_five_steps_equal_torch(cls, options, foreach):
  def make(parameters):
    parameters = list(parameters)
    is_jax = isinstance(parameters[0], Tensor)
    chosen = {**options, "foreach": foreach} if is_jax else on_cpu(options)
    return cls(parameters, lr=0.05, **chosen)

  cpu, jax = both(make)
  assert_trained_alike(cpu, jax)


@pytest.mark.parametrize(
  "make",
  [
    lambda p: optim.Adam(p, 0.05, fused=True, amsgrad=True, weight_decay=0.1),
    lambda p: optim.AdamW(p, torch.tensor(0.05), fused=True),
    lambda p: optim.SGD(p, 0.05, fused=True, momentum=0.9, nesterov=True),
    lambda p: optim.Adagrad(p, 0.05, fused=True, lr_decay=0.1),
    lambda p: optim.Adagrad(p, torch.tensor(0.05), fused=True, lr_decay=0.1),
  ],
  ids=["adam", "adamw", "sgd", "adagrad", "adagrad, rate in a tensor"],
)
def test_fused_steps_equal_torch(make):
  assert_trained_alike(*both(make))


@pytest.mark.parametrize(
  "options", [{}, {"line_search_fn": "strong_wolfe", "history_size": 3}]
)
def test_lbfgs_takes_the_steps_of_torch(options):
  (cpu, _), (jax, _) = both(
    lambda p: optim.LBFGS(p, lr=0.5, max_iter=4, **options), steps=3
  )
  for actual, expected in zip(jax.parameters(), cpu.parameters()):
    # Twelve evaluations, each with the rounding errors of the ones before.
    torch.testing.assert_close(actual.detach().cpu(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_takes_the_step_of_torch(nesterov):
  results = []
  for model, x, y in models():
    optimizer = optim.Muon([model.weight], lr=0.05, nesterov=nesterov, ns_steps=2)
    loss_of(model, x, y).backward()
    optimizer.step()
    results.append(model.weight.detach())
  # The update is orthogonalised in bfloat16: two polynomials with coefficients up to
  # 4.8 amplify rounding errors of 0.4 % to 3 % of a step.
  torch.testing.assert_close(results[1].cpu(), results[0], rtol=0, atol=0.03 * 0.05)
  assert not torch.allclose(results[0], Model().weight, atol=0.01)


def test_sparse_adam_refuses_dense_gradients_as_torch_does():
  for model, x, y in models():
    optimizer = optim.SparseAdam(model.parameters())
    loss_of(model, x, y).backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
      optimizer.step()


def test_parameters_of_half_precision_take_the_steps_of_torch():
  results = []
  for model, x, y in models():
    model, x, y = model.bfloat16(), x.bfloat16(), y.bfloat16()
    train(lambda p: optim.AdamW(p, 0.05), model, x, y)
    results.append([parameter.detach() for parameter in model.parameters()])
  assert_same(results[1], results[0])


# torch's default implementation -------------------------------------------------------


def test_torch_chooses_foreach_for_parameters_on_jax(monkeypatch):
  calls = []
  model, x, y = models()[1]
  loss_of(model, x, y).backward()
  run = torch._foreach_lerp_
  monkeypatch.setattr(
    torch,
    "_foreach_lerp_",
    lambda *args, **kw: calls.append(len(args[0])) or run(*args),
  )
  optim.Adam(model.parameters()).step()
  assert calls == [2]


def test_an_optimizer_takes_parameters_of_several_dtypes():
  results = []
  for device in ("cpu", "jax"):
    parameters = [
      torch.nn.Parameter(floats(3).to(device)),
      torch.nn.Parameter(floats(2, dtype=torch.bfloat16).to(device)),
      torch.nn.Parameter(floats(3, seed=1).to(device)),
    ]
    for parameter in parameters:
      parameter.grad = parameter.detach() * 0.5
    optimizer = optim.Adam(parameters, 0.1, foreach=True)
    optimizer.step()
    results.append([parameter.detach() for parameter in parameters])
  assert_same(results[1], results[0])


# State --------------------------------------------------------------------------------

ADAM = {"lr": 0.05, "amsgrad": True, "foreach": True}


@pytest.mark.parametrize("source", [0, 1], ids=["from the cpu", "from jax"])
def test_saved_state_resumes_on_any_device(source):
  trained = both(lambda p: optim.Adam(p, **ADAM))
  saved = copy.deepcopy(trained[source][1].state_dict())
  weights = copy.deepcopy(trained[source][0].state_dict())
  continued = []
  for model, x, y in models():
    model.load_state_dict(weights)
    optimizer = optim.Adam(model.parameters(), **ADAM)
    optimizer.load_state_dict(copy.deepcopy(saved))
    moments = optimizer.state[model.weight]["exp_avg"]
    assert isinstance(moments, Tensor) == isinstance(model.weight, Tensor)
    for _ in range(2):
      optimizer.zero_grad()
      loss_of(model, x, y).backward()
      optimizer.step()
    continued.append((model, optimizer))
  assert_trained_alike(*continued)


# Clipping -----------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_their_norm(foreach, norm_type):
  results = []
  for model, x, y in models():
    loss_of(model, x, y).backward()
    is_jax = isinstance(x, Tensor)
    norm = clip_grad_norm_(
      model.parameters(), 0.5, norm_type, foreach=foreach if is_jax else None
    )
    results.append([norm, *(p.grad for p in model.parameters())])
  assert_same(results[1], results[0])


@pytest.mark.parametrize("foreach", [True, False, None])
def test_gradients_are_clipped_by_their_values(foreach):
  results = []
  for model, x, y in models():
    loss_of(model, x, y).backward()
    is_jax = isinstance(x, Tensor)
    clip_grad_value_(model.parameters(), 0.1, foreach=foreach if is_jax else None)
    results.append([p.grad for p in model.parameters()])
  assert_same(results[1], results[0])
  assert results[1][0].abs().max().item() == pytest.approx(0.1)


def test_a_norm_that_is_not_finite_is_refused():
  model, x, y = models()[1]
  loss_of(model, x * torch.inf, y).backward()
  with pytest.raises(RuntimeError, match="non-finite"):
    clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# Schedules ----------------------------------------------------------------------------


def cosine(optimizer):
  return lr_scheduler.SequentialLR(
    optimizer,
    [
      lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
      lr_scheduler.CosineAnnealingLR(optimizer, 3),
    ],
    milestones=[2],
  )


SCHEDULES = {
  "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
  "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8),
  "cosine": cosine,
}


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_lr_schedules_equal_torch(schedule, tensor_lr):
  results = []
  for model, x, y in models():
    # A learning rate on the device, which requires `capturable`.
    lr = torch.tensor(0.05).to(x.device) if tensor_lr else 0.05
    capturable = tensor_lr and isinstance(x, Tensor)
    optimizer = optim.Adam(model.parameters(), lr, capturable=capturable)
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(STEPS):
      optimizer.zero_grad()
      loss_of(model, x, y).backward()
      optimizer.step()
      scheduler.step()
      rates.append(float(scheduler.get_last_lr()[0]))
    results.append((model, optimizer, rates))
  (cpu, cpu_optimizer, expected), (jax, optimizer, actual) = results
  assert actual == pytest.approx(expected, rel=1e-5)
  assert_trained_alike((cpu, cpu_optimizer), (jax, optimizer))


# Averages of weights ------------------------------------------------------------------


@pytest.mark.parametrize(
  "make",
  [
    swa_utils.AveragedModel,
    lambda m: swa_utils.AveragedModel(
      m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
    ),
    lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9)),
  ],
  ids=["mean", "moving", "moving by tensor"],
)
def test_weight_averages_equal_torch(make):
  results = []
  for model, x, y in models():
    averaged = make(model)
    optimizer = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
      optimizer.zero_grad()
      loss_of(model, x, y).backward()
      optimizer.step()
      averaged.update_parameters(model)
    results.append([parameter.detach() for parameter in averaged.parameters()])
  assert_same(results[1], results[0])


# Compiled steps -----------------------------------------------------------------------


@pytest.mark.parametrize(
  "make",
  [
    lambda p: optim.AdamW(p, 0.05, capturable=True, foreach=True),
    lambda p: optim.Adam(p, 0.05, fused=True),
    lambda p: optim.RMSprop(p, 0.05, foreach=True, momentum=0.9, capturable=True),
    lambda p: optim.Adagrad(p, 0.05, fused=True, lr_decay=0.1),
  ],
  ids=["adamw", "fused adam", "rmsprop", "fused adagrad"],
)
def test_a_compiled_step_counts_and_resumes(make):
  (cpu, x, y), (model, jax_x, jax_y) = models()

  def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0, foreach=isinstance(x, Tensor))
    optimizer.step()
    return loss.detach()

  def on_cpu_too(parameters):
    made = make(parameters)
    for group in made.param_groups:
      group.update({"capturable": False} if "capturable" in group else {})
    return made

  expected_optimizer = on_cpu_too(cpu.parameters())
  optimizer = make(model.parameters())
  # An optimizer creates its state in the first step, which runs eagerly.
  step(cpu, expected_optimizer, x, y)
  step(model, optimizer, jax_x, jax_y)
  compiled = jax_jit(lambda x, y: step(model, optimizer, x, y))
  for _ in range(3):
    assert_same(compiled(jax_x, jax_y), step(cpu, expected_optimizer, x, y))
  assert_trained_alike((cpu, expected_optimizer), (model, optimizer))


def test_a_scaled_loss_skips_the_steps_that_overflow():
  results = []
  for device, (model, x, y) in zip(("cpu", "jax"), models()):
    optimizer = optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    for factor in (1.0, 1.0, torch.inf, 1.0):
      optimizer.zero_grad()
      scaler.scale(loss_of(model, x, y) * factor).backward()
      scaler.unscale_(optimizer)
      scaler.step(optimizer)
      scaler.update()
    results.append((scaler.get_scale(), [p.detach() for p in model.parameters()]))
  (expected_scale, expected), (scale, actual) = results
  assert scale == expected_scale == 8.0  # doubled after two steps, then halved
  assert_same(actual, expected)
