"""Graphs that torch captures: Dynamo, fake tensors, `torch.export`, hooks."""

import contextlib
import inspect
import types
from collections.abc import Iterator

import torch
import torch.nn.utils.stateless

from torchax.compat import private
from torchax.compat.patches import patch

COMPILE = "torch.compile and torch.export of code on jax"


class _Nothing:
  """A class that has no instances."""


_skip = private.find(
  "torch._C._dynamo.eval_frame._FrameAction.SKIP", COMPILE, instead=None
)
_strategy = private.find(
  "torch._C._dynamo.eval_frame._FrameExecStrategy", COMPILE, instead=None
)
_set_strategy = private.find(
  "torch._C._dynamo.eval_frame.set_code_exec_strategy", COMPILE, instead=None
)
# These take a second or more to import.
_inductor_config = private.Later("torch._inductor.config", COMPILE)
_dynamo_config = private.Later("torch._dynamo.config", COMPILE)
_lookup_backend = private.Later("torch._dynamo.lookup_backend", COMPILE)
_skip_frames_of = private.Later("torch._dynamo.trace_rules.add", COMPILE)
_OptimizedModule = private.Later("torch._dynamo.OptimizedModule", COMPILE)
_VariableBuilder = private.Later(
  "torch._dynamo.variables.builder.VariableBuilder", COMPILE
)

_FakeTensor = private.find("torch._subclasses.FakeTensor", COMPILE, instead=_Nothing)
# What a fake tensor raises where numbers are asked for: Dynamo breaks the graph there.
DataDependentOutputException = private.find(
  "torch._subclasses.fake_tensor.DataDependentOutputException",
  COMPILE,
  instead=RuntimeError,
)
# What a fake tensor of dynamic shape raises for an operation without a meta kernel.
UnsupportedOperatorException = private.find(
  "torch._subclasses.fake_tensor.UnsupportedOperatorException",
  COMPILE,
  instead=RuntimeError,
)


class _NoContext:
  @staticmethod
  def try_get():
    return None

  @staticmethod
  def current_compile_id():
    return None


_TracingContext = private.find(
  "torch._guards.TracingContext", COMPILE, instead=_NoContext
)
_WRONG_BACKEND = (
  "the error of another backend of torch.compile that is given jax tensors"
)
_CompileContext = private.find(
  "torch._guards.CompileContext", _WRONG_BACKEND, instead=_NoContext
)
_FunctionalTensor = private.find(
  "torch._subclasses.functional_tensor.FunctionalTensor",
  _WRONG_BACKEND,
  instead=_Nothing,
)


def require_capture() -> None:
  """Raises PrivateApiError where graphs of torch cannot be captured as they are."""
  private.require(COMPILE)


_reparametrize = private.find(
  "torch.nn.utils.stateless._reparametrize_module",
  "calling a module with other tensors in place of its own",
)


def reparametrized(module: torch.nn.Module, tensors: dict):
  """A context in which the module holds the given tensors in place of its own."""
  return _reparametrize(module, tensors, tie_weights=True)


def count_of_hooks() -> int:
  """A number that grows with every hook that is registered in this process."""
  return torch.utils.hooks.RemovableHandle.next_id


def trace_recurrent_layers() -> None:
  """Has Dynamo take LSTM, GRU and RNN into its graphs, in the whole process."""
  _dynamo_config().allow_rnn = True


_compile = private.find(
  "torch._C._dynamo.eval_frame._FrameAction.DEFAULT", COMPILE, instead=None
)


def keep_from_dynamo(*owners, with_calls: bool = True) -> None:
  """Has Dynamo leave calls of some functions, and what these call, as they are.

  After a graph break it would otherwise trace the code that runs an operation. Inside
  a graph, where it traces a caller, nothing changes.

  Args:
    *owners: functions; modules and classes for all that they define.
    with_calls: what they call is left as well.
  """
  if None in (_skip, _compile, _strategy, _set_strategy):
    return
  of_calls = _skip if with_calls else _compile
  for owner in owners:
    for code in _code_of(owner):
      _set_strategy(code, _strategy(_skip, of_calls))


def _code_of(value) -> Iterator[types.CodeType]:
  """The code of functions, inner ones included."""
  if isinstance(value, types.FunctionType):
    yield from _nested(inspect.unwrap(value).__code__)
  elif isinstance(value, property):
    for accessor in (value.fget, value.fset):
      yield from _code_of(accessor)
  elif isinstance(value, staticmethod | classmethod):
    yield from _code_of(value.__func__)
  elif isinstance(value, types.ModuleType):
    for member in vars(value).values():
      if getattr(member, "__module__", None) == value.__name__:
        yield from _code_of(member)
  elif isinstance(value, type):
    for member in vars(value).values():
      if not isinstance(member, type):
        yield from _code_of(member)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
  yield code
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _nested(constant)


def keeping_draws() -> contextlib.AbstractContextManager:
  """Graphs that are captured inside keep random operations whose result is not used.

  They move the stream, as they do eagerly.
  """
  return _inductor_config().patch(fallback_random=True)


def leave_frames_of(*names: str) -> None:
  """Has Dynamo break graphs at calls of these packages, not trace into them."""
  add = _skip_frames_of()
  for name in names:
    add(name)


def backend_named(name: str):
  """The function that compiles for a backend of `torch.compile`."""
  return _lookup_backend()(name)


def trace_as_any_object(cls: type) -> None:
  """Has Dynamo treat instances as it treats torch's own generators.

  It takes a subclass of theirs for an opaque object that has no methods.
  """
  builder = _VariableBuilder()
  builder._type_dispatch()[cls] = builder.wrap_user_defined


def compiled_module_class() -> type:
  """The class of a module that `torch.compile` has wrapped."""
  return _OptimizedModule()


def is_fake(tensor) -> bool:
  """True for a tensor without numbers that a tracer of torch has made."""
  return isinstance(tensor, _FakeTensor)


def is_tracing() -> bool:
  """True while `torch.compile` or `torch.export` makes a graph on this thread."""
  return _TracingContext.try_get() is not None


def is_for_backend(tensor: torch.Tensor) -> bool:
  """True for what AOTAutograd makes of a fake tensor inside of `torch.compile`."""
  is_compiling = _CompileContext.current_compile_id() is not None
  return is_compiling and isinstance(tensor, _FunctionalTensor)


def faked(tensor: torch.Tensor) -> torch.Tensor:
  """A tensor as the tracing of `torch.compile` in progress sees an input, of one shape.

  Outside of it, the tensor.
  """
  context = _TracingContext.try_get()
  mode = None if context is None else context.fake_mode
  return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)


is_tracing_for_torchscript = private.find(
  "torch._C._is_tracing", "torch.jit.trace", instead=torch.jit.is_tracing
)

_MAKE_FX = "make_fx and torch.func.linearize of functions with jax tensors"
_recorded_classes = private.find(
  "torch.fx.experimental.proxy_tensor.HANDLED_TYPES", _MAKE_FX, instead=()
)


def record_in_make_fx(*classes: type) -> None:
  """Has `make_fx` record operations on tensors of these classes that it was not given.

  It would leave them to the class, and their results would be constants of the graph.
  """
  owner = private.walk("torch.fx.experimental.proxy_tensor")
  patch(owner, "HANDLED_TYPES", (*_recorded_classes, *classes), _MAKE_FX)
