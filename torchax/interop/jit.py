"""`jax_jit`: `jax.jit` for functions of tensors.

Random streams, captured tensors and generators are operands of the compiled function.
They come first, so argument numbers and shardings from the user are shifted past them.
In-place changes of arguments and captured tensors reach the caller.

`tracing/trace.py` has the traced function; `module.py` compiles modules.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Unpack, overload

import jax

from torchax import amp
from torchax.compat import jax_compat, torch_compat
from torchax.core import grad_mode, host_numbers, program_limit
from torchax.core.error_messages import donated_error, donated_twice_error
from torchax.core.partitions import Partition, is_array
from torchax.core.static_values import StaticValue
from torchax.core.storage import active
from torchax.core.tracebacks import hide, hide_library_frames
from torchax.devices import placement
from torchax.environment import default_env
from torchax.errors import MixedDeviceError
from torchax.interop.jit_options import JitOptions, merge, with_names
from torchax.rng import NewOperands, current
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import (
  autograd_bridge,
  program_keys,
  static_arguments,
)
from torchax.tracing.autograd_bridge import RecordedCall, bases_of
from torchax.tracing.buckets import Buckets, PaddedSizes
from torchax.tracing.conversions import array_of, arrays_of, tensors_of
from torchax.tracing.effects import Effects
from torchax.tracing.padded.bucketed import Bucketed
from torchax.tracing.specialization import ORDINARY, with_environments
from torchax.tracing.trace import Options, Traced
from torchax.types import P, R
from torchax.view import View

# Operands in front of the user's arguments: rng, (captured, specialization, *numbers).
LEADING = 2

_ARGNUMS = ("static_argnums", "donate_argnums")

Q = ParamSpec("Q")


def shift_argnums(argnums):
  """Shift the user's argument numbers past the leading operands.

  Negative numbers count from the end, so they stay.
  """
  if argnums is None:
    return None
  if isinstance(argnums, int):
    return argnums + LEADING if argnums >= 0 else argnums
  return tuple(shift_argnums(number) for number in argnums)


def shift_jit_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
  """Convert the user's keyword arguments of `jax.jit` for the pure function."""
  shifted = dict(kwargs)
  for name in _ARGNUMS:
    if shifted.get(name) is not None:
      shifted[name] = shift_argnums(shifted[name])
  if "in_shardings" in shifted:
    shardings = shifted["in_shardings"]
    # A tuple or list has one entry per argument; anything else is for all arguments.
    if isinstance(shardings, tuple | list):
      shifted["in_shardings"] = (None, None, *shardings)
    else:
      shifted.pop("in_shardings")
      shifted["_all_arguments"] = shardings
  if "out_shardings" in shifted:
    shifted["out_shardings"] = ((shifted["out_shardings"], None), None)
  return shifted


class Jitted(Generic[P, R]):
  """Compiled function of tensors, the result of `jax_jit`.

  It has the name, docstring and signature of the original function. As an attribute of
  a class it is a method.

  Attributes:
    traced: torch function with its operands.

  >>> double = jax_jit(lambda x: 2 * x)
  >>> double(torch.ones(2, device="jax"))
  tensor([2., 2.], device='jax:0')
  """

  def __init__(
    self,
    function: Callable[P, R],
    jit_kwargs: dict[str, Any],
    captured=(),
    jit: Callable = jax.jit,
  ):
    jit_kwargs = dict(jit_kwargs)
    buckets = jit_kwargs.pop("buckets", None)
    if jit is jax.jit:
      jit_kwargs = with_names("jax_jit", function, jit_kwargs, ("static", "donate"))
    # Shardings and buckets have the structure that JAX gives to arguments and results.
    self._keeps_form = buckets is None and not any("shardings" in k for k in jit_kwargs)
    # Arrays with shardings may be moved, and donated ones are gone after the call.
    given = [key for key, value in jit_kwargs.items() if value is not None]
    self._keeps_arguments = not any("shardings" in k or "donate" in k for k in given)
    options = Options(
      lifts=True,
      records=True,
      assigns=True,
      lifts_numbers=True,
      keeps_form=self._keeps_form,
    )
    self.traced = Traced(function, options, captured)
    self._compile = jit
    self._sizes: PaddedSizes | None = None
    if isinstance(buckets, PaddedSizes):
      self._sizes = buckets
    elif buckets is not None:
      self._sizes = Buckets(function, buckets, jit_kwargs, LEADING)
    self._keyed = self.traced.keyed
    self._env = default_env()
    kwargs = shift_jit_kwargs(jit_kwargs)
    self._all_arguments = kwargs.pop("_all_arguments", None)
    self._kwargs = kwargs
    self._by_arity: dict[int, Any] = {}
    self._jitted = None if self._all_arguments is not None else self._jit(kwargs)
    functools.update_wrapper(self, function, updated=())

  def _jit(self, kwargs) -> Any:
    counted = program_limit.Counted(self.traced.__name__, is_of_user=True)

    def program(rng, operands, *args, **kwargs):
      result = counted.trace(self.traced, rng, operands, *args, **kwargs)
      (out, effects), _ = result
      if effects is not None and effects.tape is not None:
        effects.tape = effects.tape.without(self._held(operands, args, kwargs, out))
      self.traced.record_trace(operands, args, kwargs)
      return result

    if self._sizes is not None:
      return counted.of(self._bucketed(self._sizes, counted, kwargs))

    # Copy the name only: `__wrapped__` would lead JAX to the user's signature, which
    # lacks the leading operands.
    program.__name__ = self.traced.__name__
    return counted.of(self._compile(program, **kwargs))

  def _held(self, operands, args, kwargs, out) -> list:
    """Return the arrays of a call that its tape shares: operands and results."""
    others = (args, kwargs, out) if self._keeps_arguments else ()
    return [*operands[0], *jax.tree.leaves(others)]

  def _bucketed(self, sizes: PaddedSizes, counted, kwargs) -> Bucketed:
    def function(rng, operands, *args, **kwargs):
      return self.traced(rng, operands, *args, **kwargs)

    def record(rng, operands, *args, **kwargs):
      self.traced.record_trace(operands, args, kwargs)

    function.__name__ = self.traced.__name__
    return Bucketed(function, record, sizes, counted, kwargs)

  def _jit_for(self, n_args: int) -> Any:
    if self._jitted is not None:
      return self._jitted
    if n_args not in self._by_arity:
      shardings = (None, None, *[self._all_arguments] * n_args)
      self._by_arity[n_args] = self._jit({**self._kwargs, "in_shardings": shardings})
    return self._by_arity[n_args]

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
    try:
      try:
        if torch_compat.is_profiling():
          with torch_compat.recorded(f"jit({self.traced.__name__})"):
            return self.call(None, args, kwargs)
        return self.call(None, args, kwargs)
      except (TypeError, ValueError, RuntimeError) as error:
        self.reword(error, args, kwargs)
        raise
    except Exception as error:
      hide(error)
      raise

  def reword(self, error: Exception, args, kwargs) -> None:
    """Raise our error in place of JAX's, where we have a clearer one; else return.

    Raises:
      MixedDeviceError, DonationError, TypeError, ValueError: the clearer error.
    """
    name = self.traced.__name__
    if jax_compat.is_about_devices(error):
      message = placement.MIXED.format(what=name, found=error)
      raise MixedDeviceError(message) from error
    if jax_compat.is_about_deletion(error):
      raise donated_error(name) from error
    if jax_compat.is_about_donation(error):
      raise donated_twice_error(name, self._shared_memory(args, kwargs)) from error
    refused = jax_compat.refused_argument(error)
    if refused is not None:
      kind, position = refused
      raise TypeError(
        f"`{name}` was given an object of the class {kind} as {position}. A compiled "
        "function takes tensors and numbers, and flags, strings, dtypes and devices. "
        "Name the position of anything else that has a hash in `static_argnums` or "
        "`static_argnames`, or close over it."
      ) from error
    if jax_compat.is_about_static_arguments(error):
      raise ValueError(
        f"`{name}` has a static argument without a hash: a list, a dict or a tensor. "
        "Static arguments are part of what a function is compiled for. Pass a tuple, "
        f"or leave its position out of `static_argnums`. JAX says: {error}"
      ) from error

  def _shared_memory(self, args, kwargs) -> list[list[int]]:
    """Return the shapes of the tensors that are both arguments and captured."""
    closed_over = {id(tensor._storage) for tensor in self.traced.captures.tensors}
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda v: isinstance(v, Tensor))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [list(t.shape) for t in tensors if id(t._storage) in closed_over]

  @overload
  def __get__(self, owner: None, cls: type) -> "Jitted[P, R]": ...

  @overload
  def __get__(
    self: "Jitted[Concatenate[Any, Q], R]", owner: object, cls: type | None = None
  ) -> Callable[Q, R]: ...

  def __get__(self, owner, cls=None):
    return self if owner is None else types.MethodType(self, owner)

  def call(self, extra, args, kwargs, applies_effects=True, alive=None) -> Any:
    """Run the function.

    Args:
      extra: static value, a part of the cache key.
      args, kwargs: arguments of the function.
      applies_effects: apply the effects, such as in-place changes.
      alive: object to keep alive as long as the result may be differentiated.
    """
    leaves, args, kwargs = _flatten(args, kwargs, self._keeps_form)
    (out, effects), rng, operands = self._run(leaves, extra, args, kwargs)
    if active.boundary is not None:
      for guards in active.boundary.guards_around():
        guards.guard_on_function(self.traced.guards)
    if effects is None:
      if type(out) is jax_compat.ArrayImpl:  # typed keys have another class
        return new_tensor(out, self._env)
      out = grad_mode.stop_gradients(out)
    else:
      differentiate = None
      if effects.tape is not None:
        if effects.tape.sources:
          effects.tape = effects.tape.filled(self._held(operands, args, kwargs, out))
        tensors = self.traced.captures.tensors
        numbers = host_numbers.current_argument_values()
        bases = bases_of(leaves)
        called = RecordedCall(
          leaves, bases, (args, kwargs), operands, tensors, rng, numbers, alive
        )
        differentiate = functools.partial(self._differentiable_gradients, called)
      out = _apply_effects(effects, out, leaves, applies_effects, differentiate)
    return tensors_of(out)

  def _run(self, leaves, extra, args, kwargs) -> tuple:
    """Run the program; return its result, the random operands and the others."""
    jitted = self._jitted or self._jit_for(len(args))
    traced, keyed = self.traced, self._keyed
    if len(keyed.stream_operands) == 1:  # the usual case, without the closure below
      try:
        operands = traced.operands(leaves, extra)
        stream = current()
        with stream.lock:
          rng = keyed.values(stream=stream)
          result, advance = jitted(rng, operands, *args, **kwargs)
          if advance is not None:
            keyed.commit(advance)
        return result, rng, operands
      except NewOperands as found:
        found.provide()

    def run(rng):
      operands = traced.operands(leaves, extra)
      result, advance = jitted(rng, operands, *args, **kwargs)
      return (result, rng, operands), advance

    return keyed.run(run)

  def _differentiable_gradients(self, called, program, gradients):
    """Return differentiable gradients of a recorded call.

    Runs the function again, with the same draws.
    """
    inputs = Partition(called.inputs(program.written), is_array)
    jitted = program.differentiable.get(inputs)
    if jitted is None:
      static, treedef = inputs.without_arrays(), jax.tree.structure(called.args)
      function = functools.partial(
        self._gradient, program, static, treedef, called.autocast
      )
      jitted = program.differentiable[static] = Jitted(
        function, {}, self.traced.captures.tensors
      )
    args = (called.rng, inputs.dynamic, list(gradients))
    with host_numbers.argument_values(called.numbers):
      return jitted.call(None, args, {}, applies_effects=False, alive=called.alive)

  def _gradient(self, program, inputs, treedef, autocast, rng, tensors, gradients):
    leaves = inputs.unflatten(tensors)
    args, kwargs = static_arguments.unbox(jax.tree.unflatten(treedef, leaves))
    with self._keyed.replay(arrays_of(rng)), amp.restore_autocast(autocast):
      out = self.traced.function(*args, **kwargs)
    return program.gradients_of(out, leaves, gradients)

  @hide_library_frames
  def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
    """Call `jax.jit(…).lower` for these arguments; run nothing, advance no stream.

    Args:
      *args, **kwargs: arguments of a call; only shapes and dtypes of tensors matter.

    Returns:
      JAX's lowered program; `.compile()` gives its costs and memory.

    >>> double = jax_jit(lambda x: 2 * x)
    >>> "stablehlo.multiply" in double.lower(torch.ones(2, device="jax")).as_text()
    True
    """
    return self._abstractly("lower", args, kwargs)

  @hide_library_frames
  def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
    """Call `jax.jit(…).trace` for these arguments; run nothing, advance no stream.

    Args:
      *args, **kwargs: arguments of a call; only shapes and dtypes of tensors matter.

    Returns:
      JAX's traced program; `.jaxpr` shows its operations.

    >>> double = jax_jit(lambda x: 2 * x)
    >>> [e.primitive.name for e in double.trace(torch.ones(2, device="jax")).jaxpr.eqns]
    ['mul']
    """
    return self._abstractly("trace", args, kwargs)

  def _abstractly(self, method: str, args, kwargs) -> Any:
    leaves, args, kwargs = _flatten(args, kwargs, self._keeps_form)
    run = getattr(self._jit_for(len(args)), method)
    return self._keyed.try_abstractly(
      lambda rng: run(rng, self.traced.operands(leaves), *args, **kwargs)
    )

  def describe_call(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Describe the dependencies and effects of a call without running it.

    No random stream advances.

    Args:
      args: positional arguments of the function.
      kwargs: its keyword arguments.

    Returns:
      Three values: the cache key by name with the names of the argument leaves, the
      effects, and the advance of the random stream.
    """
    leaves, args, kwargs = _flatten(args, kwargs, self._keeps_form)
    jitted = self._jit_for(len(args))
    given = (None,) * LEADING + tuple(args)
    boxed = static_arguments.convert_static(self._kwargs, StaticValue, given, kwargs)

    def trace(rng):
      operands = self.traced.operands(leaves)
      (_, effects), advance = jitted.eval_shape(rng, operands, *args, **kwargs)
      named = boxed[0][LEADING:], boxed[1]
      form = program_keys.key_of_call(self.traced, operands[1] or ORDINARY, *named)
      return form, effects, advance

    return self._keyed.try_abstractly(trace)


def _apply_effects(effects: Effects, out, leaves, applies: bool, differentiate) -> Any:
  """Apply the effects of a call; return its result, recorded in torch's graph."""
  if applies:
    effects.apply(leaves)
  results = out, effects.assigned
  if effects.tape is None:
    out, assigned = grad_mode.stop_gradients(results)
  else:
    out, assigned = autograd_bridge.attach(effects.tape, leaves, results, differentiate)
  if applies and effects.targets:
    effects.assign(assigned, leaves)
  return with_environments(out, effects.environments) if effects.environments else out


def _flatten(args, kwargs, keeps_form: bool):
  """Return the argument leaves, and the arguments with arrays for tensors."""
  if not kwargs:
    arrays = []
    for arg in args:
      cls = type(arg)
      if cls is Tensor or cls is View:
        arrays.append(arg.jax())
      elif cls is int or cls is float or isinstance(arg, jax.Array):
        arrays.append(arg)
      else:
        break
    else:
      return args, arrays, kwargs
  args = static_arguments.box_arguments(args, keeps_form)
  kwargs = {k: static_arguments.box_arguments(kwargs[k], keeps_form) for k in kwargs}
  leaves, treedef = jax.tree.flatten((args, kwargs))
  args, kwargs = jax.tree.unflatten(treedef, list(map(array_of, leaves)))
  return leaves, args, kwargs


@overload
def jax_jit(
  torch_function: Callable[P, R],
  kwargs_for_jax_jit: dict[str, Any] | None = None,
  fix_for_buffer_donation: bool = False,
  **options: Unpack[JitOptions],
) -> Jitted[P, R]: ...


@overload
def jax_jit(
  torch_function: None = None,
  kwargs_for_jax_jit: dict[str, Any] | None = None,
  fix_for_buffer_donation: bool = False,
  **options: Unpack[JitOptions],
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


@hide_library_frames
def jax_jit(
  torch_function=None,
  kwargs_for_jax_jit=None,
  fix_for_buffer_donation=False,
  **options,
):
  """Compile a function of tensors with `jax.jit`.

  The random stream is an operand: every call draws new numbers, the same as in eager
  mode, and re-seeding never recompiles. Tensors that the function closes over, such as
  a model's parameters or an optimizer's state, are operands too; tracing finds them.
  In-place changes reach them and the arguments.

  Args:
    torch_function: function or module. Python runs it once for each combination of
      argument shapes, dtypes and static values. Without it, `jax_jit` returns a
      decorator: `@jax_jit(donate_argnums=0)`.
    kwargs_for_jax_jit: the options as a dict, for compatibility with upstream.
    fix_for_buffer_donation: ignored, for compatibility with upstream; arguments can
      always be donated.
    **options: keyword arguments of `jax.jit`. `static_argnums`, `static_argnames`,
      `donate_argnums`, `in_shardings`, … refer to the arguments of `torch_function`.
      One more, `buckets`, has sizes that share a program, by argument name and
      dimension: "pow2", a list of padded sizes, or a function that returns the padded
      size of a size.

  Returns:
    A function of tensors with the signature of `torch_function`, with `.lower` and
    `.trace`.

  Raises:
    TypeError: `jax.jit` has no such option, or `torch_function` is not callable.
    ValueError: the function has no argument of a given number or name.
    BucketError: in a call, an operation cannot run at a padded size.

  >>> import torch, torchax
  >>> drop = jax_jit(lambda x: torch.nn.functional.dropout(x, 0.5))
  >>> x = torch.ones(100, device="jax")
  >>> torch.equal(drop(x), drop(x))
  False
  >>> power = jax_jit(lambda x, n: x**n, static_argnums=1)
  >>> power(x[:2] + 1, 3)
  tensor([8., 8.], device='jax:0')
  >>> mean = jax_jit(lambda x: x.mean(), buckets={"x": {0: "pow2"}})
  >>> mean(x)
  tensor(1., device='jax:0')
  """
  kwargs = merge("jax_jit", jax.jit, kwargs_for_jax_jit, options, ("buckets",))
  if torch_function is None:
    return functools.partial(jax_jit, kwargs_for_jax_jit=kwargs)
  if not callable(torch_function):
    raise TypeError(
      "jax_jit expects a function or a module, but got "
      f"{type(torch_function).__name__}."
    )
  return Jitted(torch_function, kwargs)


def wrap_jax_jit(
  torch_function: Callable[P, R],
  jax_jit_func: Callable = jax.jit,
  kwargs_for_jax: dict[str, Any] | None = None,
) -> Jitted[P, R]:
  """Compile a function as `jax_jit` does, by another function than `jax.jit`.

  Args:
    torch_function: function or module.
    jax_jit_func: function with the arguments of `jax.jit`.
    kwargs_for_jax: keyword arguments of `jax_jit_func`.

  Returns:
    A function of tensors with the signature of `torch_function`.

  >>> def keeping(f, **kwargs):
  ...   return jax.jit(f, keep_unused=True, **kwargs)
  >>> wrap_jax_jit(torch.exp, keeping)(torch.zeros(2, device="jax"))
  tensor([1., 1.], device='jax:0')
  """
  return Jitted(torch_function, kwargs_for_jax or {}, jit=jax_jit_func)
