"""Wrappers take JAX's options as JAX does, and have the signature of the function."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torchax
from torchax import interop
from torchax.interop import jax_jit, jax_view, torch_view

ROWS = jax.sharding.PartitionSpec("rows")


def _x() -> torch.Tensor:
  return torch.arange(3.0).to("jax")


def power(x: torch.Tensor, n: int = 2) -> torch.Tensor:
  """Return x to the n; a compiled function guards on n."""
  assert isinstance(n, int), "n is static"
  return x**n


def _in_jax(x, n=2):
  """Return x to the n for a JAX array."""
  return x**n


def _mesh():
  return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))


# Forms --------------------------------------------------------------------------------

FORMS = {
  "jax_jit(f, static_argnums=1)": lambda: jax_jit(power, static_argnums=1),
  "jax_jit(f, static_argnames='n')": lambda: jax_jit(power, static_argnames="n"),
  "@jax_jit(static_argnums=1)": lambda: jax_jit(static_argnums=1)(power),
  "@jax_jit(static_argnames=['n'])": lambda: jax_jit(static_argnames=["n"])(power),
  "jax_jit(f, {...})": lambda: jax_jit(power, {"static_argnums": 1}),
  "jax_jit(f, kwargs_for_jax_jit={...})": lambda: jax_jit(
    power, kwargs_for_jax_jit={"static_argnames": ("n",)}
  ),
  "@jax_jit(kwargs_for_jax_jit={...})": lambda: jax_jit(
    kwargs_for_jax_jit={"static_argnums": (1,)}
  )(power),
  "a dict and keywords": lambda: jax_jit(
    power, {"static_argnums": 1}, keep_unused=True
  ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_static_argument_is_static_by_number_and_by_name(form):
  compiled, x = FORMS[form](), _x()
  assert compiled(x, 3).tolist() == compiled(x, n=3).tolist() == [0, 1, 8]
  assert compiled(x).tolist() == [0, 1, 4]


@pytest.mark.parametrize("form", [jax_jit, jax_jit()], ids=["bare", "called"])
def test_the_decorator_needs_no_options(form):
  @form
  def double(x):
    """Return twice x."""
    return 2 * x

  assert double(_x()).tolist() == [0, 2, 4]
  assert (double.__name__, double.__doc__) == ("double", "Return twice x.")


@pytest.mark.parametrize(
  "by", [{"donate_argnums": 0}, {"donate_argnames": "x"}], ids=str
)
def test_an_argument_is_donated_by_number_and_by_name(by):
  @jax_jit(**by)
  def double(x):
    return 2 * x

  for call in (lambda x: double(x), lambda x: double(x=x)):
    x = _x()
    array = x.jax()
    assert call(x).tolist() == [0, 2, 4]
    assert array.is_deleted()


def test_a_compiled_method_is_called_on_its_object():
  class Scaled(torch.nn.Module):
    def __init__(self):
      super().__init__()
      self.scale = torch.nn.Parameter(torch.tensor(3.0))

    @jax_jit(static_argnums=0)
    def forward(self, x):
      return self.scale * x

  module = Scaled().to("jax")
  assert module(_x()).tolist() == [0, 3, 6]
  module(_x()).sum().backward()
  assert module.scale.grad.item() == 3
  assert isinstance(Scaled.forward, interop.Jitted)


def _total(x, y):
  return (x * y).sum()


def test_value_and_grad_takes_keywords():
  x, y = _x(), _x() + 1
  _, (first, second) = interop.jax_value_and_grad(_total, argnums=(0, 1))(x, y)
  assert first.tolist() == y.tolist() and second.tolist() == x.tolist()


@pytest.mark.parametrize(
  "options", [{"static_argnums": 1}, {"static_argnames": "n"}], ids=str
)
def test_checkpoint_static_argument_by_number_and_by_name(options):
  block = interop.gradient_checkpoint(power, **options)
  for call in (lambda x: block(x, 3).sum(), lambda x: block(x, n=3).sum()):
    x = _x().requires_grad_()
    call(x).backward()
    value, gradient = interop.jax_value_and_grad(call)(_x())
    assert value.item() == 9 and gradient.tolist() == x.grad.tolist() == [0, 3, 12]


def test_shard_map_takes_keywords_and_is_a_decorator():
  options = dict(mesh=_mesh(), in_specs=(ROWS,), out_specs=ROWS)
  double = lambda x: 2 * x  # noqa: E731
  assert interop.jax_shard_map(double, **options)(_x()).tolist() == [0, 2, 4]
  assert interop.jax_shard_map(**options)(double)(_x()).tolist() == [0, 2, 4]


def test_a_cached_scalar_outlives_its_first_shard_map():
  scaled = interop.jax_shard_map(
    lambda x: x * 7919 + (x * 7919), mesh=_mesh(), in_specs=(ROWS,), out_specs=ROWS
  )
  scaled(_x())
  assert (_x() * 7919).tolist() == [0, 7919, 15838]


# Mistakes -----------------------------------------------------------------------------

MISTAKES = {
  "an unknown keyword": (
    lambda: jax_jit(power, static_argnum=1),
    (TypeError, "unexpected keyword 'static_argnum'. Did you mean 'static_argnums'"),
  ),
  "an unknown key": (
    lambda: jax_jit(power, {"donate": 1}),
    (TypeError, "unexpected keyword 'donate'"),
  ),
  "an unknown keyword of a decorator": (
    lambda: jax_jit(static=1),
    (TypeError, "unexpected keyword 'static'"),
  ),
  "a number for the dict": (
    lambda: jax_jit(power, 1),
    (TypeError, "options of `jax.jit` as keywords"),
  ),
  "an option twice": (
    lambda: jax_jit(power, {"static_argnums": 1}, static_argnums=1),
    (TypeError, "'static_argnums' twice"),
  ),
  "no function": (lambda: jax_jit(3), (TypeError, "a function or a module")),
  "no such place": (
    lambda: jax_jit(power, static_argnums=2),
    (ValueError, r"static_argnums=\(2,\).* takes 2 positional"),
  ),
  "no such name": (
    lambda: jax_jit(power, static_argnames="m"),
    (ValueError, "has no argument 'm'"),
  ),
  "static and donated": (
    lambda: jax_jit(power, static_argnums=1, donate_argnames="n"),
    (ValueError, r"both name the arguments \['n'\]"),
  ),
  "of value_and_grad": (
    lambda: interop.jax_value_and_grad(_total, argnum=0),
    (TypeError, "jax_value_and_grad.*'argnum'. Did you mean 'argnums'"),
  ),
  "of value_and_grad, by place": (
    lambda: interop.jax_value_and_grad(_total, 0),
    (TypeError, "options of `jax.value_and_grad`"),
  ),
  "of a checkpoint": (
    lambda: interop.gradient_checkpoint(power, polcy=None),
    (TypeError, "gradient_checkpoint.*Did you mean 'policy'"),
  ),
  "of a shard map": (
    lambda: interop.jax_shard_map(power, in_spec=ROWS),
    (TypeError, "jax_shard_map.*Did you mean 'in_specs'"),
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_option_raises_at_wrapping(mistake):
  call, (error, words) = MISTAKES[mistake]
  with pytest.raises(error, match=words):
    call()


# Names and signatures -----------------------------------------------------------------

WRAPPERS = {
  "jax_jit": jax_jit,
  "wrap_jax_jit": interop.wrap_jax_jit,
  "jax_value_and_grad": interop.jax_value_and_grad,
  "gradient_checkpoint": interop.gradient_checkpoint,
  "remat": interop.gradient_checkpoint,
  "jax_vmap": interop.jax_vmap,
  "jax_shard_map": lambda f: interop.jax_shard_map(
    f, mesh=_mesh(), in_specs=ROWS, out_specs=ROWS
  ),
  "jax_view": jax_view,
  "torchax.compile": torchax.compile,
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
  "function", [power, torch.nn.functional.relu], ids=["own", "F"]
)
def test_a_wrapped_function_has_the_users_signature(name, function):
  wrapped = WRAPPERS[name](function)
  assert wrapped.__name__ == function.__name__
  assert wrapped.__doc__ == function.__doc__
  assert wrapped.__wrapped__ is function
  assert inspect.signature(wrapped) == inspect.signature(function)


@pytest.mark.parametrize(
  "wrap", [torch_view, interop.j2t_autograd], ids=["view", "j2t"]
)
def test_a_torch_view_has_the_users_signature(wrap):
  wrapped = wrap(_in_jax)
  expected = ("_in_jax", "Return x to the n for a JAX array.")
  assert (wrapped.__name__, wrapped.__doc__) == expected
  assert wrapped.__wrapped__ is _in_jax
  assert inspect.signature(wrapped) == inspect.signature(_in_jax)
  assert wrapped(_x(), n=3).tolist() == [0, 1, 8]


def test_functional_rng_signature_starts_with_state():
  pure = interop.functional_rng(power)
  assert list(inspect.signature(pure).parameters) == ["state", "x", "n"]
  # JAX finds the positions of named arguments in it.
  out, state = jax.jit(pure, static_argnames="n")(0, jnp.arange(3.0), 3)
  assert out.tolist() == [0, 1, 8] and int(state.count) == 0


# Names --------------------------------------------------------------------------------

PACKAGES = {
  "torchax": torchax,
  "torchax.interop": interop,
  "torchax.rng": torchax.rng,
  "torchax.train": importlib.import_module("torchax.train"),
  "torchax.export": importlib.import_module("torchax.export"),
  "torchax.dynamo": importlib.import_module("torchax.dynamo"),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_public_names_only(name):
  package = PACKAGES[name]
  shown = [each for each in dir(package) if each != "__version__"]
  assert shown and not [each for each in shown if each.startswith("_")]
  assert set(shown) <= set(package.__all__)
  assert all(hasattr(package, each) for each in package.__all__)
