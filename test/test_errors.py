"""Error messages: they name the mistake, the user's function and an alternative."""

import copy
import io
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from source_tree import ROOT

import torchax
from torchax import errors, interop
from torchax.core import tracebacks
from torchax.errors import (
  ConversionError,
  DonationError,
  MixedDeviceError,
  TracedStateError,
)

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def environment():
  with torchax.default_env():
    yield


def _x() -> torch.Tensor:
  return torch.arange(3.0, device="jax")


def _learned() -> torch.Tensor:
  return torch.ones(3, device="jax", requires_grad=True)


def _array() -> jax.Array:
  return jnp.arange(3.0)


def _saved(tensor) -> None:
  torch.save(tensor, io.BytesIO())


# A tensor that is being traced -------------------------------------------------------

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
  "jax_jit": lambda f: interop.jax_jit(f)(_x()),
  "jax_value_and_grad": lambda f: interop.jax_value_and_grad(f)(_x()),
  "raw jax.jit": lambda f: jax.jit(interop.jax_view(f))(_array()),
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
    interop.scan(body, _x(), length=2)


def test_a_traced_tensor_can_be_printed():
  def show(t):
    shown.extend([repr(t), f"{t}", f"{t[0]}"])
    return t

  shown: list[str] = []
  interop.jax_jit(show)(_x())
  assert len(shown) == 3 and all("traced, size=" in text for text in shown)


# A tensor that has left its trace ----------------------------------------------------

USES = {
  "+": lambda t: t + 1,
  "+ of another": lambda t: _x() + t,
  "sin": torch.sin,
  "cat": lambda t: torch.cat([t, t]),
  "an element": lambda t: t[0] + 1,
  "a view": lambda t: t.view(3, 1) + 1,
  "in place": lambda t: t.add_(1),
  "an assignment": lambda t: t.__setitem__(0, 1.0),
  "copy_ of it": lambda t: _x().copy_(t),
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
  "closed over": lambda t: interop.jax_jit(lambda y: y + t)(_x()),
  "call_jax": lambda t: interop.call_jax(jnp.sin, t),
  "backward": lambda t: t.sum().backward(),
}
LEAKS = {
  "jax_jit": lambda f: interop.jax_jit(f)(_x()),
  "jax_value_and_grad": lambda f: interop.jax_value_and_grad(f)(_x()),
  "scan": lambda f: interop.scan(lambda c, _: (c, f(c)), _x(), length=2),
  "jax_vmap": lambda f: interop.jax_vmap(f)(torch.ones(2, 3, device="jax")),
  "raw jax.jit": lambda f: jax.jit(interop.jax_view(f))(_array()),
  "raw jax.grad": lambda f: jax.grad(interop.jax_view(f))(_array()),
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
  assert jax.jit(raw)(_array()).tolist() == [1, 3, 5]


# Loops and branches ------------------------------------------------------------------


def _shorter(t):
  return {"a": {"b": t[:2]}}


def _same(t):
  return {"a": {"b": t}}


def _whole_numbers(t):
  return {"a": {"b": t.int()}}


def _flat(t):
  return [t]


TRUE = lambda: torch.tensor(True, device="jax")  # noqa: E731
BRANCHES = {
  "cond, shapes": (
    lambda: interop.cond(TRUE(), _same, _shorter, _x()),
    "`['a']['b']` of the result the false branch `_shorter` has torch.float32 of shape "
    "[2], and the true branch `_same` has torch.float32 of shape [3]",
  ),
  "cond, dtypes": (
    lambda: interop.cond(TRUE(), _whole_numbers, _same, _x()),
    "the true branch `_whole_numbers` has torch.int32 of shape [3]",
  ),
  "cond, structures": (
    lambda: interop.cond(TRUE(), _flat, _same, _x()),
    "the true branch `_flat` has nothing there (in a list of 1)",
  ),
  "switch": (
    lambda: interop.switch(1, [_same, _same, _shorter], _x()),
    "branch 2 `_shorter` has torch.float32 of shape [2]",
  ),
  "in jax_jit": (
    lambda: interop.jax_jit(lambda t: interop.cond(t[0] > 0, _same, _shorter, t))(_x()),
    "the false branch `_shorter`",
  ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branch_mismatch_error_names_the_position(name):
  run, part = BRANCHES[name]
  with pytest.raises(TypeError) as caught:
    run()
  assert part in str(caught.value)


def _shrinking(tree, *_):
  return _shorter(tree["a"]["b"])


def _shrinking_pair(tree, _):
  return _shorter(tree["a"]["b"]), None


BODIES = {
  "scan": (
    lambda: interop.scan(_shrinking_pair, _same(_x()), length=2),
    "`['a']['b']` of the carry `_shrinking_pair` is given torch.float32 of shape [3] "
    "and returns torch.float32 of shape [2]",
  ),
  "fori_loop": (
    lambda: interop.fori_loop(0, 2, lambda _, t: _shrinking(t), _same(_x())),
    "The value of fori_loop keeps its structure",
  ),
  "fori_loop of tensors": (
    lambda: interop.fori_loop(
      0, torch.tensor(2, device="jax"), lambda _, t: t[:2], _x()
    ),
    "The value of fori_loop keeps its structure",
  ),
  "while_loop": (
    lambda: interop.while_loop(
      lambda t: t["a"]["b"].sum() < 9, _shrinking, _same(_x())
    ),
    "`['a']['b']` of the value `_shrinking` is given",
  ),
  "condition": (
    lambda: interop.while_loop(lambda t: t < 9, lambda t: t + 1, _x()),
    "it returned torch.bool of shape [3]. Reduce it",
  ),
  "no pair": (
    lambda: interop.scan(lambda carry, _: carry, _x(), length=2),
    "`<lambda>` returned one tensor",
  ),
}


@pytest.mark.parametrize("name", BODIES)
def test_changed_carry_error_names_function_and_position(name):
  run, part = BODIES[name]
  with pytest.raises(TypeError) as caught:
    run()
  assert part in str(caught.value)


# Arguments ---------------------------------------------------------------------------


def _first(t, *others, **named):
  return t


ARGUMENTS = {
  "a function": (
    lambda: interop.jax_jit(_first)(_x(), torch.sin),
    "`_first` was given an object of the class builtin_function_or_method as args[1]",
  ),
  "an object by name": (
    lambda: interop.jax_jit(_first)(_x(), other=object()),
    "`_first` was given an object of the class object as kwargs['other']",
  ),
  "a static list": (
    lambda: interop.jax_jit(_first, static_argnums=1)(_x(), [1]),
    "`_first` has a static argument without a hash",
  ),
  "a static tensor": (
    lambda: interop.jax_jit(_first, static_argnums=1)(_x(), _x()),
    "`_first` has a static argument without a hash",
  ),
  "no scalar": (
    lambda: interop.jax_value_and_grad(_first)(_x()),
    "`_first` in jax_value_and_grad: Gradient only defined for scalar",
  ),
  "argnums": (
    lambda: interop.jax_value_and_grad(_first, argnums=2)(_x()),
    "jax_value_and_grad differentiates `_first` by argnums=2, but it was called with 1",
  ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_mismatch_names_function_and_position(name):
  run, part = ARGUMENTS[name]
  with pytest.raises((TypeError, ValueError)) as caught:
    run()
  assert part in str(caught.value)


# Memory that was given away ----------------------------------------------------------


def test_donating_a_captured_tensor_raises_with_reason():
  weight, module = _x(), torch.nn.Linear(3, 3).to("jax")

  def scaled(t):
    return t * weight

  def applied(parameter, t):
    return module(t) + parameter.sum()

  for function, args in ((scaled, [weight]), (applied, [module.weight, _x()])):
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
    donated = _x()
    interop.jax_jit(lambda t: t + 1, donate_argnums=0)(donated)
    with pytest.raises(DonationError, match="`donate_argnums`"):
      run(donated)
    run(_x())


# Tensors in JAX, arrays in torch -----------------------------------------------------

linear = torch.nn.Linear(3, 3)
TO_JAX = {
  "jnp.sin": lambda: jnp.sin(_x()),
  "jnp.where": lambda: jnp.where(_x() > 0, _x(), _x()),
  "lax.add": lambda: jax.lax.add(_x(), _x()),
  "device_put": lambda: jax.device_put(_x()),
  "an index": lambda: _array()[torch.tensor([0, 1], device="jax")],
  "jit of a module": lambda: jax.jit(linear.to("jax"))(_x()),
  "jit of a module, of an array": lambda: jax.jit(linear.to("jax"))(_array()),
  "jit": lambda: jax.jit(torch.sin)(_x()),
  "grad": lambda: jax.grad(torch.sum)(_x()),
  "value_and_grad": lambda: jax.value_and_grad(torch.sum)(_x()),
  "vmap": lambda: jax.vmap(torch.sin)(_x()),
  "scan": lambda: jax.lax.scan(lambda c, t: (c + t, t), _x()[0], _x()),
  "cond": lambda: jax.lax.cond(True, torch.sin, torch.cos, _x()),
  "fori_loop": lambda: jax.lax.fori_loop(0, 2, lambda _, t: t + 1, _x()),
}


@pytest.mark.parametrize("name", TO_JAX)
def test_jax_function_raises_for_a_tensor(name):
  with pytest.raises((TypeError, ValueError)):
    TO_JAX[name]()


def _assign(tensor, array):
  tensor[:] = array


TO_TORCH = {
  "sin": lambda: torch.sin(_array()),
  "relu": lambda: torch.nn.functional.relu(_array()),
  "add": lambda: torch.add(_x(), _array()),
  "add_": lambda: _x().add_(_array()),
  "cat": lambda: torch.cat([_x(), _array()]),
  "an assignment": lambda: _assign(_x(), _array()),
  "jit of a torch function": lambda: jax.jit(torch.sin)(_array()),
  "grad of a torch function": lambda: jax.grad(torch.sum)(_array()),
  "vmap of a torch function": lambda: jax.vmap(torch.sin)(_array()),
  "call_jax of a torch function": lambda: interop.call_jax(torch.sin, _x()),
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
  operation, learned = LOSING[name], _learned()
  with pytest.raises(ConversionError, match="torch_view"):
    operation(learned, _array())
  # Where none is recorded, the result is as it was.
  expected = operation(interop.jax_view(learned), _array())
  with torch.no_grad():
    assert jnp.array_equal(operation(learned, _array()), expected)
  assert jnp.array_equal(operation(learned.detach(), _array()), expected)


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_other_torch_compile_backend_error_names_ours(backend):
  compiled = torch.compile(lambda t: t + 1, backend=backend)
  with pytest.raises(Exception, match='ConversionError.*backend="jax"'):
    compiled(_x())


def test_torch_factories_accept_arrays():
  assert torch.tensor(_array()).tolist() == [0, 1, 2]
  assert torch.asarray(_array()).tolist() == [0, 1, 2]
  with pytest.raises(TypeError, match="NotAnArg|unsupported operand|must be"):
    torch.sin("text")


# The end of a traceback --------------------------------------------------------------


def _raises_itself(t):
  raise ZeroDivisionError("of the user")


def _wrong_shapes(t):
  return t + torch.ones(2, device="jax")


def _too_short() -> torch.Tensor:
  return torch.ones(2, device="jax")


class _Model(torch.nn.Module):
  def forward(self, t):
    return _wrong_shapes(t)


LAST_LINES = {
  "an operation": lambda: _x() + _too_short(),
  "a function": lambda: torch.mm(_x(), _x()),
  "a method": lambda: _x().reshape(2, 2),
  "in place": lambda: _x().add_(_too_short()),
  "an index": lambda: _x()[5],
  "an assignment": lambda: _assign(_x(), _too_short()),
  "another device": lambda: _x() + torch.ones(3, device="cpu"),
  "numpy": lambda: _learned().numpy(),
  "jax_jit": lambda: interop.jax_jit(_raises_itself)(_x()),
  "jax_jit, wrong shapes": lambda: interop.jax_jit(_wrong_shapes)(_x()),
  "jax_jit, no argument": lambda: interop.jax_jit(_wrong_shapes)(),
  "two of them": lambda: interop.jax_jit(interop.jax_jit(_raises_itself))(_x()),
  "a module": lambda: interop.JittableModule(_Model())(_x()),
  "torchax.compile": lambda: torchax.compile(_Model())(_x()),
  "jax_value_and_grad": lambda: interop.jax_value_and_grad(_raises_itself)(_x()),
  "gradient_checkpoint": lambda: interop.gradient_checkpoint(_raises_itself)(_x()),
  "scan": lambda: interop.scan(lambda c, _: _raises_itself(c), _x(), length=2),
  "while_loop": lambda: interop.while_loop(_raises_itself, _raises_itself, _x()),
  "cond": lambda: interop.cond(TRUE(), _raises_itself, _raises_itself, _x()),
  "cond that differs": lambda: interop.cond(TRUE(), _same, _shorter, _x()),
  "jax_vmap": lambda: interop.jax_vmap(_raises_itself)(_x()),
  "jax_view": lambda: interop.jax_view(_raises_itself)(_array()),
  "jax_view in jax.jit": lambda: jax.jit(interop.jax_view(_raises_itself))(_array()),
  "call_jax": lambda: interop.call_jax(_raises_itself, _x()),
  "call_torch": lambda: interop.call_torch(_raises_itself, _array()),
  "a seed": lambda: torchax.default_env().manual_seed("seven"),
  "an option": lambda: interop.jax_jit(_first, no_such_option=7),
  "no function": lambda: torchax.compile(3),
  "extract_jax": lambda: interop.extract_jax(_Model())[1]({}, (_array(),)),
}


def _frames_of(name) -> tuple[list, BaseException]:
  with pytest.raises(Exception) as caught:
    LAST_LINES[name]()
  return traceback.extract_tb(caught.value.__traceback__), caught.value


@pytest.fixture
def hidden(monkeypatch):
  monkeypatch.delenv(tracebacks.VARIABLE, raising=False)


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize("name", LAST_LINES)
def test_a_traceback_ends_at_the_users_line(name):
  frames, error = _frames_of(name)
  assert frames[-1].filename == __file__
  of_library = f"{ROOT / 'torchax'}"
  assert not [frame for frame in frames if frame.filename.startswith(of_library)]
  # JAX adds its own where it is the outermost.
  assert tracebacks.NOTE in error.__notes__
  assert len(error.__notes__) == 1 + (name == "jax_view in jax.jit")
  for cause in (error.__cause__, error.__context__):
    found = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    assert not [frame for frame in found if frame.filename.startswith(of_library)]


@pytest.mark.parametrize("way", ["variable", "jax"])
def test_full_traceback_is_available_on_request(way, monkeypatch):
  if way == "variable":
    monkeypatch.setenv(tracebacks.VARIABLE, "full")
  else:
    monkeypatch.delenv(tracebacks.VARIABLE, raising=False)
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
  try:
    frames, error = _frames_of("jax_jit")
  finally:
    if way == "jax":
      jax.config.update("jax_traceback_filtering", before)
  of_library = [f for f in frames if f.filename.startswith(f"{ROOT / 'torchax'}")]
  assert len(of_library) > 3
  assert tracebacks.NOTE not in getattr(error, "__notes__", [])


# The classes -------------------------------------------------------------------------

CLASSES = [
  value
  for value in vars(errors).values()
  if isinstance(value, type) and value.__module__ == errors.__name__
]
DOCUMENTED = [cls for cls in CLASSES if cls is not errors.Documented]
each_class = pytest.mark.parametrize("cls", DOCUMENTED, ids=lambda cls: cls.__name__)


@each_class
def test_each_exception_has_a_section_in_the_docs(cls):
  page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
  assert f"\n## {cls.__name__}\n" in page


@each_class
def test_message_ends_with_link_to_its_section(cls):
  if issubclass(cls, Warning):
    return  # its message is one line of a log
  error = cls("What happened.")
  first, last = str(error).splitlines()
  assert (first, error.text, error.args) == (*["What happened."] * 2, (first,))
  assert last == f"See {errors.PAGE}#{cls.__name__.lower()}"
  assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_link_points_to_the_package_repository():
  setup = (ROOT / "setup.py").read_text(encoding="utf-8")
  assert f'URL = "{errors.PAGE.removesuffix("/blob/main/docs/errors.md")}"' in setup


def test_exception_of_another_module_links_to_its_base():
  class Inner(MixedDeviceError):
    pass

  assert str(Inner("x")).endswith("#mixeddeviceerror")


def test_traced_state_error_is_not_an_rng_error():
  assert not issubclass(TracedStateError, errors.RngError)
