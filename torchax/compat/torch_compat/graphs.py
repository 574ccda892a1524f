"""Graph capture by torch: Dynamo, fake tensors, `torch.export`, `make_fx`.

Used by `torchax/dynamo` and `torchax/graphs`.
"""

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator

import torch
import torch.nn.utils.stateless
from torch import fx

from torchax.compat import private
from torchax.compat.patches import patch
from torchax.errors import PrivateApiError

COMPILE = "torch.compile and torch.export of code on jax"


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
# () -> the class of modules that `torch.compile` has wrapped.
compiled_module_class = private.Later("torch._dynamo.OptimizedModule", COMPILE)
_VariableBuilder = private.Later(
  "torch._dynamo.variables.builder.VariableBuilder", COMPILE
)
# () -> the function that removes the tokens of effects from an exported program.
remove_effect_tokens = private.Later(
  "torch.export._remove_effect_tokens_pass._remove_effect_tokens",
  "torch.export of programs that check for singular matrices",
)
_STEP_COUNTS = "step counts of optimizers in torch.compile of code on jax"
_OptimizerVariable = "torch._dynamo.variables.optimizer.OptimizerVariable"
_move_step = private.Later(
  f"{_OptimizerVariable}.move_step_if_cpu", _STEP_COUNTS, instead=None
)

_CUDA_GRAPHS = "compiled optimizers that do not import Inductor"
_is_static = private.Later(
  "torch._dynamo.variables.optimizer._is_static_for_cudagraphs",
  _CUDA_GRAPHS,
  instead=None,
)

_USER_CLASSES = "users' subclasses of torch.Tensor in torch.compile of code on jax"
_builder = "torch._dynamo.variables.builder"
_subclass_of = private.Later(f"{_builder}.infer_subclass_type", _USER_CLASSES)
_properties_of = private.Later(f"{_builder}.get_specialized_props", _USER_CLASSES)

_LOOPS = "loops of torch._higher_order_ops on jax tensors"
_storages_in_dynamo = private.Later(
  "torch._dynamo.variables.higher_order_ops.get_tensor_storages", _LOOPS
)
_StorageWeakRef = private.find(
  "torch.multiprocessing.reductions.StorageWeakRef", _LOOPS
)

_BRANCHES = "torch.export of torch.cond on jax tensors"
_merge_branches = private.find(
  "torch._higher_order_ops.cond._merge_output", _BRANCHES, instead=None
)

_DEFAULT = "torch.compile on jax without `backend=`"
_Inductor = private.find("torch._TorchCompileInductorWrapper", _DEFAULT, instead=None)
_FakeTensor = private.find(
  "torch._subclasses.FakeTensor", COMPILE, instead=private.NoInstances
)
# Error of a fake tensor for reading its values; Dynamo breaks the graph there.
DataDependentOutputException = private.find(
  "torch._subclasses.fake_tensor.DataDependentOutputException",
  COMPILE,
  instead=RuntimeError,
)
# Error of a fake tensor for an operation whose shapes depend on values, says torch.
DynamicOutputShapeException = private.find(
  "torch._subclasses.fake_tensor.DynamicOutputShapeException",
  COMPILE,
  instead=RuntimeError,
)
# Error of a fake tensor of dynamic shape for an operation without a meta kernel.
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
  instead=private.NoInstances,
)


def require_capture() -> None:
  """Raise PrivateApiError if a piece for graph capture is missing in this torch."""
  private.require(COMPILE)


_reparametrize = private.find(
  "torch.nn.utils.stateless._reparametrize_module",
  "calling a module with other tensors in place of its own",
)


def reparametrize(module: torch.nn.Module, tensors: dict):
  """Return a context in which the module has the given tensors instead of its own."""
  return _reparametrize(module, tensors, tie_weights=True)


def count_of_hooks() -> int:
  """Return the number of hooks registered so far in this process."""
  return torch.utils.hooks.RemovableHandle.next_id


def trace_recurrent_layers() -> None:
  """Make Dynamo trace LSTM, GRU and RNN, in the whole process."""
  _dynamo_config().allow_rnn = True


_compile = private.find(
  "torch._C._dynamo.eval_frame._FrameAction.DEFAULT", COMPILE, instead=None
)


def keep_from_dynamo(*owners, with_calls: bool = True) -> None:
  """Make Dynamo skip the frames of some functions, and of their callees.

  After a graph break Dynamo would otherwise trace the code that runs an operation.
  Functions that Dynamo inlines into a traced caller are not affected.

  Args:
    *owners: functions; modules and classes mean all functions that they define.
    with_calls: True to skip callees too.
  """
  if None in (_skip, _compile, _strategy, _set_strategy):
    return
  of_calls = _skip if with_calls else _compile
  for owner in owners:
    for code in _code_of(owner):
      _set_strategy(code, _strategy(_skip, of_calls))


def _code_of(value) -> Iterator[types.CodeType]:
  """Yield the code objects of functions, including nested functions.

  Functions of torch, which some of them wrap, are not included.
  """
  if isinstance(value, types.FunctionType):
    if value.__globals__["__name__"].partition(".")[0] != "torch":
      yield from _nested_codes(value.__code__)
    yield from _code_of(getattr(value, "__wrapped__", None))
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


def _nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
  yield code
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      yield from _nested_codes(constant)


def keep_unused_draws() -> contextlib.AbstractContextManager:
  """Return a context in which captured graphs keep unused random operations.

  These advance the stream, as in eager mode.
  """
  return _inductor_config().patch(fallback_random=True)


def leave_frames_of(*names: str) -> None:
  """Make Dynamo break graphs at calls of these packages instead of tracing them."""
  add = _skip_frames_of()
  for name in names:
    add(name)


def lookup_backend(name: str):
  """Return the compiler function of a backend of `torch.compile`."""
  return _lookup_backend()(name)


def replace_inductor(
  is_ours: Callable, generator_class: type, class_of_user: Callable
) -> None:
  """Compile graphs by the backend "jax" where torch would use Inductor, its default.

  Args:
    is_ours: (graph, example inputs) -> True for the graphs.
    generator_class, class_of_user: see `trace_for_jax`.
  """
  if _Inductor is None:
    return
  create, run = _Inductor.__init__, _Inductor.__call__

  @functools.wraps(create)
  def __init__(self, *args, **kwargs):
    create(self, *args, **kwargs)
    with contextlib.suppress(PrivateApiError):  # the backend "jax" raises it again
      trace_for_jax(generator_class, class_of_user)

  @functools.wraps(run)
  def __call__(self, model_, inputs_, **options):
    if is_ours(model_, inputs_):
      return lookup_backend("jax")(model_, inputs_)
    return run(self, model_, inputs_, **options)

  patch(_Inductor, "__init__", __init__, _DEFAULT)
  patch(_Inductor, "__call__", __call__, _DEFAULT)


@functools.cache
def trace_for_jax(generator_class: type, class_of_user: Callable) -> None:
  """Make Dynamo trace code on jax; it traces code on other devices as before.

  Args:
    generator_class: class of generators on jax.
    class_of_user: see `trace_user_classes`.
  """
  leave_frames_of("jax", "jaxlib")
  trace_as_any_object(generator_class)
  leave_step_counts("jax")
  trace_user_classes(class_of_user)
  ask_for_cuda_graphs_on_cuda()


def trace_as_any_object(cls: type) -> None:
  """Make Dynamo trace instances as user-defined objects, like torch's own generators.

  It treats a subclass of `torch.Generator` as an opaque object without methods.
  """
  builder = _VariableBuilder()
  builder._type_dispatch()[cls] = builder.wrap_user_defined


def trace_user_classes(class_of_user: Callable) -> None:
  """Make Dynamo trace methods and `__torch_function__` of users' tensor classes.

  It takes tensors on jax for wrapper subclasses, which do not have these.

  Args:
    class_of_user: (class of a tensor) -> the user's class, `torch.Tensor` for a plain
      tensor on jax, or the class itself.
  """
  subclass_of, properties_of = _subclass_of(), _properties_of()

  def infer_subclass_type(value):
    cls = class_of_user(type(value))
    return subclass_of(value) if cls in (type(value), torch.Tensor) else cls

  def get_specialized_props(target_cls, tx, example_value, subclass_type):
    properties = properties_of(target_cls, tx, example_value, subclass_type)
    return properties | ({"class_type": subclass_type} if subclass_type else {})

  builder = private.resolve(_builder)
  for function in (infer_subclass_type, get_specialized_props):
    patch(builder, function.__name__, function, _USER_CLASSES)


def leave_step_counts(device_type: str) -> None:
  """Make Dynamo leave the step counts of optimizers on a kind of device on the CPU.

  It replaces them between the groups of a step, while the graph counts in the old ones.
  """
  original = _move_step()
  if original is None:
    return

  def move_step_if_cpu(self) -> None:
    if all(parameter.device.type != device_type for parameter in self.value.state):
      original(self)

  owner = private.resolve(_OptimizerVariable)
  patch(owner, "move_step_if_cpu", move_step_if_cpu, _STEP_COUNTS)


def ask_for_cuda_graphs_on_cuda() -> None:
  """Make Dynamo import Inductor, which takes a second, for optimizers on CUDA alone."""
  original = _is_static()
  if original is None:
    return

  def is_static(x: torch.Tensor) -> bool:
    return not x.is_cuda or original(x)

  owner = private.resolve(_OptimizerVariable.rpartition(".")[0])
  patch(owner, "_is_static_for_cudagraphs", is_static, _CUDA_GRAPHS)


def wraps_number(node: fx.Node) -> bool:
  """Return True for an input of Dynamo that is a tensor made from a number."""
  argument = node.meta.get("grapharg")
  return argument is not None and argument.pass_arg_as_tensor


@functools.cache
def compare_storages_of(cls: type) -> None:
  """Make Dynamo compare the storages of a wrapper subclass in bodies of loops.

  It does so to find aliases, and rejects wrapper subclasses. `cls` has one storage.
  """
  original = _storages_in_dynamo()

  def get_tensor_storages(tensor):
    if isinstance(tensor, cls):
      return {_StorageWeakRef(tensor._typed_storage())}
    return original(tensor)

  patch(
    private.resolve("torch._dynamo.variables.higher_order_ops"),
    "get_tensor_storages",
    get_tensor_storages,
    _LOOPS,
  )


def merge_branches_of(cls: type) -> None:
  """Make torch merge the results of branches that are fake tensors of a class.

  Args:
    cls: class of tensors that wrap a fake tensor of torch, their `_shell`.
  """
  if _merge_branches is None:
    return

  @functools.wraps(_merge_branches)
  def _merge_output(a, b, mode):
    if isinstance(a, cls) and isinstance(b, cls):
      return cls(_merge_branches(a._shell, b._shell, mode))
    return _merge_branches(a, b, mode)

  # The package shows the function `cond` in place of the module.
  owner = importlib.import_module("torch._higher_order_ops.cond")
  patch(owner, "_merge_output", _merge_output, _BRANCHES)


def is_fake(tensor) -> bool:
  """Return True for a fake tensor of torch."""
  return isinstance(tensor, _FakeTensor)


def is_fake_class(cls: type) -> bool:
  """Return True for a class of torch's fake tensors."""
  return issubclass(cls, _FakeTensor)


def is_tracing() -> bool:
  """Return True while `torch.compile` or `torch.export` traces on this thread."""
  return _TracingContext.try_get() is not None


def is_compiling() -> bool:
  """Return True while `torch.compile` compiles on this thread, its guards included."""
  return _CompileContext.current_compile_id() is not None


def is_for_backend(tensor: torch.Tensor) -> bool:
  """Return True for AOTAutograd's wrapper of a fake tensor inside `torch.compile`."""
  return is_compiling() and isinstance(tensor, _FunctionalTensor)


def to_fake(tensor: torch.Tensor) -> torch.Tensor:
  """Convert a tensor to a fake tensor of static shape in the current trace, if any."""
  context = _TracingContext.try_get()
  mode = None if context is None else context.fake_mode
  return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)


_MAKE_FX = "make_fx and torch.func.linearize of functions with jax tensors"
_recorded_classes = private.find(
  "torch.fx.experimental.proxy_tensor.HANDLED_TYPES", _MAKE_FX, instead=()
)


def record_in_make_fx(*classes: type) -> None:
  """Make `make_fx` record operations on captured tensors of these classes.

  Otherwise the class would handle them, and their results would be graph constants.
  """
  owner = private.resolve("torch.fx.experimental.proxy_tensor")
  patch(owner, "HANDLED_TYPES", (*_recorded_classes, *classes), _MAKE_FX)
