"""The pipeline of one operation: find its plan, unwrap, call, wrap.

A `Plan` is made once per overload. It sorts the arguments into operands (arrays and
Python numbers) and a static key (everything else, and the view chains), and calls the
lowering compiled for that key, so that an operation with its views, its promotion and
its random draw is one XLA computation. Under a JAX trace the lowering is called as it
is. In-place, `out=` and view forms are derived from torch's schemas.
"""

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax import _jax_compat, _torch_compat
from torchax.errors import MixedDeviceError, MutationError, OperatorNotFound
from torchax.ops import mappings, ops_registry
from torchax.ops.ops_registry import Kind, Operator
from torchax.ops.schema import functional_form, is_in_place, schema_of
from torchax.rng import carry, scope
from torchax.rng import state as rng_state
from torchax.storage import active as _active
from torchax.tensor import Tensor, new_tensor
from torchax.view import View
from torchax.view_info import WHOLE, Chain

aten = torch.ops.aten

# Arguments about where and how a tensor lies; lowerings do not take them.
_IGNORED = frozenset(
  {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
)
_ArrayImpl = _jax_compat.ArrayImpl
_default_dtype = torch.get_default_dtype
_NUMBERS = frozenset({bool, int, float, complex})
_INT32 = range(-(2**31), 2**31)


class _Marker:
  """A place in a static key that an operand or a container fills."""

  __slots__ = ("name",)

  def __init__(self, name: str):
    self.name = name

  def __repr__(self):
    return self.name


_NUMBER, _LIST, _TUPLE = _Marker("number"), _Marker("list"), _Marker("tuple")


class StaticNumber:
  """A Python number as part of a static key; 1, 1.0 and True differ, nan is itself."""

  __slots__ = ("value", "_identity")

  def __init__(self, value):
    self.value = value
    self._identity = (type(value), repr(value))

  def __hash__(self):
    return hash(self._identity)

  def __eq__(self, other):
    return type(other) is StaticNumber and self._identity == other._identity


_static_numbers: dict[tuple, StaticNumber] = {}


def _static(value) -> StaticNumber:
  """The interned static number: making one takes longer than the look-up."""
  if value == 0 or value != value:  # 0.0 equals -0.0, nan equals nothing
    return StaticNumber(value)
  known = _static_numbers.get((type(value), value))
  if known is None:
    known = _static_numbers[type(value), value] = StaticNumber(value)
  return known


class _NumberArrays:
  """Python numbers as weakly typed arrays, which `jax.jit` takes in far quicker.

  A number gets its array the second time it is seen, so that ones that change on
  every call (a step size) cost no more than before.
  """

  LIMIT = 4096

  def __init__(self):
    self._arrays: dict[tuple, Any] = {}

  def __call__(self, number):
    if number == 0 or number != number:
      return number
    key = (type(number), number, jax.config.jax_enable_x64)
    array = self._arrays.get(key)
    if array is not None:
      return array
    if key not in self._arrays:
      if len(self._arrays) >= self.LIMIT:
        self._arrays.clear()
      self._arrays[key] = None
      return number
    with jax.ensure_compile_time_eval():
      array = self._arrays[key] = jnp.asarray(number)
    return array


_number_arrays = _NumberArrays()


class Flattener:
  """Sorts arguments into operands and a static key, and puts them together again."""

  def __init__(self, name: str, env, dynamic=frozenset(), names=(), cpu_ok=False):
    self.keeps_tensors = False  # operands are tensors, views included, not arrays
    self._name = name
    self._env = env
    self._dynamic = dynamic
    # Functions caught above ATen have no schema; all their numbers are static.
    self._dynamic_places = [n in dynamic for n in names] or itertools.repeat(False)
    self._cpu_ok = cpu_ok

  def flatten(self, args, kwargs) -> tuple[list, tuple]:
    """Operands, and the key from which `rebuild` restores the arguments.

    The key starts with the number of positional arguments and torch's default dtype,
    which decides what a factory or a promotion gives.
    """
    operands: list[Any] = []
    key: list[Any] = [len(args), _default_dtype()]
    boundary = _active.boundary
    for arg, dynamic in zip(args, self._dynamic_places):
      cls = type(arg)
      if (cls is Tensor or cls is View) and not self.keeps_tensors:
        storage = arg._storage
        operands.append(
          storage.array if boundary is None else boundary.read(storage, arg)
        )
        key.append(arg._chain)
      else:
        key.append(self._flatten_other(arg, cls, dynamic, operands))
    if kwargs:
      for name, arg in kwargs.items():
        if name not in _IGNORED:
          key.append(name)
          key.append(
            self._flatten_other(arg, type(arg), name in self._dynamic, operands)
          )
    return operands, tuple(key)

  def _flatten_other(self, arg, cls, dynamic: bool, operands: list):
    if cls in _NUMBERS:
      if dynamic and (cls is not int or arg in _INT32):
        operands.append(arg if _jax_compat.is_staging() else _number_arrays(arg))
        return _NUMBER
      return _static(arg) if cls is float or dynamic else arg
    if cls is list or cls is tuple:
      marker = _LIST if cls is list else _TUPLE
      return (
        marker,
        *[self._flatten_other(a, type(a), dynamic, operands) for a in arg],
      )
    if isinstance(arg, torch.Tensor):
      return self._flatten_tensor(arg, operands)
    if isinstance(arg, torch.Size):
      return (_TUPLE, *arg)
    if isinstance(arg, jax.Array):
      operands.append(new_tensor(arg, self._env) if self.keeps_tensors else arg)
      return WHOLE
    return arg

  def _flatten_tensor(self, tensor: torch.Tensor, operands: list) -> Chain:
    if self.keeps_tensors:
      operands.append(
        tensor
        if isinstance(tensor, Tensor)
        else new_tensor(self._env.admit(tensor, self._name, self._cpu_ok), self._env)
      )
      return WHOLE
    if isinstance(tensor, Tensor):
      operands.append(tensor._storage.read(tensor))
      return tensor._chain
    operands.append(self._env.admit(tensor, self._name, self._cpu_ok))
    return WHOLE

  def rebuild(self, key: tuple, operands) -> tuple[list, dict]:
    """The arguments of a lowering: views are read, lists of numbers become tuples."""
    remaining = iter(operands)
    end = 2 + key[0]
    args = [_restore(part, remaining) for part in key[2:end]]
    named = iter(key[end:])
    return args, {name: _restore(part, remaining) for name, part in zip(named, named)}


def _restore(part, remaining):
  if isinstance(part, Chain):
    return part.read(next(remaining))
  if part is _NUMBER:
    return next(remaining)
  if type(part) is StaticNumber:
    return part.value
  if type(part) is tuple:
    values = [_restore(inner, remaining) for inner in part[1:]]
    return values if part[0] is _LIST and _holds_arrays(values) else tuple(values)
  return part


def _holds_arrays(values: list) -> bool:
  return any(isinstance(value, jax.Array) for value in values)


def _strong(value):
  """Results of Python numbers alone lose their weak type: torch has none."""
  if getattr(value, "weak_type", False):
    return lax.convert_element_type(value, value.dtype)
  return value


class Plan:
  """Runs one functional operation by its lowering on arrays."""

  def __init__(self, op, operator: Operator, env):
    self.op = op
    self.operator = operator
    self.env = env
    self.name = str(op)
    schema = schema_of(op) if isinstance(op, _torch_compat.OpOverload) else None
    dynamic = schema.dynamic - set(operator.static) if schema else frozenset()
    names = schema.names if schema else ()
    # torch takes CPU indices beside tensors of any device.
    cpu_ok = self.name.startswith(("aten.index", "aten._index", "aten._unsafe_index"))
    self.flattener = Flattener(self.name, env, dynamic, names, cpu_ok)
    self.is_sampler = operator.kind is Kind.SAMPLER
    self._compiled: dict[tuple, Callable] = {}
    packet = self.name.removeprefix("aten.").partition(".")[0]
    self._gives_indices = packet in _INDEX_OPERATIONS
    takes_device = schema is not None and "device" in schema.names
    # The result is not always simply an array on jax.
    self._is_special = self._gives_indices or takes_device
    # Nothing to check, to draw or to decide before the compiled function is called.
    self._is_simple = (
      operator.check is None and operator.compiled is True and not self.is_sampler
    )

  def __call__(self, args, kwargs):
    operands, key = self.flattener.flatten(args, kwargs)
    try:
      if self._is_simple and not _jax_compat.is_staging():
        compiled = self._compiled.get(key) or self._compile(key)
        result = compiled(*operands)
      else:
        result = self.run(args, kwargs, operands, key)
    except (TypeError, ValueError):
      raise_as_torch(self.op, args, kwargs)
      raise
    if type(result) is _ArrayImpl and not self._is_special:
      return new_tensor(result, self.env)
    if kwargs and _is_cpu(kwargs.get("device")):
      return _map(result, lambda array: mappings.j2t(array))
    return self._wrap(result)

  def run(self, args, kwargs, operands, key, write=None):
    """Arrays out of operands.

    Args:
      args, kwargs: torch's arguments, for checks.
      operands, key: what `flatten` made of them.
      write: None, or (chain, dtype, shape) of a tensor that the result is written to;
        its base is the first operand then, and the new base is returned.
    """
    check = self.operator.check
    if check is not None:
      check(*args, **(kwargs or {}))
    if not self.is_sampler:
      return self._execute(args, kwargs, operands, key, write)
    generator = kwargs.get("generator") if kwargs else None
    if generator is not None:
      draw = carry.generator_operands(generator, self.name)
      return self._execute(args, kwargs, [*draw, *operands], key, write)
    stream = scope.current()
    draw = stream.peek(self.name)
    result = self._execute(args, kwargs, [*draw, *operands], key, write)
    stream.advance(1)
    return result

  def _execute(self, args, kwargs, operands, key, write):
    may_compile = self.operator.compiled
    if callable(may_compile):
      may_compile = may_compile(args, kwargs or {})
    if not may_compile or _jax_compat.is_staging():
      return self._call(key, write, operands)
    cache_key = key if write is None else (write, key)
    compiled = self._compiled.get(cache_key) or self._compile(key, write)
    return compiled(*operands)

  def _compile(self, key, write=None) -> Callable:
    def compiled(*operands):
      return self._call(key, write, operands)

    compiled.__name__ = self.name.replace(".", "_")
    jitted = jax.jit(compiled)
    self._compiled[key if write is None else (write, key)] = jitted
    return jitted

  def _call(self, key, write, operands):
    if self.is_sampler:
      rng_key, count, *operands = operands
    if write is not None:
      base, *operands = operands
    args, kwargs = self.flattener.rebuild(key, operands)
    if self.is_sampler:
      args.insert(0, rng_state.fold_in(rng_key, count))
    result = self._lower(args, kwargs)
    if write is None:
      return jax.tree.map(_strong, result)
    return _written_base(base, write, result)

  def _lower(self, args, kwargs):
    if self.operator.kind is Kind.ENV_ARRAYS:
      return self.operator.func(*args, **kwargs, env=self.env)
    return self.operator.func(*args, **kwargs)

  def _wrap(self, result):
    if type(result) is _ArrayImpl or isinstance(result, jax.Array):
      if self._gives_indices and self.env.config.use_int32_for_index:
        result = result.astype(jnp.int32) if result.dtype == jnp.int64 else result
      return new_tensor(result, self.env)
    if isinstance(result, tuple):
      return tuple([self._wrap(value) for value in result])
    if isinstance(result, list):
      return [self._wrap(value) for value in result]
    return result


# Operations whose integer results are places; `Configuration.use_int32_for_index`.
_INDEX_OPERATIONS = frozenset(
  {
    *("argmax", "argmin", "argsort", "argwhere", "nonzero", "nonzero_static"),
    *("max", "min", "median", "nanmedian", "mode", "kthvalue", "cummax", "cummin"),
    *("sort", "topk", "searchsorted", "bucketize"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d"),
  }
)


def _is_cpu(device) -> bool:
  return device is not None and device.type == "cpu"


def _map(result, function):
  if isinstance(result, tuple | list):
    return type(result)([_map(part, function) for part in result])
  return function(result)


def raise_as_torch(op, args, kwargs) -> None:
  """Raises torch's own error for wrong arguments, where its shape check has one."""
  if isinstance(op, _torch_compat.OpOverload) and op.namespace == "aten":
    with _torch_compat.without_dispatch():
      op(*args, **(kwargs or {}))


def _written_base(base, write, result):
  """The base of a view after an in-place operation gave `result` for the view."""
  chain, dtype, shape = write
  if np.broadcast_shapes(result.shape, shape) != shape:
    raise RuntimeError(
      f"output with shape {list(shape)} doesn't match the broadcast shape "
      f"{list(result.shape)}: an in-place operation cannot change the shape."
    )
  require_cast(result.dtype, dtype)
  result = lax.convert_element_type(result, dtype) if result.dtype != dtype else result
  if result.shape != shape:
    result = jnp.broadcast_to(result, shape)
  return result if chain is WHOLE else chain.write(base, result)


def require_cast(source, target) -> None:
  """Raises as torch does where a result would lose its kind (float to integer)."""
  source, target = mappings.j2t_dtype(source), mappings.j2t_dtype(target)
  if not torch.can_cast(source, target):
    raise RuntimeError(
      f"result type {_kind_name(source)} can't be cast to the desired output type "
      f"{_kind_name(target)}"
    )


def _kind_name(dtype) -> str:
  """torch's C++ name of a dtype, as its errors have it."""
  return torch.empty(0, dtype=dtype, device="meta").type().rpartition(".")[2][:-6]


class DecompositionPlan(Plan):
  """Runs an operation by torch's decomposition, compiled as one function too."""

  def __init__(self, op, operator: Operator, env):
    super().__init__(op, operator, env)
    # torch's functions look at numbers, so all of them are static.
    self.flattener = Flattener(self.name, env)

  def _lower(self, args, kwargs):
    args, kwargs = _tensors((args, kwargs), self.env)
    with _torch_compat.without_function_modes(), self.env.catching_factories():
      result = self.operator.func(*args, **kwargs)
    return _arrays(result)


def _tensors(tree, env):
  return jax.tree.map(
    lambda leaf: new_tensor(leaf, env) if isinstance(leaf, jax.Array) else leaf, tree
  )


def _arrays(tree):
  return jax.tree.map(
    lambda leaf: leaf.jax() if isinstance(leaf, Tensor) else leaf, tree
  )


class TensorPlan:
  """Runs an operation by a function of tensors, which may call torch operations."""

  def __init__(self, op, operator: Operator, env):
    self.operator = operator
    self.env = env

  def __call__(self, args, kwargs):
    kwargs = {k: v for k, v in (kwargs or {}).items() if k not in _IGNORED}
    if self.operator.needs_env:
      kwargs["env"] = self.env
    with self.env.catching_factories():
      return self.operator.func(*args, **kwargs)


class InPlacePlan:
  """Runs `op_` by the functional plan and writes the result to `self`."""

  def __init__(self, op, functional: Plan, env):
    self.op = op
    self.name = str(op)
    self.functional = functional

  def __call__(self, args, kwargs):
    target = args[0]
    if type(target) not in (Tensor, View):
      raise MixedDeviceError(
        f"{self.name} would write jax data to a tensor on {target.device}. "
        'Call `.cpu()` on the source, or move the destination with `.to("jax")`.'
      )
    if type(target) is View and 0 in target.stride():
      self._require_separate(target)
    plan = self.functional
    operands, key = plan.flattener.flatten(args, kwargs)
    storage, chain = target._storage, target._chain
    write = (chain, mappings.t2j_dtype(target.dtype), tuple(target.shape))
    base = storage.read()
    try:
      written = plan.run(args, kwargs, [base, *operands], key, write)
    except (TypeError, ValueError):
      raise_as_torch(self.op, args, kwargs)
      raise
    storage.write(written)
    return target

  def _require_separate(self, target) -> None:
    """Raises as torch does for a write to elements that share their memory."""
    overlaps = any(
      stride == 0 and size > 1 for stride, size in zip(target.stride(), target.shape)
    )
    if overlaps and not self.name.startswith(("aten.fill_", "aten.zero_")):
      raise RuntimeError(
        "unsupported operation: more than one element of the written-to tensor refers "
        "to a single memory location. Please clone() the tensor before performing the "
        f"operation ({self.name})."
      )


class OutPlan:
  """Runs `op.out` by the functional plan and writes the results to its outputs."""

  def __init__(self, op, functional: Callable, env):
    self.name = str(op)
    self.functional = functional
    self.written = schema_of(op).written
    self.names = schema_of(op).names

  def __call__(self, args, kwargs):
    kwargs = dict(kwargs or {})
    args = list(args)
    outputs = []
    for name in self.written:
      if name in kwargs:
        outputs.append(kwargs.pop(name))
      else:
        outputs.append(args.pop(self.names.index(name)))
    results = self.functional(args, self._with_dtype(kwargs, outputs))
    single = isinstance(results, torch.Tensor)
    for output, result in zip(outputs, [results] if single else results):
      write_output(self.name, output, result)
    return outputs[0] if single else tuple(outputs)

  def _with_dtype(self, kwargs, outputs):
    functional = getattr(self.functional, "op", None)
    takes_dtype = functional is not None and "dtype" in schema_of(functional).names
    if takes_dtype and "dtype" not in self.names:
      return {**kwargs, "dtype": outputs[0].dtype}
    return kwargs


def write_output(name: str, output: torch.Tensor, result: Tensor) -> None:
  """Puts a result into an `out=` tensor, which takes its shape if it has none."""
  if not isinstance(output, Tensor):
    raise MixedDeviceError(
      f"{name}: out= is on {output.device}, but the inputs are on jax. "
      'Make it with device="jax".'
    )
  array = result.jax()
  require_cast(array.dtype, mappings.t2j_dtype(output.dtype))
  array = array.astype(mappings.t2j_dtype(output.dtype))
  if output.shape == result.shape:
    output.replace_jax(array)
    return
  if output.numel():
    raise RuntimeError(
      f"{name}: out= has shape {list(output.shape)}, but the result has "
      f"{list(result.shape)}. Pass an empty tensor, or one of that shape."
    )
  resize_to(output, new_tensor(array, output._env))


def resize_to(tensor: Tensor, source: Tensor) -> None:
  """Gives `tensor` the shape and the numbers of `source`, keeping its identity."""
  if tensor._chain is not WHOLE:
    raise MutationError(
      "A view cannot be resized: its base would not follow. Call `.clone()` first."
    )
  with _torch_compat.without_dispatch():
    tensor.resize_(source.shape)
  tensor._storage.write(source.jax())


class Dispatcher:
  """The plans of an environment, by overload; made on first use."""

  # (op, schema, plan by registry, env) -> plan or None: views, transfers.
  special_plans: ClassVar[list[Callable]] = []

  def __init__(self, env):
    self._env = env
    self._plans: dict[int, tuple] = {}
    self._overrides: dict[Any, Operator] = {}
    self._generation = -1

  def __call__(self, func, args, kwargs):
    if self._generation != ops_registry.generation():
      self._plans.clear()
      self._generation = ops_registry.generation()
    entry = self._plans.get(id(func))
    if entry is None:
      # The overload is kept with its plan, so its id stays its own.
      entry = self._plans[id(func)] = (self._plan_for(func, args, kwargs), func)
    return entry[0](args, kwargs)

  def _plan_for(self, func, args, kwargs) -> Callable:
    try:
      return self.plan(func)
    except OperatorNotFound:
      raise self.not_found(func, args, kwargs) from None

  def override(self, op, operator: Operator) -> None:
    """Uses another operator in this environment only."""
    self._overrides[op] = operator
    self._plans.clear()

  def operator(self, func) -> Operator | None:
    """The registered operator of an overload or of its packet."""
    packet = getattr(func, "overloadpacket", None)
    for table in (self._overrides, ops_registry.all_aten_ops):
      operator = table.get(func) or table.get(packet)
      if operator is not None:
        return operator
    return None

  def find(self, func) -> Operator | None:
    """What runs for an overload, or for the first overload of a packet that has one."""
    operator = self.operator(func)
    if operator is not None:
      return operator
    if not isinstance(func, _torch_compat.OpOverload):
      overloads = [getattr(func, name) for name in getattr(func, "overloads", list)()]
      overloads.sort(key=lambda overload: bool(schema_of(overload).written))
      found = (self.find(overload) for overload in overloads)
      return next((operator for operator in found if operator), None)
    decomposition = self.decomposition(func)
    if decomposition is not None:
      return decomposition
    try:
      plan = self.plan(func)
    except OperatorNotFound:
      return None
    return Operator(func, lambda *args, **kwargs: plan(args, kwargs), kind=Kind.TENSORS)

  def decomposition(self, func) -> Operator | None:
    """torch's or our decomposition of an overload."""
    decompose = ops_registry.decompositions.get(func)
    if decompose is None:
      decompose = _torch_compat.composite_decomposition(func)
    if decompose is None:
      return None
    # A decomposition that draws would draw inside the compiled function.
    is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return Operator(func, decompose, kind=Kind.TENSORS, compiled=not is_random)

  def plan(self, func) -> Callable:
    """What runs for an overload: its operator, else what its schema derives.

    Raises:
      OperatorNotFound: there is none.
    """
    operator = self.operator(func)
    if not isinstance(func, _torch_compat.OpOverload):
      if operator is None:
        raise self.not_found(func)
      return self._plan_of(func, operator)
    schema = schema_of(func)
    for special in self.special_plans:
      found = special(func, schema, self._plan_by_registry, self._env)
      if found is not None and not (operator and operator.is_user_defined):
        return found
    return self._plan_by_registry(func)

  def _plan_by_registry(self, func) -> Callable:
    operator, schema = self.operator(func), schema_of(func)
    exact = operator is not None and operator.torch_op is func
    derivable = operator is None or operator.kind in (Kind.ARRAYS, Kind.SAMPLER)
    if schema.written and not exact and derivable:
      derived = self._derived(func)
      if derived is not None:
        return derived
    if operator is not None:
      return self._plan_of(func, operator)
    decomposition = self.decomposition(func)
    if decomposition is None:
      raise self.not_found(func)
    if schema.written or not decomposition.compiled:
      return TensorPlan(func, decomposition, self._env)
    return DecompositionPlan(func, decomposition, self._env)

  def _plan_of(self, func, operator: Operator) -> Callable:
    if operator.kind in (Kind.ARRAYS, Kind.SAMPLER):
      return Plan(func, operator, self._env)
    if operator.kind is Kind.ENV_ARRAYS:
      # It may draw by itself, so it is not compiled.
      return Plan(func, _uncompiled(operator), self._env)
    return TensorPlan(func, operator, self._env)

  def _derived(self, func) -> Callable | None:
    functional_op = functional_form(func)
    if functional_op is None:
      return None
    functional = self.plan(functional_op)
    if not is_in_place(func):
      return OutPlan(func, functional, self._env)
    if isinstance(functional, Plan):
      return InPlacePlan(func, functional, self._env)
    return None

  def not_found(self, func, args=(), kwargs=None) -> OperatorNotFound:
    """The error for an operation that has nothing to run, called with arguments."""
    called = f" It was called with ({describe(args, kwargs)})." if args else ""
    return OperatorNotFound(
      f"{func} has no lowering and no decomposition.{called} Write one with "
      "`@torchax.ops.op_base.op(…)` (docs: Writing lowerings), or move the tensors to "
      "the CPU for this operation with `.cpu()`."
    )


def describe(args, kwargs) -> str:
  """Arguments with the dtype and shape of tensors in place of their numbers."""

  def one(value) -> str:
    if isinstance(value, torch.Tensor):
      return f"{value.dtype}{list(value.shape)} on {value.device}"
    if isinstance(value, list | tuple):
      return f"[{', '.join(map(one, value))}]"
    return repr(value)

  named = [f"{name}={one(value)}" for name, value in (kwargs or {}).items()]
  return ", ".join([*map(one, args), *named])


def _uncompiled(operator: Operator) -> Operator:
  copied = Operator(
    operator.torch_op, operator.func, kind=operator.kind, static=operator.static
  )
  copied.compiled = False
  return copied
