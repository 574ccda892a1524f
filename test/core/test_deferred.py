"""Modes of eager operations, above all the fused mode."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import torchax
from torchax import interop
from torchax.core import deferred, program_limit, recorder
from torchax.ops import op_base

STEPS = 5


@pytest.fixture(autouse=True)
def _new_recorder(strict_mode, monkeypatch):
  monkeypatch.setattr(deferred._thread, "_kept", None)


def dropout_step(x, w):
  loss = (F.dropout(x @ w, 0.5) ** 2).sum()
  (gradient,) = torch.autograd.grad(loss, w)
  with torch.no_grad():
    w -= 0.01 * gradient
  return loss


def views_step(x, w):
  with torch.no_grad():
    even = w[:, ::2]
    even.add_(x[:, 0].sum())
    w.t_().t_()
    even.mul_(0.5)
    w[0] = x[1, 0]
  return (x @ w).sum()


def draws_step(x, w):
  return torch.rand(4, device="jax").sum() + torch.randint(9, (3,), device="jax").sum()


def attention_step(x, w):
  heads = (x @ w).view(1, 2, 2, 4)
  loss = F.scaled_dot_product_attention(heads, heads, heads).square().sum()
  (gradient,) = torch.autograd.grad(loss, w)
  return loss + gradient.norm()


def checkpoint_step(x, w):
  run = torch.utils.checkpoint.checkpoint
  loss = run(lambda x: F.dropout(torch.tanh(x @ w)), x, use_reentrant=False).sum()
  return loss + torch.autograd.grad(loss, w)[0].sum()


def values_step(x, w):
  positive = x[x > 0]
  return positive.sum() if positive.numel() > 3 else w.sum()


def lists_step(x, w):
  with torch.no_grad():
    torch._foreach_add_([x, w], [x * 2, w * 3])
  return x.sum() + w.sum()


def bfloat16_step(x, w):
  with torch.autocast("jax", dtype=torch.bfloat16):
    return (torch.sigmoid(x @ w) @ x).exp().mean()


def batched_step(x, w):
  recurrent = torch.nn.GRU(4, 3).to("jax")
  out, _ = recurrent(x @ w)
  (gradients,) = torch.autograd.grad(
    out.flatten(), w, torch.eye(out.numel(), device="jax"), is_grads_batched=True
  )
  return gradients.square().sum()


def grown_step(x, w):
  with torch.no_grad():
    alias = x[0]
    x.resize_(6, 6)
    alias.mul_(2)
    x[4:] = 0
    return x.sum() + x.resize_(4, 6).sum()


def compiled_step(x, w):
  return interop.jax_jit(lambda a: F.dropout(a) * 2)(x.tanh() @ w).sum()


PROGRAMS = [
  dropout_step,
  views_step,
  draws_step,
  attention_step,
  checkpoint_step,
  values_step,
  lists_step,
  bfloat16_step,
  batched_step,
  grown_step,
  compiled_step,
]


def run(step) -> list[float]:
  torch.manual_seed(0)
  x = torch.randn(4, 6).to("jax")
  w = torch.randn(6, 4).to("jax")
  w.requires_grad_(step not in (views_step, lists_step))
  return [step(x, w).item() for _ in range(STEPS)]


def reports(caplog) -> list[str]:
  """Return how the segments ran: "2 operations ran one by one"."""
  return [message.split(",")[0] for message in caplog.messages]


@pytest.fixture
def logged(caplog):
  caplog.set_level(logging.INFO, "torchax.eager")
  torchax.set_logs(eager=True)
  yield caplog
  torchax.set_logs(eager=False)


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda step: step.__name__)
def test_fused_steps_give_the_numbers_of_strict_ones(step):
  strict = run(step)
  with torchax.eager_mode("fused"):
    for _ in range(2):
      torch.testing.assert_close(run(step), strict, rtol=1e-5, atol=1e-6)


def test_a_repeated_sequence_becomes_one_program(logged):
  x = torch.ones(3, 5, device="jax")
  with torchax.eager_mode("fused"):
    sums = [(x * i + 1).tanh().sum().item() for i in range(4)]
  assert sums == [(x * i + 1).tanh().sum().item() for i in range(4)]
  assert reports(logged) == [
    *["4 operations ran one by one"] * 2,
    *["4 operations ran as one program"] * 2,
  ]
  assert f"{__file__}:" in logged.messages[0]


def test_nothing_is_compiled_that_has_not_repeated():
  x = torch.ones(3, 7, device="jax")

  x.exp().sum(), x.tanh()
  before = program_limit.count()
  with torchax.eager_mode("fused"):
    for functions in (("exp", "tanh"), ("tanh", "exp"), ("exp", "exp"), ("tanh",)):
      y = x
      for function in functions:
        y = getattr(y, function)()
      y.sum().item()
  assert program_limit.count() == before


def test_many_sequences_in_turn_are_not_compiled_at_once(logged):
  x = torch.ones(30, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(2):
      for length in range(2, 30):
        x[:length].exp().sum().item()
  assert set(reports(logged)) == {"2 operations ran one by one"}


def test_a_long_sequence_is_compiled_when_that_pays(monkeypatch, logged):
  monkeypatch.setattr(recorder, "_ALLOWANCE", 30)
  monkeypatch.setattr(recorder, "_PRICE", 5)
  monkeypatch.setattr(recorder, "_PROGRAM", 0)
  x = torch.ones(3, 39, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(8):
      y = x
      for _ in range(39):
        y = y + 1
      y.sum().item()
  # 30 operations of allowance, and 40 / 5 after each run
  expected = ["40 operations ran one by one"] * 3
  assert reports(logged)[:3] == expected
  assert reports(logged)[3:] == ["40 operations ran as one program"] * 5


def test_a_sequence_that_changes_runs_its_operations(logged):
  x = torch.ones(3, 9, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(2):
      y = x.exp() + 1
      y.sum().item()
    y = x.exp() + 1
    assert torch.equal(y.tanh().cpu(), (x.cpu().exp() + 1).tanh())
  assert reports(logged)[-1] == "3 operations ran one by one"


def test_a_loop_that_reads_nothing_is_compiled(logged):
  layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(20)]).to("jax")
  x = torch.ones(2, 4, device="jax")
  with torch.no_grad(), torchax.eager_mode("fused"):
    results = [layers(x) for _ in range(4)]
  assert torch.allclose(results[-1].cpu(), layers(x).cpu(), atol=1e-6)
  assert reports(logged)[-1] == "20 operations ran as one program"


def test_results_that_nobody_keeps_are_not_returned(logged):
  x = torch.ones(3, 11, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      kept = x.exp()
      (kept + 1).sum().item()
  assert "with 2 results in use" in logged.messages[-1]


def test_another_thread_reads_results():
  x = torch.ones(3, 13, device="jax")
  found = []
  with torchax.eager_mode("fused"):
    for _ in range(3):
      y = x.exp() * 2
      thread = threading.Thread(target=lambda y=y: found.append(y.sum().item()))
      thread.start()
      thread.join()
  assert found == [(x.exp() * 2).sum().item()] * 3


def test_a_result_outlives_its_thread():
  x = torch.ones(3, 27, device="jax")
  found = []

  def work():
    with torchax.eager_mode("fused"):
      for _ in range(3):
        found.append(x.exp() * 2)
        found[0].sum().item()

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert torch.equal(found[-1].cpu(), (x.exp() * 2).cpu())


def test_tasks_take_turns():
  x = torch.ones(3, 29, device="jax")

  async def task(factor):
    found = []
    for _ in range(5):
      y = x.exp()
      await asyncio.sleep(0)
      found.append((y * factor).sum().item())
    return found

  async def both():
    return await asyncio.gather(task(1), task(3))

  with torchax.eager_mode("fused"):
    found = asyncio.run(both())
  assert found == [[(x.exp() * factor).sum().item()] * 5 for factor in (1, 3)]


class ReadsAtItsEnd:
  """Object in a reference cycle whose destructor computes with a tensor."""

  found: list[float]

  def __init__(self, tensor):
    self.tensor, self.cycle = tensor, self

  def __del__(self):
    self.found.append((self.tensor + 1).sum().item())


def test_destructors_compute_while_a_segment_is_compiled(logged):
  x = torch.ones(3, 31, device="jax")
  ReadsAtItsEnd.found = []
  gc.disable()
  try:
    with torchax.eager_mode("fused"):
      for _ in range(5):
        ReadsAtItsEnd(x * 2)
        y = x.exp()
        y.sum().item()
      gc.collect()
  finally:
    gc.enable()
  assert "ran as one program, with 2 results in use" in logged.messages[2]
  assert ReadsAtItsEnd.found == [3 * 31 * 3.0] * 5
  assert torch.equal(y.cpu(), x.exp().cpu())


def test_destructors_compute_while_an_operation_is_recorded(monkeypatch):
  x = torch.ones(3, 33, device="jax")
  ReadsAtItsEnd.found = []
  refer = recorder.Recorder._refer

  def refer_and_collect(*args, **kwargs):
    found = refer(*args, **kwargs)
    gc.collect()
    return found

  monkeypatch.setattr(recorder.Recorder, "_refer", refer_and_collect)
  with torchax.eager_mode("fused"):
    for factor in range(5):
      ReadsAtItsEnd(x * 2)
      y = torch.tensor(5.0).to("jax") * (x.exp() + factor)
      assert y.sum().item() == (5 * (x.exp() + factor)).sum().item()
  assert ReadsAtItsEnd.found == [3 * 33 * 3.0] * 5


def test_a_forked_process_may_end():
  x = torch.ones(3, 35, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      y = x.exp() * 2
      y.cpu()
    y = x.exp() * 2
    with warnings.catch_warnings(action="ignore"):  # JAX has threads
      child = os.fork()
    if not child:
      os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(y.cpu(), (x.exp() * 2).cpu())


def test_the_profiler_shows_deferred_operations():
  x = torch.ones(3, 37, device="jax")

  def run():
    for _ in range(4):
      (x.exp() * 2).cpu()

  with torchax.eager_mode("fused"):
    run()  # new programs check their arguments with `aten::exp` of torch
    with torch.profiler.profile() as profile:
      run()
  names = [event.name for event in profile.events()]
  assert names.count("aten::exp") == 4


TAKERS = {
  "donation": interop.jax_jit(lambda x: x * 2, donate_argnums=0),
  "deletion": lambda x: interop.jax_view(x).delete(),
  "program": torch.compile(lambda x: x.add_(1), backend="jax"),
}


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_an_input_may_be_donated_or_deleted(take):
  with torchax.eager_mode("fused"):
    for _ in range(3):
      x = torch.ones(1000).to("jax")
      y = x + 1
      take(x)
      assert y.sum().item() == 2000


def test_synchronize_runs_what_is_deferred(logged):
  x = torch.ones(3, 19, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      y = x.exp()
      torch.jax.synchronize()
  assert len(reports(logged)) == 3 and torch.equal(y.cpu(), x.exp().cpu())


CONTEXTS = {
  "precision": lambda: jax.default_matmul_precision("highest"),
  "device": lambda: jax.default_device(jax.devices()[0]),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_operations_of_a_block_run_in_its_context(context, logged):
  x = torch.ones(4, 4, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      outside = x.exp()
      with context():
        inside = (outside @ outside).sum().item()
  assert inside == (x.exp() @ x.exp()).sum().item()
  # Inside of the block only the operation before it is recorded.
  assert reports(logged)[-1] == "1 operations ran as one program"


def test_an_error_is_raised_at_its_line():
  x = torch.ones(3, 15, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      y = x.exp()
      with pytest.raises(RuntimeError, match="must match the size"):
        y + torch.ones(4, device="jax")
      assert y.sum().item() == pytest.approx(45 * 2.7182818)


def test_an_interrupt_loses_nothing(monkeypatch):
  x = torch.ones(3, 17, device="jax")
  torch.manual_seed(0)
  expected = [(x * torch.rand(17, device="jax")).sum().item() for _ in range(4)]
  torch.manual_seed(0)
  found = []
  with torchax.eager_mode("fused"):
    for index in range(4):
      y = (x * torch.rand(17, device="jax")).sum()
      if index == 2:  # when the segment is compiled
        with monkeypatch.context() as patch:
          patch.setattr(program_limit, "jit", _interrupt)
          with pytest.raises(KeyboardInterrupt):
            y.item()
      found.append(y.item())
  assert found == pytest.approx(expected)


def test_operations_run_one_by_one_if_their_program_fails(monkeypatch, logged):
  x = torch.ones(3, 21, device="jax")
  monkeypatch.setattr(program_limit, "jit", lambda *args, **kwargs: _fail)
  with torchax.eager_mode("fused"):
    for _ in range(5):
      assert torch.allclose((x.exp() + 1).cpu(), x.cpu().exp() + 1)
  expected = "2 operations run one by one, because their program fails: no program"
  assert [m for m in logged.messages if "because" in m] == [expected]


def test_an_operation_that_fails_loses_only_its_segment(monkeypatch):
  x = torch.ones(3, 23, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      (x.exp() + 1).cpu()
    y = x.exp() + 1
    with monkeypatch.context() as patch:
      patch.setattr(recorder._Segment, "run", _fail)
      with pytest.raises(RuntimeError, match="no program"):
        y.tanh()  # the sequence has changed
    assert (x.exp() + 2).isfinite().all()
    with pytest.raises(RuntimeError, match="has no values, because an operation"):
      y.cpu()


def _fail(*inputs):
  raise RuntimeError("no program")


def _interrupt(*args, **kwargs):
  raise KeyboardInterrupt


def test_a_lowering_that_looks_at_numbers_runs_at_once():
  library = torch.library.Library("test_deferred", "DEF")
  library.define("largest(Tensor x) -> Tensor")

  @op_base.op(torch.ops.test_deferred.largest)
  def largest(x):
    return jnp.full(int(x.max()), 1.0)

  x = torch.ones(3, device="jax")
  with torchax.eager_mode("fused"):
    for _ in range(3):
      assert torch.ops.test_deferred.largest(x * 4).shape == (4,)


def test_debug_mode_waits_for_each_operation(monkeypatch):
  waited = []
  monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or x)
  x = torch.ones(3, device="jax")
  with torchax.eager_mode("debug"):
    x.exp().tanh()
  assert len(waited) == 2


def test_an_environment_has_a_mode():
  env = torchax.Environment(torchax.Configuration(eager_mode="fused"))
  with env:
    assert deferred.is_recording()
  assert not deferred.is_recording()


WRONG = {
  "eager_mode": (
    lambda: torchax.eager_mode("lazy"),
    "eager_mode and TORCHAX_EAGER expect one of 'strict', 'fused', 'debug', but got "
    "'lazy'.",
  ),
  "Configuration": (
    lambda: torchax.Configuration(eager_mode="lazy"),
    "eager_mode expects one of None, 'strict', 'fused', 'debug', but got 'lazy'.",
  ),
}


@pytest.mark.parametrize("call, text", WRONG.values(), ids=WRONG)
def test_other_modes_are_refused(call, text):
  with pytest.raises(ValueError) as raised:
    call()
  assert str(raised.value) == text
  assert not deferred.is_recording()


def test_the_environment_variable_sets_the_mode():
  program = "import torchax.core.deferred as d; print(d.is_recording())"
  run = subprocess.run(
    [sys.executable, "-c", program],
    env={"TORCHAX_EAGER": "fused", "JAX_PLATFORMS": "cpu", "PATH": ""},
    capture_output=True,
    text=True,
  )
  assert run.stdout.strip() == "True", run.stderr
