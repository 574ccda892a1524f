"""The extension API: how lowerings are registered, replaced and found.

Operations are registered with torch under a namespace of the tests' own.
"""

import dataclasses
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import registries
import torch
from compare import assert_same
from source_tree import PACKAGE

import torchax
from torchax.compat import torch_compat
from torchax.errors import DataDependentError, OperatorNotFound
from torchax.interop import jax_jit
from torchax.ops import builtin, jaten, jtorch
from torchax.ops.op_base import op
from torchax.registry import operators
from torchax.registry.operators import (
  Kind,
  Operator,
  register_torch_dispatch_op,
  register_torch_function_op,
)

library = torch.library.Library("torchax_test", "DEF")
mylib = torch.ops.torchax_test
ONES = torch.ones(3)


@pytest.fixture(name="define")
def _define(request):
  """Defines an operation of the test's own: `define("(Tensor x) -> Tensor")`."""

  def define(signature: str, index: int = 0):
    name = f"{request.node.originalname.removeprefix('test_')}_{index}"
    library.define(name + signature)
    return getattr(mylib, name)

  return define


def on_jax() -> torch.Tensor:
  return ONES.to("jax")


# Registering --------------------------------------------------------------------------


def test_a_jax_function_is_the_default(define):
  packet = define("(Tensor x, int n) -> Tensor")

  @op(packet)
  def lowering(x, n):
    assert isinstance(x, jnp.ndarray)
    return x * n

  assert_same(packet(on_jax(), 3), ONES * 3)


def test_an_overload_can_be_lowered_alone(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet.default)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 1)


def test_one_lowering_serves_many_operations(define):
  first, second = define("(Tensor x) -> Tensor"), define("(Tensor x) -> Tensor", 1)
  op(first, second)(lambda x: x + 1)
  assert_same(first(on_jax()), second(on_jax()).cpu())


def test_a_function_of_tensors_may_call_torch(define):
  packet = define("(Tensor x) -> Tensor")

  @op(packet, is_jax_function=False)
  def lowering(x):
    assert isinstance(x, torchax.tensor.Tensor)
    return torch.cat([x, x])

  assert_same(packet(on_jax()), torch.ones(6))


@pytest.mark.parametrize("is_jax_function", [True, False])
def test_needs_env_passes_the_environment(define, is_jax_function):
  packet = define("(Tensor x) -> Tensor", int(is_jax_function))
  seen = []

  @op(packet, needs_env=True, is_jax_function=is_jax_function)
  def lowering(x, *, env):
    seen.append(env)
    return x + 1

  assert_same(packet(on_jax()), ONES + 1)
  assert seen == [torchax.default_env()]


def test_a_lowering_with_the_environment_draws_from_its_stream(define):
  packet = define("(Tensor x) -> Tensor")

  @op(packet, needs_env=True)
  def lowering(x, *, env):
    return jax.random.uniform(env.get_and_rotate_prng_key(), x.shape)

  before = int(torchax.default_env().rng.state.count)
  first, second = packet(on_jax()), packet(on_jax())
  assert not torch.equal(first, second)
  assert int(torchax.default_env().rng.state.count) == before + 2


def test_a_view_op_sees_the_tensor_and_may_alias(define):
  packet = define("(Tensor(a) x) -> Tensor(a)")

  @op(packet, is_jax_function=False, is_view_op=True)
  def lowering(x):
    return x[1:]

  tensor = on_jax()
  packet(tensor).zero_()
  assert_same(tensor, torch.tensor([1.0, 0.0, 0.0]))


def test_a_view_op_may_change_its_argument(define):
  packet = define("(Tensor(a!) x) -> Tensor(a!)")

  @op(packet, is_jax_function=False, is_view_op=True)
  def lowering(x):
    return x.mul_(2)

  tensor = on_jax()
  assert packet(tensor) is tensor
  assert_same(tensor, ONES * 2)


def test_a_lowering_may_return_many_results(define):
  packet = define("(Tensor x) -> (Tensor, Tensor[])")
  op(packet)(lambda x: (x + 1, [x, x * 2]))
  assert_same(packet(on_jax()), (ONES + 1, [ONES, ONES * 2]))


def test_static_argument_of_a_builtin_is_a_python_number(define):
  packet = define("(Tensor x, float p) -> Tensor")

  @builtin.op(packet, static=("p",))
  def lowering(x, p):
    assert type(p) is float
    return x if p > 1 else -x

  assert_same(packet(on_jax(), 2.0), ONES)
  assert_same(packet(on_jax(), 0.5), -ONES)


STYLES = {
  "of the library": builtin.op,
  "that says so": functools.partial(op, dynamic=("p",)),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_number_that_is_an_operand_does_not_recompile(define, style):
  packet = define("(Tensor x, float p, int n) -> Tensor", list(STYLES).index(style))
  traces = []

  @STYLES[style](packet)
  def lowering(x, p, n):
    traces.append(type(n))
    return x * p + n

  for p in (0.5, 1.5, 2.5):
    assert_same(packet(on_jax(), p, 1), ONES * p + 1)
  assert traces == [int]
  packet(on_jax(), 0.5, 2)
  assert traces == [int, int]


def test_a_check_runs_before_anything_is_computed(define):
  packet = define("(Tensor x, float p) -> Tensor")
  computed = []

  def check(x, p):
    if p < 0:
      raise ValueError(f"p must not be negative, but is {p}.")

  @op(packet, check=check)
  def lowering(x, p):
    computed.append(True)
    return x

  with pytest.raises(ValueError, match="-1.0"):
    packet(on_jax(), -1.0)
  assert not computed


def test_a_lowering_whose_shape_depends_on_data_is_not_compiled(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet, compiled=False)(lambda x: x[x > 1])
  assert_same(packet(torch.arange(4.0).to("jax")), torch.tensor([2.0, 3.0]))


# What has said nothing ----------------------------------------------------------------

NUMBERS = (True, 1, 1.0, 0.0, -0.0, float("inf"), 1j)


def test_numbers_stay_python_numbers(define):
  """One program for each, though some of them are equal."""
  packet = define("(Tensor x, Scalar a, *, Scalar? b=None) -> Tensor")
  seen = []

  @op(packet)
  def lowering(x, a, *, b=None):
    seen.append((repr(a), repr(b)))
    return x

  for number in NUMBERS:
    for _ in range(2):
      packet(on_jax(), number, b=number)
  assert seen == [(repr(number),) * 2 for number in NUMBERS]


def test_numbers_in_lists_stay_python_numbers(define):
  packet = define("(Tensor x, Scalar[] a, float[] b) -> Tensor")
  seen = []

  @op(packet)
  def lowering(x, a, b):
    seen.append((a, b))
    return x

  packet(on_jax(), [1, 2.5], [0.5])
  assert seen == [((1, 2.5), (0.5,))]


def test_number_for_a_tensor_argument_stays_a_number(define):
  packet = define("(Tensor x, Tensor y) -> Tensor")
  op(packet)(lambda x, y: x + 1 if isinstance(y, float) and y > 2 else x)
  called = torchax.default_env().dispatch(packet.default, (), (on_jax(), 2.5), {})
  assert_same(called, ONES + 1)


DATA_DEPENDENT = {
  "a mask as an index": (lambda x: x[x > 1], [2.0, 3.0]),
  "nonzero": (lambda x: jnp.nonzero(x > 1)[0] * 1.0, [2.0, 3.0]),
  "a branch": (lambda x: x + 1 if x.sum() > 0 else x, [1.0, 2.0, 3.0, 4.0]),
  "a number": (lambda x: x * float(x[1]), [0.0, 1.0, 2.0, 3.0]),
  "an integer": (lambda x: jnp.arange(int(x[2])) * 1.0, [0.0, 1.0]),
  "numpy": (lambda x: jnp.asarray(np.asarray(x) + 1), [1.0, 2.0, 3.0, 4.0]),
  "a shape": (lambda x: jnp.ones(x[2].astype(int)), [1.0, 1.0]),
  "a slice": (lambda x: x[: x[2].astype(int)], [0.0, 1.0]),
  "a list": (lambda x: jnp.asarray(x.tolist()), [0.0, 1.0, 2.0, 3.0]),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_lowering_that_needs_values_falls_back_at_once(define, name):
  function, expected = DATA_DEPENDENT[name]
  packet = define("(Tensor x) -> Tensor", list(DATA_DEPENDENT).index(name))
  calls = []

  @op(packet)
  def lowering(x):
    calls.append(isinstance(x, jax.core.Tracer))
    return function(x)

  tensor = torch.arange(4.0).to("jax")
  for _ in range(3):
    assert_same(packet(tensor), torch.tensor(expected))
  assert calls == [True, False, False, False]
  assert operators.all_aten_ops[packet].execution.compiled is None


@pytest.mark.parametrize("name", DATA_DEPENDENT)
@pytest.mark.parametrize("is_known", [False, True])
def test_error_names_a_lowering_that_needs_values(define, name, is_known):
  function, _ = DATA_DEPENDENT[name]
  packet = define(
    "(Tensor x) -> Tensor", list(DATA_DEPENDENT).index(name) * 2 + is_known
  )

  @op(packet)
  def picked(x):
    return function(x)

  tensor = torch.arange(4.0).to("jax")
  if is_known:
    packet(tensor)
  found = rf"picked of {re.escape(str(packet))} needs the values of(.|\n)*jax_jit"
  with pytest.raises(DataDependentError, match=found) as raised:
    jax_jit(packet)(tensor)
  assert raised.value.__cause__ is not None


def test_error_names_an_array_function_that_needs_values():
  def first(x):
    return x[: int(x.sum())]

  jtorch.register_function(torch.corrcoef, is_user_defined=True)(first)
  try:
    tensor = torch.tensor([1.0, 0.0, 2.0]).to("jax")
    with torchax.default_env():
      assert_same(torch.corrcoef(tensor), torch.tensor([1.0, 0.0, 2.0]))
      with pytest.raises(DataDependentError, match="first of (.|\n)*corrcoef"):
        jax_jit(torch.corrcoef)(tensor)
  finally:
    ours = operators.all_torch_functions[torch.corrcoef].replaced
    operators.register(dataclasses.replace(ours, is_user_defined=True))


def test_other_errors_in_a_trace_are_unchanged(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: "a" + x)
  with pytest.raises(TypeError, match="concatenate"):
    jax_jit(packet)(on_jax())


def test_lowering_that_sometimes_needs_values_falls_back_then(define):
  packet = define("(Tensor x, Tensor index) -> Tensor")
  op(packet)(lambda x, index: x[index])
  tensor = torch.arange(4.0).to("jax")
  mask = tensor > 1
  assert_same(packet(tensor, mask.long()), torch.tensor([0.0, 0.0, 1.0, 1.0]))
  assert operators.all_aten_ops[packet].execution.compiled is None
  assert_same(packet(tensor, mask), torch.tensor([2.0, 3.0]))
  assert operators.all_aten_ops[packet].execution.compiled is None
  assert_same(packet(tensor, mask.long()), torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_fallback_affects_one_program_and_is_logged_once(define, caplog):
  packet = define("(Tensor x, bool masked) -> Tensor")
  traced = []

  @op(packet)
  def picked(x, masked):
    traced.append((masked, isinstance(x, jax.core.Tracer)))
    return x[x > 1] if masked else x + 1

  operator = operators.all_aten_ops[packet]
  before = dataclasses.replace(operator)
  tensor = torch.arange(4.0).to("jax")
  with caplog.at_level("WARNING", logger="torchax"):
    for _ in range(2):
      assert_same(packet(tensor, True), torch.tensor([2.0, 3.0]))
      assert_same(packet(tensor, False), torch.arange(4.0) + 1)
  assert traced == [(True, True), (True, False), (False, True), (True, False)]
  assert operators.all_aten_ops[packet] is operator == before
  (record,) = [r for r in caplog.records if r.name == "torchax"]
  message = record.getMessage()
  assert message.startswith(f"The lowering picked of {packet} does not compile")
  assert "compiled=False" in message and "NonConcreteBooleanIndex" in message
  with torchax.Environment(), caplog.at_level("WARNING", logger="torchax"):
    assert_same(packet(tensor, True), torch.tensor([2.0, 3.0]))
  assert len([r for r in caplog.records if r.name == "torchax"]) == 1


def test_a_lowering_that_compiles_is_traced_once(define):
  packet = define("(Tensor x) -> Tensor")
  calls = []
  op(packet)(lambda x: calls.append(type(x)) or x + 1)
  for _ in range(3):
    assert_same(packet(on_jax()), ONES + 1)
  assert len(calls) == 1 and issubclass(calls[0], jax.core.Tracer)


def test_wrong_arguments_do_not_trigger_the_fallback(define):
  packet = define("(Tensor x, Tensor y) -> Tensor")

  @op(packet)
  def lowering(x, y):
    if x.shape != y.shape:
      raise TypeError(f"got a {type(x).__name__} of another shape")
    return x + y

  with pytest.raises(TypeError, match="got a ArrayImpl of another shape"):
    packet(on_jax(), torch.ones(2).to("jax"))
  assert operators.all_aten_ops[packet].execution.compiled is None
  assert_same(packet(on_jax(), on_jax()), ONES + 1)


def test_options_are_fields_of_an_operator_or_of_its_groups(define):
  packet = define("(Tensor x, int n) -> Tensor")
  op(packet, dynamic=("n",), compiled=False, distribution="none")(lambda x, n: x)
  operator = operators.all_aten_ops[packet]
  assert operator.numbers == operators.Numbers(dynamic=("n",))
  assert operator.execution == operators.Execution(compiled=False)
  assert operator.draw.distribution == "none"
  assert operator.checks is not None and not operator.is_builtin


def test_unknown_option_raises_and_is_named(define):
  with pytest.raises(TypeError, match="dynamics"):
    op(define("(Tensor x) -> Tensor"), dynamics=("x",))(lambda x: x)


def test_builtins_declare_if_they_do_not_compile(define):
  packet = define("(Tensor x) -> Tensor")
  builtin.op(packet)(lambda x: x[x > 1])
  with pytest.raises(jax.errors.NonConcreteBooleanIndexError):
    packet(on_jax())


def test_in_place_and_out_forms_of_uncompiled_lowerings_work():
  """`clamp` stands for an operator that looks at its numbers."""
  clamp = torch.ops.aten.clamp.default
  ours = operators.all_aten_ops[torch.ops.aten.clamp]
  env = torchax.Environment()

  def lowering(self, min=None, max=None):
    return jnp.clip(self, float(self[0]), max)

  env.override_op_definition(clamp, lowering, is_jax_function=True)
  tensor = env.to_xla(torch.tensor([1.0, 0.0, 5.0]))
  tensor[:].clamp_(0.0, 3.0)
  assert_same(tensor, torch.tensor([1.0, 1.0, 3.0]))
  out = env.to_xla(torch.zeros(3))
  torch.clamp(env.to_xla(torch.tensor([2.0, 0.0, 5.0])), 0.0, 3.0, out=out)
  assert_same(out, torch.tensor([2.0, 2.0, 3.0]))
  assert operators.all_aten_ops[torch.ops.aten.clamp] is ours


def test_a_torch_function_that_needs_data_has_a_gradient():
  def torch_function(x):
    return torch.overrides.handle_torch_function(torch_function, (x,), x)

  register_torch_function_op(torch_function, lambda x: x[x > 1] ** 2)
  try:
    with torchax.default_env():
      for _ in range(2):
        tensor = torch.arange(4.0).to("jax").requires_grad_()
        result = torch_function(tensor)
        assert_same(result, torch.tensor([4.0, 9.0]))
        result.sum().backward()
        assert_same(tensor.grad, torch.tensor([0.0, 0.0, 4.0, 6.0]))
  finally:
    del operators.all_torch_functions[torch_function]


# A file of upstream's style -----------------------------------------------------------

THEME = '''"""Operators as upstream writes them."""

from typing import Sequence

import jax.numpy as jnp
import torch

from torchax.ops import mappings
from torchax.registry import operators
{imports}

@op(torch.ops.aten.heaviside)
@op(torch.ops.torchax_test.{name}_0)
def _aten_heaviside(x, values):
  return jnp.where(x == 0, values, (x > 0).astype(x.dtype)) + 10


@op(torch.ops.torchax_test.{name}_1, is_jax_function=False, needs_env=True)
def _sum_of_drawn(x, scale: float, *, env):
  assert type(scale) is float
  return x * scale + env.j2t_iso(jnp.ones(3))


@op(torch.ops.torchax_test.{name}_2, is_view_op=True, is_jax_function=False)
def _middle(x):
  return x[1:2]


@op(torch.ops.torchax_test.{name}_3)
def _chosen(x, alpha: float):
  return x[x > alpha] if alpha > 0 else x


@register_function(torch.nn.functional.{function})
def _function(x, *args, **kwargs):
  return x + 100
'''
FROM = "from torchax.ops.{} import op\nfrom torchax.ops.jtorch import register_function"
IMPORTS = {
  "jaten": FROM.format("jaten"),
  "op_base": FROM.format("op_base"),
  "an op of its own": """

def op(*aten, **kwargs):
  def inner(func):
    for a in aten:
      operators.register_torch_dispatch_op(a, func, **kwargs)
    return func

  return inner


def register_function(torch_func):
  def inner(func):
    operators.register_torch_function_op(torch_func, func)
    return func

  return inner
""",
}
FUNCTIONS = ("logsigmoid", "softsign", "tanhshrink")


@pytest.fixture(name="restored")
def _restored():
  """The registry is afterwards what it was."""
  with registries.restored():
    yield


@pytest.mark.parametrize("imports", IMPORTS)
@pytest.mark.parametrize("place", ["a package", "among the themes"])
def test_a_file_in_upstreams_style_works_unchanged(
  define, restored, tmp_path, monkeypatch, imports, place
):
  base = list(IMPORTS).index(imports) + 3 * (place == "a package")
  name = f"a_file_of_upstreams_style_works_as_it_is_{base}"
  for index, signature in enumerate(
    (
      "(Tensor x, Tensor values) -> Tensor",
      "(Tensor x, float scale) -> Tensor",
      "(Tensor(a) x) -> Tensor(a)",
      "(Tensor x, Scalar alpha) -> Tensor",
    )
  ):
    library.define(f"{name}_{index}{signature}")
  function = FUNCTIONS[base % 3]
  text = THEME.format(name=name, imports=IMPORTS[imports], function=function)
  module = f"a_theme_of_upstream_{base}"
  (tmp_path / f"{module}.py").write_text(text)
  if place == "a package":
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="aten.heaviside already has the lowering"):
      importlib.import_module(module)
  else:
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      monkeypatch.setattr(jaten, "__path__", [*jaten.__path__, str(tmp_path)])
      importlib.import_module(f"torchax.ops.jaten.{module}")

  ops = [getattr(mylib, f"{name}_{index}") for index in range(4)]
  x = torch.arange(-1.0, 2.0)
  tensor = x.to("jax")
  assert_same(torch.heaviside(tensor, tensor), torch.heaviside(x, x) + 10)
  assert_same(ops[0](tensor, tensor), torch.heaviside(x, x) + 10)
  assert_same(ops[1](tensor, 2.0), x * 2 + 1)
  ops[2](tensor).add_(5)
  assert_same(tensor, torch.tensor([-1.0, 5.0, 1.0]))
  assert_same(ops[3](tensor, 2), torch.tensor([5.0]))
  assert_same(ops[3](tensor, -1), tensor.cpu())
  with torchax.default_env():
    called = getattr(torch.nn.functional, function)(on_jax())
  assert_same(called, ONES + 100)


DROPPED = """
import torch
from torchax.ops.jaten import op


@op(torch.ops.aten.relu)
def _aten_relu(self):
  return self * 0 + 7
"""


@pytest.mark.programs
@pytest.mark.parametrize("name", ["aaa", "zzz"])
def test_a_file_in_jaten_is_loaded(tmp_path, name):
  """It is loaded before ours, or after them."""
  shutil.copytree(PACKAGE, tmp_path / "torchax")
  (tmp_path / "torchax" / "ops" / "jaten" / f"{name}.py").write_text(DROPPED)
  code = "import torch, torchax; print(torch.relu(torch.ones(1).to('jax')).item())"
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.strip() == "7.0", done.stdout + done.stderr


# Twice --------------------------------------------------------------------------------

REGISTER = {
  "op": lambda operation, func: op(operation)(func),
  "register_torch_dispatch_op": register_torch_dispatch_op,
}


def test_a_duplicate_in_the_library_raises_and_changes_nothing(define):
  packet = define("(Tensor x) -> Tensor")
  builtin.op(packet)(lambda x: x + 1)
  with pytest.raises(ValueError, match="is_user_defined=True") as error:
    builtin.op(packet)(lambda x: x + 2)
  assert str(packet) in str(error.value)
  assert_same(packet(on_jax()), ONES + 1)


@pytest.mark.parametrize("name", REGISTER)
def test_user_lowering_replaces_a_builtin_with_a_warning(define, name):
  packet = define("(Tensor x) -> Tensor", list(REGISTER).index(name))
  builtin.op(packet)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 1)
  with pytest.warns(UserWarning, match="already has the lowering <lambda>") as warned:
    REGISTER[name](packet, lambda x: x + 2)
  assert warned[0].filename == __file__
  assert str(packet) in str(warned[0].message)
  assert_same(packet(on_jax()), ONES + 2)


@pytest.mark.parametrize("name", REGISTER)
def test_user_lowering_stays_if_the_builtin_loads_later(define, name):
  packet = define("(Tensor x) -> Tensor", list(REGISTER).index(name))
  REGISTER[name](packet, lambda x: x + 2)
  builtin.op(packet)(lambda x: x + 1)
  assert_same(packet(on_jax()), ONES + 2)


@pytest.mark.filterwarnings("error")
def test_is_user_defined_suppresses_the_warning(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: x + 1)
  register_torch_dispatch_op(packet, lambda x: x + 2, is_user_defined=True)
  assert_same(packet(on_jax()), ONES + 2)


def test_a_torch_function_is_replaced_in_the_same_way():
  def torch_function(x):
    return x

  of_library = Operator(torch_function, jnp.negative, is_builtin=True)
  try:
    operators.register(of_library)
    with pytest.raises(ValueError, match="torch_function"):
      operators.register(dataclasses.replace(of_library))
    for register in (
      functools.partial(register_torch_function_op, torch_function),
      jtorch.register_function(torch_function),
    ):
      with pytest.warns(UserWarning, match="torch_function"):
        register(jnp.abs)
      assert operators.all_torch_functions[torch_function].func is jnp.abs
  finally:
    del operators.all_torch_functions[torch_function]


def test_a_user_may_replace_a_lowering_of_the_library():
  aten_op = torch.ops.aten.erfinv
  ours = operators.all_aten_ops[aten_op]
  register_torch_dispatch_op(aten_op, lambda x: x * 0 + 7, is_user_defined=True)
  try:
    assert_same(torch.erfinv(on_jax()), torch.full((3,), 7.0))
  finally:
    operators.register(dataclasses.replace(ours, is_user_defined=True))
  assert_same(torch.erfinv(on_jax() / 2), torch.erfinv(ONES / 2))


# Later --------------------------------------------------------------------------------


def test_a_living_environment_sees_a_later_registration(define):
  packet = define("(Tensor x) -> Tensor")
  tensor = on_jax()
  with pytest.raises(OperatorNotFound, match=str(packet)):
    packet(tensor)
  op(packet)(lambda x: x + 1)
  assert_same(packet(tensor), ONES + 1)


def test_a_living_environment_sees_a_later_function():
  def torch_function(x):
    return torch.overrides.handle_torch_function(torch_function, (x,), x)

  tensor = on_jax()
  with torchax.default_env():
    register_torch_function_op(torch_function, lambda x: x + 5)
    try:
      assert_same(torch_function(tensor), ONES + 5)
    finally:
      del operators.all_torch_functions[torch_function]


def test_an_override_belongs_to_one_environment(define):
  packet = define("(Tensor x) -> Tensor")
  op(packet)(lambda x: x + 1)
  other = torchax.tensor.Environment()
  other.override_op_definition(packet, lambda x: x + 9)
  assert_same(packet(on_jax()), ONES + 1)
  assert_same(packet(other.to_xla(ONES)), ONES + 9)


def test_an_override_takes_functions_of_tensors(define):
  packet = define("(Tensor x) -> Tensor")
  env = torchax.tensor.Environment()
  env.override_op_definition(packet, lambda x: torch.cat([x, x]))
  assert_same(packet(env.to_xla(ONES)), torch.ones(6))


def test_an_override_takes_torch_functions():
  env = torchax.tensor.Environment()
  env.override_op_definition(torch.nn.functional.silu, lambda x, inplace=False: x - 7)
  with env:
    assert_same(torch.nn.functional.silu(env.to_xla(ONES)), ONES - 7)
  silu = torch.nn.functional.silu
  assert_same(silu(on_jax()), silu(ONES))


def test_an_override_seen_after_use_drops_what_was_cached():
  env = torchax.tensor.Environment()
  tensor = env.to_xla(ONES)
  assert_same(torch.neg(tensor), -ONES)
  env.override_op_definition(torch.ops.aten.neg, lambda x: x + 3)
  assert_same(torch.neg(tensor), ONES + 3)


# Finding ------------------------------------------------------------------------------


def test_an_operation_is_found_by_packet_and_by_overload():
  env = torchax.default_env()
  by_packet = env._get_op_or_decomp(torch.ops.aten.add)
  by_overload = env._get_op_or_decomp(torch.ops.aten.add.Tensor)
  assert by_packet is by_overload
  assert by_packet.func(jnp.ones(2), jnp.ones(2)).tolist() == [2.0, 2.0]


def test_decomposition_runs_without_a_lowering():
  env = torchax.default_env()
  decomposed = [
    operation
    for operation in operators.decompositions
    if isinstance(operation, torch._ops.OpOverload)
    and operation not in operators.all_aten_ops
    and operation.overloadpacket not in operators.all_aten_ops
    and not torch_compat.is_composite(operation)
  ]
  assert decomposed
  for operation in decomposed:
    found = env._get_op_or_decomp(operation)
    assert found.func is operators.decompositions[operation]
    assert found.kind is Kind.TENSORS


def test_composite_operations_use_torchs_own_decomposition():
  """Its reference in Python may take other arguments, or ask for itself."""
  composite = torch.ops.aten.nll_loss.default
  assert composite in operators.decompositions
  found = torchax.default_env()._get_op_or_decomp(composite)
  scores, target = torch.rand(4, 3), torch.arange(3).repeat(2)[:4]
  summed = found.func(scores, target, None, 2, -100)
  assert summed == torch.nn.functional.nll_loss(scores, target, reduction="sum")


def test_an_unknown_operation_is_not_found(define):
  packet = define("(Tensor x) -> Tensor")
  with pytest.raises(OperatorNotFound, match=str(packet)):
    torchax.default_env()._get_op_or_decomp(packet)


def test_upstreams_names_lead_to_the_registry():
  assert jaten.op is op
  assert jaten.all_ops is operators.all_aten_ops
  assert operators.all_aten_ops[torch.ops.aten.add].is_jax_function


# Kinds --------------------------------------------------------------------------------

KINDS = {
  (True, False, False): Kind.ARRAYS,
  (True, True, False): Kind.ENV_ARRAYS,
  (False, False, False): Kind.TENSORS,
  (False, True, False): Kind.TENSORS,
  (False, False, True): Kind.TENSORS,
  (False, True, True): Kind.TENSORS,
  (True, False, True): Kind.TENSORS,
}


@pytest.mark.parametrize("flags", KINDS, ids=str)
def test_flags_of_upstream_map_to_one_kind(flags):
  is_jax_function, needs_env, is_view_op = flags
  operator = Operator(
    None,
    None,
    is_jax_function=is_jax_function,
    needs_env=needs_env,
    is_view_op=is_view_op,
  )
  assert operator.kind is KINDS[flags]
  kept = (operator.is_jax_function, operator.needs_env, operator.is_view_op)
  assert kept == flags


def test_a_function_of_tensors_may_ask_for_the_environment():
  assert Operator(None, None, kind=Kind.TENSORS, needs_env=True).needs_env
  assert not Operator(None, None, kind=Kind.SAMPLER, needs_env=True).needs_env


@pytest.mark.parametrize("kind", Kind, ids=str)
def test_kind_sets_the_flags_of_upstream(kind):
  operator = Operator(None, None, kind=kind)
  flags = (operator.is_jax_function, operator.needs_env, operator.is_view_op)
  if kind is not Kind.SAMPLER:
    assert Kind.from_flags(*flags) is kind
  else:
    assert flags == (True, False, False)


def test_the_lowerings_of_the_library_are_built_in():
  """Others pay for a program for each number; what is carried over is in `ported`."""
  others = [
    f"{operation}: {operator.func.__module__}"
    for table in (operators.all_aten_ops, operators.all_torch_functions)
    for operation, operator in table.items()
    if operator.func.__module__.startswith("torchax.")
    and not operator.func.__module__.rpartition(".")[2].startswith("ported")
    and not (operator.is_builtin or operator.is_user_defined)
  ]
  assert not others, "take `op` from torchax.ops.builtin"


def test_every_registered_lowering_names_its_operation():
  for operation, operator in operators.all_aten_ops.items():
    assert operator.torch_op is operation
    assert callable(operator.func)
