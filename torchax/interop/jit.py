"""`jax_jit`: `jax.jit` for functions of tensors.

The key, the tensors that the function closes over and the generators it draws with are
operands of the compiled function. In-place changes of arguments and closed-over tensors
reach the caller. The user's argument numbers and shardings are untouched: they are
shifted past the operands that come first.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Unpack, overload

import jax

from torchax import amp
from torchax.compat import jax_compat
from torchax.core import grad_mode, host_numbers, programs
from torchax.core.explanations import donated, donated_twice
from torchax.core.partitions import Partition, is_array
from torchax.core.static_values import StaticValue
from torchax.core.storage import active
from torchax.core.tracebacks import ending_at_the_user, hide
from torchax.devices import placement
from torchax.environment import default_env
from torchax.errors import MixedDeviceError
from torchax.interop.options import JitOptions, merged, with_names
from torchax.rng import NewOperands, current
from torchax.tensor import Tensor, new_tensor
from torchax.tracing import (
  autograd_bridge,
  environments,
  program_keys,
  static_arguments,
)
from torchax.tracing.conversions import arrays_of, tensors_of
from torchax.tracing.specialization import ORDINARY
from torchax.tracing.trace import Options, Traced
from torchax.types import P, R
from torchax.view import View

# Operands in front of the user's arguments: rng, (captured, specialization, *numbers).
LEADING = 2

_ARGNUMS = ("static_argnums", "donate_argnums")

Q = ParamSpec("Q")


def shift_argnums(argnums):
  """Argument numbers of the user as those of the pure function.

  Negative numbers count from the end, which the leading operands do not move.
  """
  if argnums is None:
    return None
  if isinstance(argnums, int):
    return argnums + LEADING if argnums >= 0 else argnums
  return tuple(shift_argnums(number) for number in argnums)


def shift_jit_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
  """`jax.jit`'s keyword arguments for the pure function."""
  shifted = dict(kwargs)
  for name in _ARGNUMS:
    if shifted.get(name) is not None:
      shifted[name] = shift_argnums(shifted[name])
  if "in_shardings" in shifted:
    shardings = shifted["in_shardings"]
    # A tuple or list matches the arguments one by one; anything else, all of them.
    if isinstance(shardings, tuple | list):
      shifted["in_shardings"] = (None, None, *shardings)
    else:
      shifted.pop("in_shardings")
      shifted["_all_arguments"] = shardings
  if "out_shardings" in shifted:
    shifted["out_shardings"] = ((shifted["out_shardings"], None), None)
  return shifted


class Jitted(Generic[P, R]):
  """A compiled function of tensors; what `jax_jit` returns.

  It has the name, the docstring and the signature of the function itself; as an
  attribute of a class it is a method.

  Attributes:
    traced: the torch function with its operands.
  """

  def __init__(
    self,
    function: Callable[P, R],
    jit_kwargs: dict[str, Any],
    captured=(),
    jit: Callable = jax.jit,
  ):
    if jit is jax.jit:
      jit_kwargs = with_names("jax_jit", function, jit_kwargs, ("static", "donate"))
    options = Options(lifts=True, records=True, hands_out=True, takes_numbers=True)
    self.traced = Traced(function, options, captured)
    self._compile = jit
    self._pure = self.traced.pure
    self._env = default_env()
    kwargs = shift_jit_kwargs(jit_kwargs)
    self._all_arguments = kwargs.pop("_all_arguments", None)
    self._kwargs = kwargs
    self._by_arity: dict[int, Any] = {}
    self._jitted = None if self._all_arguments is not None else self._jit(kwargs)
    functools.update_wrapper(self, function, updated=())

  def _jit(self, kwargs) -> Any:
    counted = programs.Counted(self.traced.__name__, is_of_user=True)

    def pure(rng, operands, *args, **kwargs):
      result = counted.traced(self.traced, rng, operands, *args, **kwargs)
      self.traced.note_trace(operands, args, kwargs)
      return result

    # The name alone: by `__wrapped__` JAX would find the user's signature, which lacks
    # the operands in front.
    pure.__name__ = self.traced.__name__
    return counted.of(self._compile(pure, **kwargs))

  def _transformed(self, n_args: int) -> Any:
    if self._jitted is not None:
      return self._jitted
    if n_args not in self._by_arity:
      shardings = (None, None, *[self._all_arguments] * n_args)
      self._by_arity[n_args] = self._jit({**self._kwargs, "in_shardings": shardings})
    return self._by_arity[n_args]

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
    try:
      try:
        return self.call(None, args, kwargs)
      except (TypeError, ValueError, RuntimeError) as error:
        self.reword(error, args, kwargs)
        raise
    except Exception as error:
      hide(error)
      raise

  def reword(self, error: Exception, args, kwargs) -> None:
    """Raises in other words what JAX says of arguments and arrays; else returns.

    Args:
      error: what a call raised.
      args, kwargs: of the call.
    """
    name = self.traced.__name__
    if jax_compat.is_about_devices(error):
      message = placement.MIXED.format(what=name, found=error)
      raise MixedDeviceError(message) from error
    if jax_compat.is_about_deletion(error):
      raise donated(name) from error
    if jax_compat.is_about_donation(error):
      raise donated_twice(name, self._shared_memory(args, kwargs)) from error
    refused = jax_compat.refused_argument(error)
    if refused is not None:
      kind, place = refused
      raise TypeError(
        f"`{name}` was given an object of the class {kind} as {place}. A compiled "
        "function takes tensors and numbers, and flags, strings, dtypes and devices. "
        "Name the place of anything else that has a hash in `static_argnums` or "
        "`static_argnames`, or close over it."
      ) from error
    if jax_compat.is_about_static_arguments(error):
      raise ValueError(
        f"`{name}` has a static argument without a hash: a list, a dict or a tensor. "
        "Static arguments are part of what a function is compiled for. Pass a tuple, "
        f"or leave its place out of `static_argnums`. JAX says: {error}"
      ) from error

  def _shared_memory(self, args, kwargs) -> list[list[int]]:
    """Shapes of the tensors that are arguments and closed over at once."""
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

  def call(self, extra, args, kwargs, settles=True, alive=None) -> Any:
    """Runs the function.

    Args:
      extra: static, and part of what the function was compiled for.
      args, kwargs: of the function.
      settles: apply what it changed in place.
      alive: kept as long as the result may be differentiated.
    """
    leaves, args, kwargs = _flatten(args, kwargs)
    jitted = self._jitted or self._transformed(len(args))
    traced, pure = self.traced, self._pure
    out = NotImplemented
    if not pure.generators:  # the common case; spares the call a Python closure
      try:
        operands = traced.operands(leaves, extra)
        with current().lock:
          rng = pure.values()
          (out, effects), advance = jitted(rng, operands, *args, **kwargs)
          if advance is not None:
            pure.commit(advance)
      except NewOperands as found:
        found.provide()
    if out is NotImplemented:

      def run(operands):
        nonlocal rng
        rng = operands
        operands = traced.operands(leaves, extra)
        return jitted(rng, operands, *args, **kwargs)

      out, effects = pure.run(run)
    if active.boundary is not None:
      for guards in active.boundary.guards_around():
        guards.guard_on_function(traced.guards)
    if effects is not None:
      if settles:
        effects.apply(leaves)
      if effects.tape is not None:
        treedef = jax.tree.structure((args, kwargs))
        numbers = host_numbers.all_given()
        called = (leaves, treedef, rng, alive, amp.dtype_in_force(), numbers)
        again = functools.partial(self._differentiate_again, called)
        results = (out, effects.assigned)
        out, assigned = autograd_bridge.attach(effects.tape, leaves, results, again)
        if settles:
          effects.assign(assigned)
        if effects.environments:
          out = environments.given_back(out, effects.environments)
        return tensors_of(out)
      if settles and effects.targets:
        effects.assign(grad_mode.stopped(effects.assigned))
      if effects.environments:
        out = grad_mode.stopped(out)
        return tensors_of(environments.given_back(out, effects.environments))
    if type(out) is jax_compat.ArrayImpl:  # typed keys are of another class
      return new_tensor(out, self._env)
    return tensors_of(grad_mode.stopped(out))

  def _differentiate_again(self, called, program, gradients):
    """Gradients of a recorded call as tensors that can be differentiated themselves.

    The function is run once more, with the numbers that it drew.
    """
    leaves, treedef, rng, alive, autocast, numbers = called
    given = Partition(leaves, is_array)
    jitted = program.again.get(given)
    if jitted is None:
      static = given.without_arrays()
      function = functools.partial(self._gradient, program, static, treedef, autocast)
      jitted = program.again[static] = Jitted(
        function, {}, self.traced.captures.tensors
      )
    args = (rng, given.dynamic, list(gradients))
    with host_numbers.given(numbers):
      return jitted.call(None, args, {}, settles=False, alive=alive)

  def _gradient(self, program, given, treedef, autocast, rng, tensors, gradients):
    leaves = given.filled(tensors)
    args, kwargs = static_arguments.unbox(jax.tree.unflatten(treedef, leaves))
    with self._pure.replay(arrays_of(rng)), amp.resumed(autocast):
      out = self.traced.function(*args, **kwargs)
    return program.gradients_of(out, leaves, gradients)

  @ending_at_the_user
  def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
    """`jax.jit(…).lower` for these arguments; nothing is run, no state advances."""
    leaves, args, kwargs = _flatten(args, kwargs)
    jitted = self._transformed(len(args))
    return self._pure.try_abstractly(
      lambda rng: jitted.lower(rng, self.traced.operands(leaves), *args, **kwargs)
    )

  @ending_at_the_user
  def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
    """`jax.jit(…).trace` for these arguments; nothing is run, no state advances."""
    leaves, args, kwargs = _flatten(args, kwargs)
    jitted = self._transformed(len(args))
    return self._pure.try_abstractly(
      lambda rng: jitted.trace(rng, self.traced.operands(leaves), *args, **kwargs)
    )

  def abstractly(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Describe what a call would depend on and do; nothing is run, no state advances.

    Returns:
      What it is compiled for by name, and names of the argument leaves; its effects;
      how far it moves the random stream.
    """
    leaves, args, kwargs = _flatten(args, kwargs)
    jitted = self._transformed(len(args))
    named = self._with_static(args, kwargs)

    def trace(rng):
      operands = self.traced.operands(leaves)
      (_, effects), advance = jitted.eval_shape(rng, operands, *args, **kwargs)
      form = program_keys.key_of_call(self.traced, operands[1] or ORDINARY, *named)
      return form, effects, advance

    return self._pure.try_abstractly(trace)

  def _with_static(self, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """The arguments, with those marked that are static by number or name."""
    numbers, names = [
      (given,) if isinstance(given, int | str) else tuple(given or ())
      for given in map(self._kwargs.get, ("static_argnums", "static_argnames"))
    ]
    # Negative numbers count from the end.
    places = {n - LEADING if n >= 0 else n + len(args) for n in numbers}
    return (
      tuple([StaticValue(v) if n in places else v for n, v in enumerate(args)]),
      {name: StaticValue(v) if name in names else v for name, v in kwargs.items()},
    )


def _flatten(args, kwargs):
  """Argument leaves, and the arguments with arrays for tensors."""
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
  leaves, treedef = jax.tree.flatten(static_arguments.box_arguments((args, kwargs)))
  args, kwargs = jax.tree.unflatten(treedef, arrays_of(leaves))
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


@ending_at_the_user
def jax_jit(
  torch_function=None,
  kwargs_for_jax_jit=None,
  fix_for_buffer_donation=False,
  **options,
):
  """Compiles a function of tensors with `jax.jit`.

  The random stream is carried as an operand: every call draws new numbers, the same
  that the function would draw eagerly, and re-seeding never recompiles. Tensors that
  the function closes over (a model, an optimizer's state) are operands as well, found
  while tracing; changes in place reach them and the arguments.

  Args:
    torch_function: function or module; it runs in Python once for each combination of
      argument shapes, dtypes and static values. Without it, a decorator is returned:
      `@jax_jit(donate_argnums=0)`.
    kwargs_for_jax_jit: the options in a dict, as upstream's callers pass them.
    fix_for_buffer_donation: accepted for upstream's callers; arguments can always be
      donated.
    **options: of `jax.jit`: `static_argnums`, `static_argnames`, `donate_argnums`,
      `in_shardings`, … all refer to the arguments of `torch_function`.

  Returns:
    A function of tensors with the signature of `torch_function`, with `.lower` and
    `.trace`.

  Raises:
    TypeError: an option that `jax.jit` does not have, or no function.
    ValueError: static or donated arguments that the function does not have.

  >>> import torch, torchax
  >>> drop = jax_jit(lambda x: torch.nn.functional.dropout(x, 0.5))
  >>> x = torch.ones(4, device="jax")
  >>> torch.equal(drop(x), drop(x))
  False
  >>> power = jax_jit(lambda x, n: x**n, static_argnums=1)
  >>> power(x + 1, 3)
  tensor([8., 8., 8., 8.], device='jax:0')
  """
  kwargs = merged("jax_jit", jax.jit, kwargs_for_jax_jit, options)
  if torch_function is None:
    return functools.partial(jax_jit, kwargs_for_jax_jit=kwargs)
  if not callable(torch_function):
    raise TypeError(
      "jax_jit compiles a function or a module, but got "
      f"{type(torch_function).__name__}."
    )
  return Jitted(torch_function, kwargs)


def wrap_jax_jit(
  torch_function: Callable[P, R],
  jax_jit_func: Callable = jax.jit,
  kwargs_for_jax: dict[str, Any] | None = None,
) -> Jitted[P, R]:
  """`jax_jit` with another function in place of `jax.jit`, of the same arguments."""
  return Jitted(torch_function, kwargs_for_jax or {}, jit=jax_jit_func)
