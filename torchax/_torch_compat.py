"""The only file that touches private API of torch; `test_torch_compat.py` guards it."""

import collections
import contextlib
import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Iterator

import torch
import torch.nn.utils.stateless
import torch.utils._foreach_utils
from torch.utils import _python_dispatch
from torch.utils import backend_registration as _backend_registration

_eval_frame = torch._C._dynamo.eval_frame

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
# `torch.cond` and its like in a graph: its arguments are graphs themselves.
HigherOrderOperator = torch._ops.HigherOrderOperator

# (cls, size, *, strides, storage_offset, dtype, device, requires_grad): a tensor
# without memory of its own whose operations go to `cls.__torch_dispatch__`.
make_wrapper = torch.Tensor._make_wrapper_subclass

# Among a wrapper's `_extra_dispatch_keys`, it makes `torch.autocast("jax")` see the
# wrapper, whose device is meta to torch. The key is masked where autocast is off.
AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

# Class attribute value that keeps torch functions from calling into Python.
disabled_torch_function = torch._C._disabled_torch_function_impl

# Context managers: operations run as if the tensors were plain; no modes are active.
without_dispatch = torch._C._DisableTorchDispatch
without_modes = _python_dispatch._disable_current_modes

# Context manager: `__torch_function__` of classes is not asked.
without_function_overrides = torch._C.DisableTorchFunctionSubclass

# (tensor, bool): marks a wrapper as the conjugate or the negative of what torch
# believes to be its memory, so that `resolve_conj`, `is_conj`, `imag` act as on the
# CPU.
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg

# builtin functions whose public names are re-exports
linear = torch._C._nn.linear
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
one_hot = torch._C._nn.one_hot
lstm, gru = torch._VF.lstm, torch._VF.gru
rnn_tanh, rnn_relu = torch._VF.rnn_tanh, torch._VF.rnn_relu

BACKEND = "jax"


class DispatchMode(_python_dispatch.TorchDispatchMode):
  """A dispatch mode that Dynamo neither wraps, which costs 3 us an operation, nor
  takes as a reason to leave code uncompiled."""

  # Operations that take graphs, such as `torch.cond`, come to it like others.
  supports_higher_order_operators = True

  @classmethod
  def _should_skip_dynamo(cls) -> bool:
    return False

  @classmethod
  def ignore_compile_internals(cls) -> bool:
    return True


class _DeviceGuard(torch._C._acc.DeviceGuard):
  """Tells torch that there is one jax device and that switching to it is a no-op."""

  def type_(self):
    return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
  """Tells torch that the backend exists, without creating anything on a device."""

  def is_available(self) -> bool:
    return True

  def has_primary_context(self, device_index: int) -> bool:
    return False

  def is_built(self) -> bool:
    return True


# torch keeps no reference of its own to these objects.
_hooks, _guard = _Hooks(), _DeviceGuard()
_kernels = torch.library.Library("aten", "IMPL")


def register_backend(device_module) -> None:
  """Gives torch's device for out-of-tree backends the name "jax".

  Raises:
    RuntimeError: another backend of this process has taken that device.
  """
  taken = torch._C._get_privateuse1_backend_name()
  if taken not in ("privateuseone", BACKEND):
    raise RuntimeError(
      f"torch has one device for out-of-tree backends, and {taken!r} has taken it. "
      "Import torchax in a process without that backend."
    )
  if taken == BACKEND and hasattr(torch, BACKEND):
    return
  torch.utils.rename_privateuse1_backend(BACKEND)
  torch._register_device_module(BACKEND, device_module)
  _backend_registration.generate_methods_for_privateuse1_backend(for_storage=False)
  torch._C._acc.register_python_privateuseone_hook(_hooks)
  torch._C._acc.register_python_privateuseone_device_guard(_guard)


def register_kernel(name: str, kernel, key: str = "PrivateUse1") -> None:
  """Runs `kernel` for `aten::name` when called with device="jax" and no jax tensor."""
  _kernels.impl(name, kernel, key)


_fallbacks = torch.library.Library("_", "IMPL")
# What has no kernel for autocast runs as it is.
_fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


@functools.cache
def _autocast_kernels(namespace: str) -> torch.library.Library:
  return torch.library.Library(namespace, "IMPL", "AutocastPrivateUse1")


def register_autocast_kernel(overload, kernel) -> None:
  """Runs `kernel(*args, **kwargs)` for an overload where autocast for jax is on.

  It stands above autograd. What it calls is to be called `without_autocast`.
  """
  _autocast_kernels(overload.namespace).impl(overload, kernel)


def without_autocast():
  """A context in which autocast for jax is off."""
  return torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS)


_group_tensors = torch._C._group_tensors_by_device_and_dtype


def _group_tensors_by_device_and_dtype(tensorlistlist, with_indices=False):
  """torch's groups by (device, dtype), with the device that Python sees.

  C++ sees that of a wrapper, meta, which torch takes as a reason against foreach.
  """
  groups = _group_tensors(tensorlistlist, with_indices)
  return {
    (lists[0][0].device if device.type == "meta" else device, dtype): (lists, indices)
    for (device, dtype), (lists, indices) in groups.items()
  }


def support_foreach(*classes: type) -> None:
  """Lets optimizers and `torch.nn.utils` take tensors of these classes for foreach."""
  # `torch.optim` hides its module of this name.
  for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
    supported = importlib.import_module(name)._foreach_supported_types
    supported += [cls for cls in classes if cls not in supported]
  torch._C._group_tensors_by_device_and_dtype = _group_tensors_by_device_and_dtype


def dispatch_is_excluded() -> bool:
  """True inside torch functions that keep Python from seeing their operations.

  `torch.tensor` does this: its copy into the new tensor would be lost.
  """
  return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def decomposition_table() -> dict:
  """torch's own decompositions, by overload."""
  return torch._decomp.decomposition_table


def aten_packets() -> list:
  """The packets of all operations of ATen, in the order of their names."""
  names = torch._C._dispatch_get_all_op_names()
  found = {name[6:].partition(".")[0] for name in names if name.startswith("aten::")}
  # Some are not reachable from Python.
  return [
    getattr(torch.ops.aten, n) for n in sorted(found) if hasattr(torch.ops.aten, n)
  ]


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def is_composite(func) -> bool:
  """True for an overload that torch itself makes of others, such as `reshape`."""
  if not isinstance(func, OpOverload):
    return False
  name = func.name()
  # Overloads that exist for TorchScript alone have no kernels to ask for.
  return torch._C._dispatch_has_kernel(name) and (
    torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
  )


def composite_kernel(func: OpOverload):
  """The C++ function that makes an overload for which `is_composite` is true.

  `func.decompose` would prefer one of Python's, which may draw or compute otherwise.
  """
  return functools.partial(func._op_dk, _COMPOSITE)


def composite_decomposition(func):
  """The function that runs an overload by torch's own composite kernel, or None."""
  if isinstance(func, OpOverload) and func.namespace == "prims":
    # torch's reference implementations are written with these.
    return getattr(func, "impl_aten", None)
  if is_composite(func):
    return composite_kernel(func)
  if isinstance(func, OpOverload) and func._can_decompose():
    return func.decompose
  return None


# Context manager: torch functions inside run as they are; dispatch still sees their
# operations.
without_function_modes = torch._C.DisableTorchFunction


dispatch_depth = torch._C._len_torch_dispatch_stack


def forward_ad_is_on() -> bool:
  """True inside `torch.autograd.forward_ad.dual_level`."""
  return torch.autograd.forward_ad._current_level >= 0


_innermost_transform = torch._C._functorch.peek_interpreter_stack


def is_transforming() -> bool:
  """True inside a transform of `torch.func` or a level of forward-mode AD.

  Tensors may be wrapped then, or carry a tangent that `requires_grad` does not show.
  """
  return _innermost_transform() is not None or forward_ad_is_on()


def are_top_modes(dispatch_mode, function_mode) -> bool:
  """True when both modes are the innermost of their kind on this thread."""
  functions = torch._C._len_torch_function_stack()
  dispatches = torch._C._len_torch_dispatch_stack()
  return (
    functions > 0
    and dispatches > 0
    and torch._C._get_function_stack_at(functions - 1) is function_mode
    and torch._C._get_dispatch_stack_at(dispatches - 1) is dispatch_mode
  )


def has_saved_tensors_hooks() -> bool:
  """True where somebody packs what autograd saves: a checkpoint, an offloader."""
  return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def in_backward() -> bool:
  """True while this thread runs a backward pass."""
  return torch._C._current_graph_task_id() != -1


def is_top_dispatch_mode(mode) -> bool:
  """True when it is the innermost dispatch mode on this thread."""
  depth = dispatch_depth()
  return depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is mode


def reparametrized(module: torch.nn.Module, tensors: dict):
  """A context in which the module holds the given tensors in place of its own."""
  return torch.nn.utils.stateless._reparametrize_module(
    module, tensors, tie_weights=True
  )


parse_to = torch._C._nn._parse_to


def set_metadata(tensor: torch.Tensor, source: torch.Tensor) -> None:
  """Gives `tensor` the shape, strides and dtype of `source`, keeping its identity."""
  # The setter asks an operation that wrappers would send back to Python.
  with without_dispatch():
    torch.Tensor.data.__set__(tensor, source)


_swap_tensors = torch.utils.swap_tensors


def watch_swaps(cls: type, notice) -> None:
  """Calls `notice()` when torch has swapped tensors of which one is of this class.

  That is how `Module.to` and `load_state_dict` change a tensor and keep its identity.
  Where the graph of an earlier forward pass holds a tensor, torch lets no swap happen;
  for this class it does, and a backward pass through that graph raises.
  """

  @functools.wraps(_swap_tensors)
  def swap_tensors(t1, t2):
    if not (isinstance(t1, cls) or isinstance(t2, cls)):
      _swap_tensors(t1, t2)
      return
    if type(t1) is type(t2) and (_has_references(t1) or _has_references(t2)):
      # Such as Dynamo's guards: the tensor stays, and shows the other one's numbers.
      t1.data, t2.data = t2.data, t1.data
    elif any(map(_is_held_by_a_graph, (t1, t2))):
      _swap_held(t1, t2)
    else:
      _swap_tensors(t1, t2)
    notice()

  torch.utils.swap_tensors = swap_tensors


def _has_references(tensor) -> bool:
  return bool(weakref.getweakrefs(tensor))


def _is_held_by_a_graph(tensor) -> bool:
  # One more than the name that Python has for it is its node of the graph.
  return tensor.is_leaf and tensor._use_count() > 1 + tensor.requires_grad


def _swap_held(t1, t2) -> None:
  """`torch.utils.swap_tensors` of leaves that the graph of autograd holds as well.

  Raises:
    RuntimeError: a weak reference to one of them would then be to the other one.
  """
  if _has_references(t1) or _has_references(t2):
    raise RuntimeError(
      "Tensors with weak references cannot be swapped. Move the module to its device "
      "before making what refers to its parameters."
    )
  for tensor in (t1, t2):
    if tensor.is_leaf and tensor.requires_grad:
      accumulate = torch.autograd.graph.get_gradient_edge(tensor).node
      accumulate.register_prehook(_refuse_swapped)
  t1.__class__, t2.__class__ = t2.__class__, t1.__class__
  t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
  torch._C._swap_tensor_impl(t1, t2)


def _refuse_swapped(gradients):
  raise RuntimeError(
    "A backward pass has reached a tensor that was moved to another device or dtype "
    "after the forward pass, as `module.to` does. Move it before, or run the forward "
    "pass again."
  )


def mark_as_parameter(tensor: torch.Tensor) -> torch.Tensor:
  """Makes `isinstance(tensor, torch.nn.Parameter)` true."""
  tensor._is_param = True
  return tensor


def is_parameter(tensor: torch.Tensor) -> bool:
  """True for what `torch.nn.Parameter` has made of a tensor."""
  return isinstance(tensor, torch.nn.Parameter)


def trace_recurrent_layers() -> None:
  """Has Dynamo take LSTM, GRU and RNN into its graphs, in the whole process."""
  torch._dynamo.config.allow_rnn = True


def keep_from_dynamo(*owners) -> None:
  """Has Dynamo leave calls of some functions, and what these call, as they are.

  After a graph break it would otherwise trace the code that runs an operation. Inside
  a graph, where it traces a caller, nothing changes.

  Args:
    *owners: functions; modules and classes for all that they define.
  """
  skip = _eval_frame._FrameAction.SKIP
  for owner in owners:
    for code in _code_of(owner):
      strategy = _eval_frame._FrameExecStrategy(skip, skip)
      _eval_frame.set_code_exec_strategy(code, strategy)


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
  # Not with `import torch`: that would take a second more.
  config = importlib.import_module("torch._inductor.config")
  return config.patch(fallback_random=True)


def leave_frames_of(*names: str) -> None:
  """Has Dynamo break graphs at calls of these packages, not trace into them."""
  trace_rules = importlib.import_module("torch._dynamo.trace_rules")
  for name in names:
    trace_rules.add(name)


def compiled_module_class() -> type:
  """The class of a module that `torch.compile` has wrapped."""
  return torch._dynamo.OptimizedModule


# What a fake tensor raises where numbers are asked for: Dynamo breaks the graph there.
DataDependentOutputException = (
  torch._subclasses.fake_tensor.DataDependentOutputException
)


def is_fake(tensor) -> bool:
  """True for a tensor without numbers that a tracer of torch has made."""
  return isinstance(tensor, torch._subclasses.FakeTensor)


def fake_mode_for_export():
  """A mode whose fake tensors `torch.export` takes for arguments and parameters."""
  # Loading it takes as long as loading torch: only who exports pays.
  shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv()
  return torch._subclasses.FakeTensorMode(
    shape_env=shapes, allow_non_fake_inputs=True, export=True
  )


def fake_tensor(mode, shell: torch.Tensor, device: torch.device) -> torch.Tensor:
  """A tensor without numbers on any device; autocast for the device sees it.

  Args:
    mode: see `fake_mode_for_export`.
    shell: a tensor on meta, with shape, strides and dtype.
    device: that the tensor seems to be on.
  """
  return torch._subclasses.FakeTensor(mode, shell, device)


def count_of_hooks() -> int:
  """A number that grows with every hook that is registered in this process."""
  return torch.utils.hooks.RemovableHandle.next_id


def is_tracing() -> bool:
  """True while `torch.compile` or `torch.export` makes a graph on this thread."""
  return torch._guards.TracingContext.try_get() is not None


# What a fake tensor of dynamic shape raises for an operation without a meta kernel.
UnsupportedOperatorException = (
  torch._subclasses.fake_tensor.UnsupportedOperatorException
)


# (func, args, kwargs, out) -> out, with the memory and the identity of the arguments
# where the operation's schema says so.
correct_aliasing = _python_dispatch.return_and_correct_aliasing


def faked(tensor: torch.Tensor) -> torch.Tensor:
  """A tensor as the tracing of `torch.compile` in progress sees an input, of one shape.

  Outside of it, the tensor.
  """
  context = torch._guards.TracingContext.try_get()
  mode = None if context is None else context.fake_mode
  return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)


# Files ------------------------------------------------------------------------------


def in_files_format(
  storage: torch.TypedStorage, tensor: torch.Tensor, layout: tuple, metadata: dict
) -> tuple:
  """(function, arguments): how torch's files say to make a plain tensor.

  Args:
    storage: of the file.
    tensor: with the dtype and `requires_grad`.
    layout: offset, size and strides.
    metadata: marks such as {"conj": True}.
  """
  args = (storage, *layout, tensor.requires_grad, collections.OrderedDict())
  if tensor.dtype in torch.storage._new_dtypes():
    return torch._utils._rebuild_tensor_v3, (*args, tensor.dtype, metadata)
  return torch._utils._rebuild_tensor_v2, ((*args, metadata) if metadata else args)


def parameter_in_files_format(
  data: torch.Tensor, requires_grad: bool, state: dict
) -> tuple:
  """(function, arguments): how torch's files say to make a parameter.

  `state` has the attributes that a user has given to it.
  """
  args = (data, requires_grad, collections.OrderedDict())
  if state:
    return torch._utils._rebuild_parameter_with_state, (*args, state)
  return torch._utils._rebuild_parameter, args


def with_state_in_files_format(made: tuple, state: dict) -> tuple:
  """(function, arguments): a plain tensor as `in_files_format` with attributes."""
  function, args = made
  return torch._tensor._rebuild_from_type_v2, (function, torch.Tensor, args, state)


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
  """The dtype that a file gives to the storage of a tensor."""
  return torch.uint8 if dtype in torch.storage._new_dtypes() else dtype


class TypedStorage(torch.TypedStorage):
  """A base for storages that are files' own to `torch.save`, not to `pickle`."""

  def __new__(cls, *args, **kwargs):
    return object.__new__(cls)

  def __init__(self, untyped: torch.UntypedStorage, dtype: torch.dtype):
    super().__init__(wrap_storage=untyped, dtype=dtype, _internal=True)


def typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype):
  """`torch.TypedStorage` of a storage, without the warning that it is going away."""
  return torch.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def write_storage(storage: torch.UntypedStorage, *args) -> None:
  """Writes a storage of the CPU to a file of torch's older format."""
  storage._write_file(*args)


def read_storage(storage: torch.UntypedStorage, *args) -> None:
  """Fills a storage of the CPU from a file of torch's older format."""
  storage._set_from_file(*args)


def is_read_later(storage: torch.UntypedStorage) -> bool:
  """True for one whose bytes `torch.load` reads after it has made the tensors."""
  return getattr(storage, "_torch_load_uninitialized", False)


def has_map_location() -> bool:
  """True inside a `torch.load` that was told where the tensors go."""
  local = torch.serialization._serialization_tls
  return getattr(local, "map_location", None) is not None


def watch_marks(cls: type, mark) -> None:
  """Calls `mark(tensor, metadata)` when torch loads a marked tensor of a class.

  The marks are those of `in_files_format`; torch itself would mark the wrapper alone.
  """
  set_marks = torch._utils.set_tensor_metadata

  @functools.wraps(set_marks)
  def set_tensor_metadata(tensor, metadata):
    (mark if isinstance(tensor, cls) else set_marks)(tensor, metadata)

  torch._utils.set_tensor_metadata = set_tensor_metadata


def watch_moves_of_storages(move) -> None:
  """Has `storage.to(device="jax")` and `storage.jax()` call `move(storage, device)`."""
  to = torch.UntypedStorage.to

  @functools.wraps(to)
  def to_device(self, *, device, non_blocking=False):
    if torch.device(device).type == BACKEND:
      return move(self, torch.device(device))
    return to(self, device=device, non_blocking=non_blocking)

  def to_jax(self, device=None):
    """A copy of the storage on a jax device."""
    return move(self, torch.device(BACKEND if device is None else device))

  torch.UntypedStorage.to = to_device
  torch.UntypedStorage.jax = to_jax
