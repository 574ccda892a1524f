"""0-d tensors on the CPU that a compiled function closes over."""

import torch

from torchax.interop import gradient_checkpoint, jax_jit, scan


def make_counting(function):
  """Return the compiled function, and a list with an entry for each trace."""
  traces = []

  def counted(*args):
    traces.append(1)
    return function(*args)

  return jax_jit(counted), traces


def test_a_changed_cpu_number_takes_effect():
  number = torch.tensor(2.0)
  run, traces = make_counting(lambda x: x * number)
  x = torch.ones(2).to("jax")
  for value in (2.0, 5.0, -0.0, 0.0, float("inf"), 2.0, 2.0):
    number.fill_(value)
    assert run(x).tolist() == [value] * 2
    assert torch.equal(torch.signbit(run(x).cpu()), torch.signbit(number.expand(2)))
  assert len(traces) == 5, "one for each value"


def test_a_changed_cpu_number_reaches_nested_functions():
  number = torch.tensor(2.0)
  inner = jax_jit(lambda x: x * number)
  rematerialised = gradient_checkpoint(lambda x: x + number)
  run = jax_jit(lambda x: rematerialised(inner(x)))
  looped = jax_jit(lambda x: scan(lambda c, _: (c * number, None), x, length=2)[0])
  x = torch.ones(2).to("jax")
  for value in (2.0, 5.0, 2.0):
    number.fill_(value)
    assert run(x).tolist() == [2 * value] * 2
    assert looped(x).tolist() == [value**2] * 2


def test_the_gradient_uses_the_changed_cpu_number():
  number = torch.tensor(2.0)
  run = jax_jit(lambda x: (x * number).sum())
  for value in (2.0, 5.0):
    number.fill_(value)
    x = torch.ones(2).to("jax").requires_grad_()
    run(x).backward()
    assert x.grad.tolist() == [value] * 2


def test_cpu_numbers_created_in_a_trace_do_not_retrace():
  run, traces = make_counting(lambda x: (x * torch.tensor(3.0, device="cpu")).sum())
  x = torch.ones(2).to("jax").requires_grad_()
  for _ in range(4):
    run(x).backward()
  assert len(traces) <= 3
  assert x.grad.tolist() == [12.0] * 2


def test_a_collected_cpu_number_is_forgotten():
  held = [None]
  run = jax_jit(lambda x: x * held[0])
  x = torch.ones(2).to("jax")
  for value in (2.0, 3.0, 4.0, 2.0, 5.0):
    held[0] = torch.tensor(value)
    assert run(x).tolist() == [value] * 2
