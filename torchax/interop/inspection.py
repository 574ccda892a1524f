"""`torchax.explain`: operands, guards, constants, effects and draws of a function.

It traces a call with `Jitted.describe_call` and describes the result.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator
from typing import Any

from torchax.compat.user_code import function_of
from torchax.core.static_values import describe_value, key_of
from torchax.core.tracebacks import hide_library_frames
from torchax.interop.jit import Jitted
from torchax.interop.module import JittableModule
from torchax.interop.wrapper import ModuleWrapper
from torchax.tracing import program_keys


@dataclasses.dataclass(frozen=True)
class Explanation:
  """Dependencies and effects of a compiled function's program.

  The dicts map a name to a description; they show the current values.

  Attributes:
    function: name of the function.
    operands: inputs of every call: arguments, captured tensors, optimizer settings, key
      and count of the random stream. New values do not trigger recompilation.
    guards: values that Python branched on while the function was traced. A new value
      triggers recompilation by the next call.
    constants: constants from the function's closure and globals. As in `jax.jit`, the
      program keeps the old value after a change: pass them as arguments.
    effects: tensors that the function changes in place, including `.grad`, and module
      attributes that it assigns tensors to.
    draws: number of keys that a call takes from the stream.
    compilations: number of traces so far.
    reasons: differences between the last trace and the most similar earlier one.

  >>> drop = torch.nn.Dropout(0.5)
  >>> explain(drop, torch.ones(2, device="jax")).operands
  {'input': 'float32[2]', 'random stream': 'key and count'}
  """

  function: str
  operands: dict[str, str]
  guards: dict[str, str]
  constants: dict[str, str]
  effects: dict[str, str]
  draws: int
  compilations: int
  reasons: tuple[str, ...]

  def __str__(self) -> str:
    lines = [self.function]
    for title in ("operands", "guards", "constants", "effects"):
      rows = getattr(self, title)
      width = max(map(len, rows), default=0)
      lines.append(f"{title}:" if rows else f"{title}: none")
      lines += [f"  {name:<{width}}  {value}".rstrip() for name, value in rows.items()]
    lines.append(f"draws: {self.draws}")
    lines.append(f"compiled: {self.compilations} times")
    lines += [f"  the last time for {reason}" for reason in self.reasons]
    return "\n".join(lines)


@hide_library_frames
def explain(function: Callable, *args: Any, **kwargs: Any) -> Explanation:
  """Explain the dependencies of a call of a compiled function.

  The call does not run, and no random stream advances.

  Args:
    function: result of `jax_jit` or `torchax.compile`. Other functions and modules are
      explained as compiled by `jax_jit`.
    *args, **kwargs: arguments of the call. The function is traced for them unless a
      trace exists.

  Returns:
    The explanation; `print` formats it.

  Raises:
    TypeError: `function` is not callable, or is a result of torch.compile or
      torch.export.

  >>> import torch, torchax
  >>> scale = 3.0
  >>> double = torch.tensor(2.0)
  >>> f = torchax.interop.jax_jit(lambda x, flip: (-x if flip else x) * double * scale)
  >>> explanation = explain(f, torch.ones(2, device="jax"), True)
  >>> explanation.operands["x"], explanation.guards["flip"]
  ('float32[2]', 'True')
  >>> explanation.constants
  {'scale': '3.0'}
  """
  if isinstance(function, types.MethodType) and isinstance(function.__func__, Jitted):
    args = (function.__self__, *args)
    function = function.__func__
  return _explanation_of(_jitted_of(function), args, kwargs)


def _jitted_of(function) -> Jitted:
  if isinstance(function, Jitted):
    return function
  if isinstance(function, JittableModule):
    return function.jitted("forward")
  is_from_dynamo = hasattr(function, "_torchdynamo_orig_callable")
  if is_from_dynamo or isinstance(function, ModuleWrapper):
    raise TypeError(
      "explain expects a result of `jax_jit` or `torchax.compile`, but got a function "
      "of torch.compile or torch.export. Ask torch with `torch._dynamo.explain(f)(…)` "
      "and TORCH_LOGS=guards,recompiles, or pass the function that was compiled."
    )
  if not callable(function):
    raise TypeError(
      f"explain expects a function or a module, but got {type(function).__name__}."
    )
  return Jitted(function, {})


def _explanation_of(jitted: Jitted, args: tuple, kwargs: dict[str, Any]) -> Explanation:
  traced = jitted.traced
  (cache_key, arguments), effects, advance = jitted.describe_call(args, kwargs)
  captured = program_keys.captured_names(traced)
  operands = {name: cache_key[name] for name in arguments}
  operands |= {
    name: f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
    for name, tensor in zip(captured, traced.captures.tensors)
  }
  operands |= {str(number): number.describe() for number in traced.numbers.expressions}
  for index, draws in enumerate(traced.keyed.draws_of_generators()):
    operands[f"generator {index}"] = f"{draws} draws"
  if advance is not None and advance.draws:
    operands["random stream"] = "key and count"
  return Explanation(
    function=traced.__name__,
    operands=operands,
    guards={name: text for name, text in cache_key.items() if name not in operands},
    constants=dict(_constants(traced.function)),
    effects=_effects(effects, arguments, traced, captured),
    draws=0 if advance is None else advance.total,
    compilations=traced.history.count,
    reasons=traced.history.reasons,
  )


def _effects(effects, arguments: list[str], traced, captured: list[str]) -> dict:
  if effects is None:
    return {}
  names = {id(t._storage): name for t, name in zip(traced.captures.tensors, captured)}
  kinds = {change.name(arguments, names): change.kind for change in effects.changes}
  paths = {id(values.module): path for path, values in traced.guards.modules}
  for target in effects.targets:
    kinds[target.describe(paths, arguments)] = target.kind
  return kinds


def _constants(function: Callable) -> Iterator[tuple[str, str]]:
  """Yield (name, description) of constants in a function's globals and closure."""
  function = function_of(function)
  code = getattr(function, "__code__", None)
  if code is None:
    return
  values = {name: function.__globals__.get(name) for name in code.co_names}
  for name, cell in zip(code.co_freevars, function.__closure__ or ()):
    with contextlib.suppress(ValueError):  # an unbound cell
      values[name] = cell.cell_contents
  for name, value in values.items():
    is_excluded = isinstance(value, type) or callable(value) or value is None
    if not is_excluded and key_of(value) is not None:
      yield name, describe_value(value)
