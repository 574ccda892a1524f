"""Calls of `backward` and `torch.autograd.grad`: accumulation, threads, hooks.

Values of gradients are tested in `test_autograd.py`.
"""

import contextlib
import threading

import pytest
import torch
from compare import assert_same, to_jax
from gradients import A, B, both, env, leaf
from ops.harness import ints
from torch.nn import functional

from torchax.interop import jax_jit
from torchax.tensor import Tensor


def test_gradients_accumulate_and_are_reset():
  cpu, x = both()
  for values in (cpu, x):
    (values * 2).sum().backward()
    (values * 3).sum().backward()
  assert_same(x.grad, cpu.grad)
  x.grad.zero_()
  assert_same(x.grad, torch.zeros(3, 4))
  x.grad = None
  (x * 2).sum().backward()
  assert_same(x.grad, torch.full((3, 4), 2.0))


def test_a_gradient_is_a_jax_tensor():
  _, x = both()
  (x * 2).sum().backward()
  assert isinstance(x.grad, Tensor)
  assert x.grad.device == torch.device("jax:0")
  assert x.grad.dtype == torch.float32


def test_backward_with_a_gradient_of_ones_own():
  cpu, x = both()
  (cpu**2).backward(B)
  (x**2).backward(B.to("jax"))
  assert_same(x.grad, cpu.grad)
  with pytest.raises(RuntimeError, match="scalar"):
    (x**2).backward()


def test_backward_on_another_thread():
  cpu, x = both()
  (cpu.exp() * 2).sum().backward()
  errors = []

  def run():
    try:
      (x.exp() * 2).sum().backward()
    except RuntimeError as error:
      errors.append(error)

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert not errors
  assert_same(x.grad, cpu.grad)


def test_backward_on_many_threads_at_once():
  model = torch.nn.Linear(4, 2).to("jax")
  x = A.to("jax")
  expected = torch.autograd.grad(model(x).sum(), model.weight)[0].cpu()
  results = []

  def run():
    results.append(torch.autograd.grad(model(x).sum(), model.weight)[0])

  threads = [threading.Thread(target=run) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(results) == 4
  for result in results:
    assert_same(result, expected)


def test_a_graph_built_on_one_thread_is_walked_on_another():
  cpu, x = both()
  cpu.sin().sum().backward()
  loss = x.sin().sum()
  thread = threading.Thread(target=loss.backward)
  thread.start()
  thread.join()
  assert_same(x.grad, cpu.grad)


def test_a_graph_is_walked_once_unless_retained():
  _, x = both()
  loss = (x**2).sum()
  loss.backward(retain_graph=True)
  loss.backward()
  assert_same(x.grad, A * 4)
  with pytest.raises(RuntimeError, match="second time"):
    loss.backward()


def test_autograd_grad_leaves_grad_alone():
  cpu, x = both()
  expected = torch.autograd.grad((cpu**3).sum(), cpu)
  actual = torch.autograd.grad((x**3).sum(), x)
  assert_same(actual, expected)
  assert x.grad is None


def test_unused_inputs_are_reported():
  _, x = both()
  other = to_jax(leaf(B))
  with pytest.raises(RuntimeError, match="not have been used"):
    torch.autograd.grad((x * 2).sum(), [x, other])
  assert torch.autograd.grad((x * 2).sum(), other, allow_unused=True) == (None,)


SECOND_ORDER = {
  "polynomial": lambda a: (a**3).sum(),
  "exp": lambda a: (a.exp() * a).sum(),
  "matmul": lambda a: ((a @ a.t()) ** 2).sum(),
  "tanh": lambda a: a.tanh().pow(2).sum(),
  "softmax": lambda a: functional.softmax(a, 1).pow(2).sum(),
  "views": lambda a: (a.t()[1:] ** 3).sum(),
  "division": lambda a: (1 / (a + 3)).sum(),
  "linear": lambda a: functional.linear(a, a).pow(2).sum(),
}


@pytest.mark.parametrize("function", SECOND_ORDER.values(), ids=SECOND_ORDER)
@pytest.mark.parametrize("with_env", [False, True], ids=["without_env", "with_env"])
def test_the_gradient_of_a_gradient(function, with_env):
  cpu, x = both()
  with env if with_env else contextlib.nullcontext():
    for values in (cpu, x):
      (first,) = torch.autograd.grad(function(values), values, create_graph=True)
      (first * B.to(values.device)).sum().backward()
  assert_same(x.grad, cpu.grad)


def test_hooks_see_and_change_gradients():
  cpu, x = both()
  for values in (cpu, x):
    seen = []
    inner = values * 2
    inner.register_hook(lambda grad, seen=seen: seen.append(grad.shape))
    handle = values.register_hook(lambda grad: grad * 10)
    (inner**2).sum().backward()
    assert seen == [(3, 4)]
    handle.remove()
  assert_same(x.grad, cpu.grad)


def test_hooks_of_leaves_run_after_accumulation():
  seen = []
  _, x = both()
  x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
  (x * 3).sum().backward()
  assert_same(seen, [torch.full((3, 4), 3.0)])


def test_module_hooks_see_gradients():
  model = torch.nn.Linear(4, 2).to("jax")
  seen = []
  model.register_full_backward_hook(lambda m, gi, go: seen.append((gi, go)))
  model(to_jax(leaf())).sum().backward()
  ((grad_input,), (grad_output,)) = seen[0]
  assert grad_input.shape == (3, 4)
  assert_same(grad_output, torch.ones(3, 2))


@pytest.mark.parametrize("wrap", [jax_jit, torch.compile(backend="jax")])
def test_module_hooks_change_gradients_of_compiled_code(wrap):
  def trained(device, wrap, is_inside):
    layers = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(*layers).to(device)
    with torch.no_grad():
      for index, p in enumerate(model.parameters(), 1):
        p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p) / index)
    model[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] + go[0],))
    model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    x = torch.ones(3, 4, device=device, requires_grad=True)
    if is_inside:
      wrap(lambda: model(x).sum().backward())()
    else:
      wrap(lambda: model(x).sum())().backward()
    return [x.grad, *[p.grad for p in model.parameters()]]

  expected = trained("cpu", lambda f: f, is_inside=False)
  for is_inside in (False, True):
    assert_same(trained("jax", wrap, is_inside), expected)


def test_retained_gradients_of_results():
  cpu, x = both()
  for values in (cpu, x):
    inner = values * 2
    inner.retain_grad()
    (inner**2).sum().backward()
    values.inner_grad = inner.grad
  assert_same(x.inner_grad, cpu.inner_grad)


def test_nothing_is_recorded_without_grad():
  _, x = both()
  with torch.no_grad():
    assert not (x * 2).requires_grad
    assert (x * 2).grad_fn is None
    with torch.enable_grad():
      assert (x * 2).requires_grad
  with torch.inference_mode():
    assert not (x * 2).requires_grad

  @torch.no_grad()
  def decorated():
    return x * 2

  assert not decorated().requires_grad
  assert (x * 2).requires_grad


def test_integers_cannot_require_grad():
  with pytest.raises(RuntimeError, match="floating"):
    ints(3).to("jax").requires_grad_()


def test_checkpointing_gives_the_same_gradients():
  cpu, x = both()
  for values in (cpu, x):
    torch.utils.checkpoint.checkpoint(
      lambda a: (a.sin() * a).sum(), values, use_reentrant=False
    ).backward()
  assert_same(x.grad, cpu.grad)


def test_anomaly_detection_works():
  _, x = both()
  with pytest.warns(UserWarning), torch.autograd.detect_anomaly(check_nan=True):
    (x * 2).sum().backward()
  with (
    pytest.warns(UserWarning),
    torch.autograd.detect_anomaly(),
    pytest.raises(RuntimeError, match="nan"),
  ):
    torch.sqrt(x * 0 - 1).sum().backward()
