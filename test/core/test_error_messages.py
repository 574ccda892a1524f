"""Errors for tensors that are traced, leaked, donated, or of the other library."""

import copy
import io
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from accelerators import cpu_only
from small_tensors import in_environment, jax_vector, learned_vector, vector  # noqa: F401  a fixture

from torchax import interop
from torchax.errors import ConversionError, DonationError, TracedStateError


def _saved(tensor) -> None:
  torch.save(tensor, io.BytesIO())


# Traced tensors -----------------------------------------------------------------------

ASK_FOR_NUMBERS = {
  "numpy": lambda t: t.numpy(),
  "asarray": np.asarray,
  "a function of numpy": np.sin,
  "cpu": lambda t: t.cpu(),
  "to": lambda t: t.to("cpu"),
  "copy_ to the CPU": lambda t: torch.zeros(3, device="cpu").copy_(t),
  "torch.tensor of parts": lambda t: torch.tensor([t[0], t[1]]),
  "save": _saved,
  "pickle": pickle.dumps,
  "item": lambda t: t[0].item(),
  "tolist": lambda t: t.tolist(),
  "float": lambda t: float(t[0]),
  "int": lambda t: int(t[0]),
  "if": lambda t: t if t.sum() > 0 else -t,
  "while": lambda t: [t for _ in iter(lambda: bool(t.sum() > 0), False)],
  "format": lambda t: f"{t[0]:.2f}",
  "range": lambda t: range(t[0].int()),
  "max of Python": max,
  "reshape": lambda t: t.reshape(int(t.sum()), 1),
  "a slice": lambda t: t[: t[0].int()],
  "dlpack": np.from_dlpack,
}
TRACES = {
  "jax_jit": lambda f: interop.jax_jit(f)(vector()),
  "jax_value_and_grad": lambda f: interop.jax_value_and_grad(f)(vector()),
  "raw jax.jit": lambda f: jax.jit(interop.jax_view(f))(jax_vector()),
}


def _refused_in(run, use) -> TracedStateError:
  def user_function(t):
    use(t)
    return t.sum()

  with pytest.raises(TracedStateError) as caught:
    run(user_function)
  return caught.value


@pytest.mark.parametrize("use", ASK_FOR_NUMBERS)
def test_reading_a_traced_tensor_raises_with_alternatives(use):
  error = _refused_in(TRACES["jax_jit"], ASK_FOR_NUMBERS[use])
  for part in ("`user_function`", "`torch.where`", "`cond`", "`static_argnums`"):
    assert part in str(error)


@pytest.mark.parametrize("use", ["numpy", "float", "save"])
@pytest.mark.parametrize("trace", [name for name in TRACES if name != "jax_jit"])
def test_trace_error_names_function_and_alternatives(trace, use):
  message = str(_refused_in(TRACES[trace], ASK_FOR_NUMBERS[use]))
  assert "`user_function`" in message and "`static_argnums`" in message


def test_trace_error_names_the_loop_body():
  def body(carry, _):
    return carry * float(carry[0]), None

  with pytest.raises(TracedStateError, match=r"`body \(in scan\)`"):
    interop.scan(body, vector(), length=2)


def test_a_traced_tensor_can_be_printed():
  def show(t):
    shown.extend([repr(t), f"{t}", f"{t[0]}"])
    return t

  shown: list[str] = []
  interop.jax_jit(show)(vector())
  assert len(shown) == 3 and all("traced, size=" in text for text in shown)


# Leaked tensors -----------------------------------------------------------------------

USES = {
  "+": lambda t: t + 1,
  "+ of another": lambda t: vector() + t,
  "sin": torch.sin,
  "cat": lambda t: torch.cat([t, t]),
  "an element": lambda t: t[0] + 1,
  "a view": lambda t: t.view(3, 1) + 1,
  "in place": lambda t: t.add_(1),
  "an assignment": lambda t: t.__setitem__(0, 1.0),
  "copy_ of it": lambda t: vector().copy_(t),
  "jax": lambda t: t.jax(),
  "jax_view": interop.jax_view,
  "numpy": lambda t: t.numpy(),
  "tolist": lambda t: t.tolist(),
  "item": lambda t: t[0].item(),
  "bool": lambda t: bool(t[0] > 0),
  "cpu": lambda t: t.cpu(),
  "save": _saved,
  "deepcopy": copy.deepcopy,
  "equal": lambda t: torch.equal(t, t),
  "device": lambda t: t.device,
  "an argument": lambda t: interop.jax_jit(lambda y: y + 1)(t),
  "closed over": lambda t: interop.jax_jit(lambda y: y + t)(vector()),
  "call_jax": lambda t: interop.call_jax(jnp.sin, t),
  "backward": lambda t: t.sum().backward(),
}
LEAKS = {
  "jax_jit": lambda f: interop.jax_jit(f)(vector()),
  "jax_value_and_grad": lambda f: interop.jax_value_and_grad(f)(vector()),
  "scan": lambda f: interop.scan(lambda c, _: (c, f(c)), vector(), length=2),
  "jax_vmap": lambda f: interop.jax_vmap(f)(torch.ones(2, 3, device="jax")),
  "raw jax.jit": lambda f: jax.jit(interop.jax_view(f))(jax_vector()),
  "raw jax.grad": lambda f: jax.grad(interop.jax_view(f))(jax_vector()),
}


def _leaked(run) -> torch.Tensor:
  def keeping(t):
    kept.append(t + 1)
    return t.sum()

  kept: list[torch.Tensor] = []
  run(keeping)
  return kept[0]


@pytest.mark.parametrize("use", USES)
def test_leaked_tensor_raises_at_first_use(use):
  leaked = _leaked(LEAKS["jax_jit"])
  with pytest.raises(TracedStateError, match="made while `keeping` was being traced"):
    USES[use](leaked)


@pytest.mark.parametrize("use", ["+", "sin", "jax", "numpy"])
@pytest.mark.parametrize("leak", [name for name in LEAKS if name != "jax_jit"])
def test_leak_from_any_trace_raises(leak, use):
  leaked = _leaked(LEAKS[leak])
  with pytest.raises(TracedStateError, match="made while"):
    USES[use](leaked)


@pytest.mark.parametrize("leak", LEAKS)
def test_repr_of_leaked_tensor_names_its_trace(leak):
  leaked = _leaked(LEAKS[leak])
  for text in (repr(leaked), f"{leaked}", str(leaked[:1])):
    assert text.startswith("tensor(no value: made while `")
    assert "was being traced" in text


def test_tensor_kept_from_a_raw_trace_is_usable_in_the_trace():
  """For example, activations that a hook recorded."""

  def model(t):
    kept.append(t * 2)
    return t

  def raw(array):
    interop.jax_view(model)(array)
    return kept[0].jax() + 1

  kept: list[torch.Tensor] = []
  assert jax.jit(raw)(jax_vector()).tolist() == [1, 3, 5]


# Donated memory -----------------------------------------------------------------------


def test_donating_a_captured_tensor_raises_with_reason():
  weight, module = vector(), torch.nn.Linear(3, 3).to("jax")

  def scaled(t):
    return t * weight

  def applied(parameter, t):
    return parameter + module(t).sum()  # a result that fits the donated memory

  for function, args in ((scaled, [weight]), (applied, [module.weight, vector()])):
    name, shape = function.__name__, list(args[0].shape)
    with pytest.raises(DonationError) as caught:
      interop.jax_jit(function, donate_argnums=0)(*args)
    for part in (f"`{name}` donates", f"a tensor of shape {shape}", "`.clone()`"):
      assert part in str(caught.value)
  assert weight.tolist() == [0, 1, 2]  # the call has not begun


@pytest.mark.parametrize("use", ["+", "in place", "numpy", "an argument", "repr"])
def test_using_a_donated_tensor_raises_with_reason(use):
  run = {**USES, "repr": repr}[use]
  for _ in range(3):  # JAX says it otherwise where the program has run before
    donated = vector()
    interop.jax_jit(lambda t: t + 1, donate_argnums=0)(donated)
    with pytest.raises(DonationError, match="`donate_argnums`"):
      run(donated)
    run(vector())


# Tensors in JAX, arrays in torch ------------------------------------------------------


linear = torch.nn.Linear(3, 3)
TO_JAX = {
  "jnp.sin": lambda: jnp.sin(vector()),
  "jnp.where": lambda: jnp.where(vector() > 0, vector(), vector()),
  "lax.add": lambda: jax.lax.add(vector(), vector()),
  "device_put": lambda: jax.device_put(vector()),
  "an index": lambda: jax_vector()[torch.tensor([0, 1], device="jax")],
  "jit of a module": lambda: jax.jit(linear.to("jax"))(vector()),
  "jit of a module, of an array": lambda: jax.jit(linear.to("jax"))(jax_vector()),
  "jit": lambda: jax.jit(torch.sin)(vector()),
  "grad": lambda: jax.grad(torch.sum)(vector()),
  "value_and_grad": lambda: jax.value_and_grad(torch.sum)(vector()),
  "vmap": lambda: jax.vmap(torch.sin)(vector()),
  "scan": lambda: jax.lax.scan(lambda c, t: (c + t, t), vector()[0], vector()),
  "cond": lambda: jax.lax.cond(True, torch.sin, torch.cos, vector()),
  "fori_loop": lambda: jax.lax.fori_loop(0, 2, lambda _, t: t + 1, vector()),
}


@pytest.mark.parametrize("name", TO_JAX)
def test_jax_function_raises_for_a_tensor(name):
  with pytest.raises((TypeError, ValueError)):
    TO_JAX[name]()


def _assign(tensor, array):
  tensor[:] = array


TO_TORCH = {
  "sin": lambda: torch.sin(jax_vector()),
  "relu": lambda: torch.nn.functional.relu(jax_vector()),
  "add": lambda: torch.add(vector(), jax_vector()),
  "add_": lambda: vector().add_(jax_vector()),
  "cat": lambda: torch.cat([vector(), jax_vector()]),
  "an assignment": lambda: _assign(vector(), jax_vector()),
  "jit of a torch function": lambda: jax.jit(torch.sin)(jax_vector()),
  "grad of a torch function": lambda: jax.grad(torch.sum)(jax_vector()),
  "vmap of a torch function": lambda: jax.vmap(torch.sin)(jax_vector()),
  "call_jax of a torch function": lambda: interop.call_jax(torch.sin, vector()),
}


@pytest.mark.parametrize("name", TO_TORCH)
def test_torch_function_raises_for_an_array(name):
  with pytest.raises(TypeError):
    TO_TORCH[name]()


LOSING = {
  "t * a": lambda t, a: t * a,
  "a * t": lambda t, a: a * t,
  "t - a": lambda t, a: t - a,
  "a - t": lambda t, a: a - t,
  "t @ a": lambda t, a: t @ a,
  "a @ t": lambda t, a: a @ t,
  "a + t[0]": lambda t, a: a + t[0],
  "jnp.asarray": lambda t, a: jnp.asarray(t),
  "jnp.stack": lambda t, a: jnp.stack([t, a]),
  "at": lambda t, a: a.at[0].set(t[0]),
}


@pytest.mark.parametrize("name", LOSING)
def test_jax_function_raises_if_it_would_lose_a_gradient(name):
  operation, learned = LOSING[name], learned_vector()
  with pytest.raises(ConversionError, match="torch_view"):
    operation(learned, jax_vector())
  # Where none is recorded, the result is as it was.
  expected = operation(interop.jax_view(learned), jax_vector())
  with torch.no_grad():
    assert jnp.array_equal(operation(learned, jax_vector()), expected)
  assert jnp.array_equal(operation(learned.detach(), jax_vector()), expected)


def test_other_torch_compile_backend_error_names_ours():
  compiled = torch.compile(lambda t: t + 1, backend="aot_eager")
  with pytest.raises(Exception, match='ConversionError.*backend="jax"'):
    compiled(vector())


@cpu_only("JAX declares arrays on a GPU read-only, which torch.tensor refuses")
def test_torch_factories_accept_arrays():
  assert torch.tensor(jax_vector()).tolist() == [0, 1, 2]
  assert torch.asarray(jax_vector()).tolist() == [0, 1, 2]
  with pytest.raises(TypeError, match="NotAnArg|unsupported operand|must be"):
    torch.sin("text")
