"""How an operation runs once its lowering is known: a plan for each kind.

`Plan` runs lowerings on arrays, compiled; the in-place and `out=` forms wrap it.
`dispatcher.py` chooses the plan of an overload.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torchax.compat import jax_compat, torch_compat
from torchax.core import (
  explicit_axes,
  grad_mode,
  host_numbers,
  mappings,
  numpy_fallback,
)
from torchax.core.chains import WHOLE
from torchax.core.partitions import Partition
from torchax.core.programs import ProgramCache
from torchax.core.storage import active as _active
from torchax.dispatch import (
  compiling,
  derivatives,
  explaining,
  index_checks,
  recorded_arguments,
  torch_checks,
  word_programs,
)
from torchax.dispatch.operands import (
  IGNORED,
  Flattener,
  PreparedFlattener,
  strong,
)
from torchax.registry import real_numbers
from torchax.registry.derivatives import formula_of
from torchax.registry.operators import Kind, Operator
from torchax.registry.schema import schema_of
from torchax.rng import generator_operands, scope
from torchax.rng import state as rng_state
from torchax.rng.generator import record_generator_draw
from torchax.rng.ledger import Recording
from torchax.rng.threefry import Words
from torchax.tensor import Tensor, new_tensor

_ArrayImpl = jax_compat.ArrayImpl


# Of one operation; a program is a few hundred kilobytes.
MOST_PROGRAMS = 512

_INLINE = object()
"""In place of the example of a program, where a lowering is part of another one."""


class Plan:
  """Runs one functional operation by its lowering on arrays."""

  def __init__(self, op, operator: Operator, env):
    self.op = op
    self.operator = operator
    self.env = env
    self.name = str(op)
    schema = schema_of(op) if isinstance(op, torch_compat.OpOverload) else None
    numbers = schema.dynamic - set(operator.numbers.static) if schema else frozenset()
    dynamic = set(operator.numbers.dynamic) | (
      numbers if operator.is_builtin else set()
    )
    names = schema.names if schema else ()
    described = (self.name, env, dynamic, names, operator.execution.takes_cpu, numbers)
    self.flattener = Flattener(*described)
    self._prepared: PreparedFlattener | None = None
    if operator.numbers.prepare is not None:
      self._prepared = PreparedFlattener(
        operator.numbers.prepare, operator.numbers.static, *described
      )
    # Of other numbers than the first ones; False where there were no others yet.
    self._of_numbers: ProgramCache[tuple, Callable | bool] = ProgramCache(MOST_PROGRAMS)
    self.is_sampler = operator.kind is Kind.SAMPLER
    self._compiled: ProgramCache[tuple, Callable] = ProgramCache(MOST_PROGRAMS)
    takes_device = schema is not None and "device" in schema.names
    self._takes_device = takes_device
    # A user's lowering may take what torch does not.
    self._is_checked = operator.is_builtin and schema is not None
    # The result is not always simply an array on jax.
    self._is_special = bool(operator.execution.index_results) or takes_device
    # JAX is given torch's derivative.
    self._formula = formula_of(op)
    self._is_real = real_numbers.are_asked(self.name) and operator.is_builtin
    # Where a lowering is a part of what is traced and not a program of its own.
    self._is_inlined = _is_traced if self._formula else jax_compat.is_staging
    # Nothing to check, to draw or to decide before the compiled function is called.
    self._is_simple = (
      operator.checks.check is None
      and operator.checks.rules is None
      and operator.execution.compiled in (True, None)
      and not self.is_sampler
    )

  def __call__(self, args, kwargs):
    operands, key = self.flattener.flatten(args, kwargs)
    try:
      if self._is_simple and jax_compat.is_top_level():
        compiled = self._compiled.get(key) or self._found(args, kwargs, key)
        result = compiled(*operands)
      else:
        result = self.run(args, kwargs, operands, key)
    except torch_checks.Refused:
      self.require_of_torch(args, kwargs)
      self.forget(args, kwargs, key)
      with torch_checks.without(self):
        return self(args, kwargs)
    except explaining.EXPLAINED as error:
      explaining.raise_as_torch(error, self.op, args, kwargs, self.operator)
      raise
    if type(result) is _ArrayImpl and not self._is_special:
      return new_tensor(result, self.env)
    if kwargs and _is_cpu(kwargs.get("device")):
      return _map(result, lambda array: mappings.j2t(array))
    return self._wrap(result)

  def redraw(self, draw, args, kwargs=None):
    """Runs a sampler with the operands of an earlier draw; no stream advances."""
    operands, key = self.flattener.flatten(args, kwargs)
    with torch_checks.without(self):
      result = self._execute(args, kwargs, [*draw, *operands], key, None)
    return self._wrap(result)

  def made_on(self, place, args, kwargs):
    """Runs an operation that makes its result on several devices, each its part.

    Args:
      place: the `jax.sharding.Sharding` of the result.
      args, kwargs: torch's.
    """
    operands, key = self.flattener.flatten(args, kwargs)
    return self._wrap(self.run(args, kwargs, operands, key, place=place))

  def on_arrays(self, args, kwargs, caches=True):
    """Runs the operation on arrays: for graphs, whose arguments torch has checked.

    Args:
      args, kwargs: torch's, with arrays for tensors.
      caches: compile the lowering outside of traces; not where sizes are symbols.
    """
    self._require_rules(args, kwargs)
    operands, key = self.flattener.flatten(args, kwargs)
    call = functools.partial(self._call, key, None)
    if caches and self.operator.execution.compiled in (True, None):
      call = lambda operands: self._execute(args, kwargs, operands, key, None)  # noqa: E731
    with torch_checks.without(self):
      if not self.is_sampler:
        return call(operands)
      return self._drawn(args, kwargs, call, operands)

  def shapes(self, args, kwargs):
    """The results as `jax.ShapeDtypeStruct`s, which stand for tensors in `args` too.

    Nothing is computed or drawn: no stream advances.
    """
    stream = scope.current(self.env.streams)
    draw = list(stream.peek(self.name)) if self.is_sampler else []
    given = Partition(
      (args, kwargs), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )

    def run(draw, arrays):
      operands, key = self.flattener.flatten(*given.filled(arrays))
      return self._call(key, None, [*draw, *operands])

    return jax.eval_shape(run, draw, given.dynamic)

  def run(self, args, kwargs, operands, key, write=None, place=None):
    """Arrays out of operands.

    Args:
      args, kwargs: torch's arguments, for checks.
      operands, key: what `flatten` made of them.
      write: None, or (chain, dtype, shape) of a tensor that the result is written to;
        its base is the first operand then, and the new base is returned. Or a tuple
        of these, for several tensors with a tuple of bases.
      place: the sharding in which the result is made, or a tuple of them; None
        leaves it to JAX.
    """
    if self._is_inlined():
      self.require_of_torch(args, kwargs)
    self._require(args, kwargs)
    if not self.is_sampler:
      return self._execute(args, kwargs, operands, key, write, place)
    generator = kwargs.get("generator") if kwargs else None
    if generator is not None:
      before = generator.get_state()
      draw = generator_operands(generator, self.name)
      try:
        result = self._execute(args, kwargs, [*draw, *operands], key, write, place)
      except BaseException:
        generator.set_state(before)
        raise
      noted = (
        self.name,
        self._distribution(args),
        result,
        recorded_arguments.plain(args, kwargs),
      )
      record_generator_draw(*noted, draw[0])
      return result
    execute = functools.partial(
      self._execute, args, kwargs, key=key, write=write, place=place
    )
    return self._drawn(args, kwargs, execute, operands)

  def require_of_torch(self, args, kwargs) -> None:
    """Raises torch's own error for arguments that torch refuses on every device."""
    if self._is_checked:
      given = (self.op, args, kwargs, self._takes_device)
      if torch_checks.refusal(*given) is not None:
        if self.operator.checks.check is None:  # which looks at dtypes itself
          explaining.require_label_dtypes(*given[:3], self.operator)
        torch_checks.raise_as_torch(*given)

  def forget(self, args, kwargs, key, write=None) -> None:
    """Drops the program of a key: JAX runs one slower whose tracing has failed."""
    self._compiled.pop(key if write is None else (write, key))
    if self._prepared is not None:
      with self._prepared.held:
        _, form = self._prepared.flatten(args, kwargs)
      self._of_numbers.pop((write, form))

  def _require(self, args, kwargs) -> None:
    """Raises for arguments that break the operation's own rules."""
    try:
      if self.operator.checks.check is not None:
        self.operator.checks.check(*args, **(kwargs or {}))
      self._require_rules(args, kwargs)
    except explaining.EXPLAINED:
      self.require_of_torch(args, kwargs)  # shapes come first, as in torch
      raise

  def _require_rules(self, args, kwargs) -> None:
    rules = self.operator.checks.rules
    if rules is not None:
      given = rules(*args, **(kwargs or {}))
      index_checks.require(given, self.name, self.env.config)

  def _drawn(self, args, kwargs, execute, operands):
    """Executes with the key of the next draw; the stream advances if it succeeds."""
    stream = scope.current(self.env.streams)
    with stream.held:
      draw = stream.peek(self.name)
      result = execute([*draw, *operands])
      if Recording.count or stream.log is not None:
        noted = recorded_arguments.plain(args, kwargs)
        stream.draw(self.name, self._distribution(args), result, noted)
      else:
        stream.advance(1)
    return result

  def _distribution(self, args) -> str:
    """The distribution of a draw, with the parameters that are numbers."""
    numbers = [
      f"{name}={arg:g}"
      for name, arg in zip(self.flattener.names, args)
      if type(arg) in (int, float)
    ]
    name = self.operator.draw.distribution or self.name.split(".")[1].removesuffix(
      "_like"
    )
    return name if name.endswith(")") else f"{name}({', '.join(numbers)})"

  def _execute(self, args, kwargs, operands, key, write, place=None):
    may_compile = self.operator.execution.compiled
    if callable(may_compile):
      may_compile = bool(may_compile(args, kwargs or {}))
    # Samplers are compiled inside traces too: one that JAX runs step by step, as
    # `jax.checkpoint` does outside of jit, would round differently.
    if may_compile is False or (self._is_inlined() and not self.is_sampler):
      return self._call(key, write, operands)
    cache_key = key if write is None else (write, key)
    if place is not None:
      compiled = self._placed(args, kwargs, cache_key, key, write, place)
    else:
      compiled = self._compiled.get(cache_key) or self._found(args, kwargs, key, write)
    if not jax_compat.is_top_level():
      compiled = compiled.in_traces
    return compiled(*operands)

  def _placed(self, args, kwargs, cache_key, key, write, place) -> Callable:
    found = self._compiled.get((place, cache_key))
    if found is None:
      found = self._compile(args, kwargs, key, write, place)
      self._compiled[place, cache_key] = found
    return found

  def _found(self, args, kwargs, key, write=None) -> Callable:
    """What runs for a key that is new: compiled for it, or for any numbers.

    The first numbers are compiled for, which costs a call nothing. For all others
    together there is one program, whose operands they are.
    """
    compiled = None
    if self._prepared is not None:
      with self._prepared.held:
        operands, form = self._prepared.flatten(args, kwargs)
        places, numbers = self._prepared.places, self._prepared.numbers
      # As an array, and for traces, where that would be a constant to be read back.
      pairs = [(n, operands[n], numbers.get(n, operands[n])) for n in places]
      if pairs:
        compiled = self._with_numbers(args, kwargs, pairs, (write, form))
      if compiled is not None and self.operator.checks.shape_check is not None:
        compiled = self._fitting(compiled, key, write)
    if compiled is None:
      compiled = self._compile(args, kwargs, key, write)
    self._compiled[key if write is None else (write, key)] = compiled
    return compiled

  def _with_numbers(self, args, kwargs, pairs, form) -> Callable | None:
    """The program of any numbers, with these; None for the first ones."""
    program = self._of_numbers.get(form)
    if program is None:
      self._of_numbers[form] = False
      return None
    if program is False:
      write, key = form
      program = self._of_numbers[form] = self._compile(args, kwargs, key, write)
    # In front are the key of a draw, its number, and the base that is written to.
    first = 2 * self.is_sampler + (form[0] is not None)
    in_traces = [(first + place, number) for place, _, number in pairs]
    numbers = [(first + place, array) for place, array, _ in pairs]

    with_numbers = _filled(program, numbers)
    with_numbers.in_traces = _filled(program.in_traces, in_traces)
    return with_numbers

  def _fitting(self, compiled, key, write) -> Callable:
    """The program of any numbers, for those of a key, which have to fit the shapes."""
    first = 2 * self.is_sampler + (write is not None)
    known = set()

    def require(*operands):
      args, kwargs = self.flattener.rebuild(key, operands)
      self.operator.checks.shape_check(*args, **kwargs)

    def fitting(run):
      def called(*operands):
        shapes = tuple(map(numpy_fallback.shape_of, operands))
        if shapes not in known:
          jax.eval_shape(require, *operands[first:])
          known.add(shapes)
        return run(*operands)

      return called

    result = fitting(compiled)
    result.in_traces = fitting(compiled.in_traces)
    return result

  def _compile(self, args, kwargs, key, write=None, place=None) -> Callable:
    example = None
    if self._is_checked:
      example = torch_checks.Example(self, self.op, args, kwargs, self._takes_device)

    def compiled(*operands):
      return self._call(key, write, operands, example)

    compiled.__name__ = self.name.replace(".", "_")
    program = compiling.compiled(compiled, self.operator, place)
    if write is not None or place is not None:
      return program
    if self.operator.draw.shared_bits is not None:
      return word_programs.until_often(program, self._number_of_words(key))
    if self.operator.execution.on_host is None:
      return program

    def on_host(operands):
      args, kwargs = self.flattener.rebuild_on_host(key, operands)
      is_asked = numpy_fallback.is_small((*args, *kwargs.values()))
      return self.operator.execution.on_host(*args, **kwargs) if is_asked else None

    return numpy_fallback.with_warmup(program, on_host)

  def _number_of_words(self, key) -> Callable:
    """(operands after the key and the count of a draw) -> how many words it takes."""

    def number(operands):
      numbers = []

      def ask(given):
        args, kwargs = self.flattener.rebuild(key, given)
        numbers.append(self.operator.draw.shared_bits(*args, **kwargs))

      jax.eval_shape(ask, operands)
      return numbers[0]

    return number

  def _call(self, key, write, operands, example=_INLINE):
    """Runs the lowering here.

    Args:
      key, write, operands: of `run`.
      example: by which a program of its own is checked, or None; JAX does not
        differentiate such a program.
    """

    def called(*operands):
      return self._called(key, write, operands, example)

    form = (self, key, write, example is _INLINE)
    return explicit_axes.call(called, operands, self.name, form)

  def _called(self, key, write, operands, example):
    if self.is_sampler:
      rng_key, count, *operands = operands
    if write is not None:
      base, *operands = operands
    args, kwargs = self.flattener.rebuild(key, operands)
    if example is not _INLINE and example is not None:
      self._require_real(args, kwargs)
      example.require(args, kwargs)
    if self._formula and example is _INLINE:
      result = derivatives.differentiated(
        self._formula, self._lower, self.env, args, kwargs
      )
    elif not self.is_sampler:
      result = self._lower(args, kwargs)
    elif isinstance(rng_key, Words):
      result = self._lower([rng_key, *args], kwargs)
    else:
      result = self._lower([rng_state.fold_in(rng_key, count), *args], kwargs)
    if write is None:
      return jax.tree.map(strong, result)
    return _written_base(base, write, result)

  def _require_real(self, args, kwargs) -> None:
    if self._is_real:
      real_numbers.require(self.name, args, kwargs)

  def _lower(self, args, kwargs):
    self._require_real(args, kwargs)
    if self.operator.kind is Kind.ENV_ARRAYS:
      return self.operator.func(*args, **kwargs, env=self.env)
    return self.operator.func(*args, **kwargs)

  def _wrap(self, result):
    result = grad_mode.stopped(result)
    if self.operator.execution.index_results and self.env.config.use_int32_for_index:
      result = self._with_narrow_indices(result)
    return self._wrap_array(result)

  def _with_narrow_indices(self, result):
    results = list(result) if isinstance(result, tuple) else [result]
    for place in self.operator.execution.index_results:
      if place < len(results) and results[place].dtype == jnp.int64:
        results[place] = results[place].astype(jnp.int32)
    return tuple(results) if isinstance(result, tuple) else results[0]

  def _wrap_array(self, result):
    if type(result) is _ArrayImpl or isinstance(result, jax.Array):
      return new_tensor(result, self.env)
    if isinstance(result, tuple):
      return tuple([self._wrap_array(value) for value in result])
    if isinstance(result, list):
      return [self._wrap_array(value) for value in result]
    return result


def _is_cpu(device) -> bool:
  return device is not None and device.type == "cpu"


def _map(result, function):
  if isinstance(result, tuple | list):
    return type(result)([_map(part, function) for part in result])
  return function(result)


def _filled(program: Callable, numbers) -> Callable:
  """A program with (place, number) among its operands, in the order of the places."""

  def filled(*given):
    given = list(given)
    for place, number in numbers:
      given.insert(place, number)
    return program(*given)

  return filled


def _is_traced() -> bool:
  return not jax_compat.is_top_level()


def _written_base(base, write, result):
  """The base of a view after an in-place operation gave `result` for the view."""
  if type(write[0]) is tuple:
    parts = zip(base, write, jax.tree.leaves(result), strict=True)
    return tuple([_written_base(*part) for part in parts])
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
    # What is compiled here is kept, whatever is in force when it is called again.
    with (
      torch_compat.without_function_modes(),
      torch_compat.without_autocast(),
    ):
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
    self.op = op
    self.operator = operator
    self.env = env

  def __call__(self, args, kwargs):
    try:
      return self._run(args, kwargs)
    except explaining.EXPLAINED as error:
      explaining.raise_as_torch(error, self.op, args, kwargs, self.operator)
      raise

  def _run(self, args, kwargs):
    dropped = IGNORED - {"generator"}  # the operations that it calls draw with it
    kwargs = {k: v for k, v in (kwargs or {}).items() if k not in dropped}
    if _active.boundary is not None:
      args = [host_numbers.settled(arg) for arg in args]
      kwargs = {k: host_numbers.settled(v) for k, v in kwargs.items()}
    if self.operator.needs_env:
      kwargs["env"] = self.env
    return self.operator.func(*args, **kwargs)


class FormulaTensorPlan(TensorPlan):
  """The same for an operation of whose derivative JAX is told torch's formula."""

  def __init__(self, op, operator: Operator, env):
    super().__init__(op, operator, env)
    self._formula = formula_of(op)

  def __call__(self, args, kwargs):
    if jax_compat.is_top_level():
      return super().__call__(args, kwargs)
    # The arguments are arrays from here on.
    given = _arrays((list(args), kwargs or {}))
    found = derivatives.differentiated(self._formula, self._lower, self.env, *given)
    return _tensors(found, self.env)

  def _lower(self, args, kwargs):
    return _arrays(super().__call__(*_tensors((args, kwargs), self.env)))


def tensor_plan(op, operator: Operator, env) -> TensorPlan:
  """The plan of an operation that a function of tensors runs."""
  return (FormulaTensorPlan if formula_of(op) else TensorPlan)(op, operator, env)
