"""Options of the wrappers: keyword arguments of JAX's transformations.

Users pass them as keywords, as in JAX, or in a dict, as upstream does. Both mean the
same, and are checked when a function is wrapped. Argument numbers and names refer to
the user's function.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from torchax.compat import user_code
from torchax.compat.user_code import signature_of
from torchax.tracing.buckets import Sizes

ArgNums = int | Sequence[int] | None
ArgNames = str | Iterable[str] | None


class JitOptions(TypedDict, total=False):
  """Keyword arguments of `jax.jit`, and `buckets` (`tracing/buckets.py`)."""

  in_shardings: Any
  out_shardings: Any
  static_argnums: ArgNums
  static_argnames: ArgNames
  donate_argnums: ArgNums
  donate_argnames: ArgNames
  keep_unused: bool
  device: Any
  backend: str | None
  inline: bool
  compiler_options: dict[str, Any] | None
  buckets: Mapping[str, Mapping[int, Sizes]]


class GradOptions(TypedDict, total=False):
  """Keyword arguments of `jax.value_and_grad`."""

  argnums: int | Sequence[int]
  has_aux: bool
  holomorphic: bool
  allow_int: bool
  reduce_axes: Sequence[Any]


class CheckpointOptions(TypedDict, total=False):
  """Keyword arguments of `jax.checkpoint`."""

  prevent_cse: bool | Sequence[bool]
  policy: Callable[..., Any] | None
  static_argnums: int | tuple[int, ...]
  static_argnames: str | Iterable[str]
  concrete: bool


class ShardMapOptions(TypedDict, total=False):
  """Keyword arguments of `jax.shard_map`."""

  mesh: Any
  in_specs: Any
  out_specs: Any
  axis_names: Any
  check_vma: bool


def merge(
  name: str,
  transform: Callable,
  given: Any,
  keywords: Mapping[str, Any],
  own: tuple[str, ...] = (),
) -> dict[str, Any]:
  """Merge the options of a wrapper from the dict and from the keywords.

  Args:
    name: name of the wrapper, for errors.
    transform: JAX's function with these keywords.
    given: options as a dict, or None.
    keywords: options as keywords.
    own: keywords of the wrapper itself, which older versions of JAX lack.

  Raises:
    TypeError: `given` is not a dict, an option is given twice, or JAX lacks it.
  """
  if given is not None and not isinstance(given, Mapping):
    raise TypeError(
      f"{name} expects the options of `{_name_of(transform)}` as keywords, or as one "
      f"dict, but got {given!r} as its second argument. Write {name}(f, name=value)."
    )
  options = dict(given or {})
  for key in keywords:
    if key in options:
      raise TypeError(f"{name} got {key!r} twice: in the dict and as a keyword.")
  options.update(keywords)
  jax_names = _keywords_of(transform)
  for key in options if jax_names else ():
    if key not in jax_names and key not in own:
      close = difflib.get_close_matches(str(key), (*jax_names, *own), 1)
      hint = f"Did you mean {close[0]!r}? " if close else ""
      raise TypeError(
        f"{name} got an unexpected keyword {key!r}. {hint}It takes those of "
        f"`{_name_of(transform)}`: {', '.join(jax_names)}."
      )
  return options


def _name_of(transform: Callable) -> str:
  return f"jax.{getattr(transform, '__name__', transform)}"


@functools.lru_cache(maxsize=64)
def _keywords_of(transform: Callable) -> tuple[str, ...]:
  """Return the keywords of a transformation; () if its signature does not list them."""
  signature = signature_of(transform)
  if signature is None or _takes(signature, inspect.Parameter.VAR_KEYWORD):
    return ()
  return tuple(signature.parameters)[1:]


def with_names(
  name: str, function: Callable, options: dict[str, Any], kinds: Sequence[str]
) -> dict[str, Any]:
  """Complete the options: derive argument numbers from names, and names from numbers.

  So an argument given by number is also static or donated when it is passed by name,
  and the reverse, as with `jax.jit`.

  Args:
    name: name of the wrapper, for errors.
    function: the user's function.
    options: options of the transformation.
    kinds: kinds of arguments to complete: "static", "donate".

  Raises:
    ValueError: the function has no such argument, or one is static and donated.
  """
  given = [
    kind for kind in kinds if any(options.get(key) is not None for key in _keys(kind))
  ]
  signature = signature_of(function) if given else None
  if signature is None:
    return options
  options, named = dict(options), {}
  for kind in given:
    numbers_key, names_key = _keys(kind)
    numbers, names = _numbers_and_names(
      signature, options.get(numbers_key), options.get(names_key)
    )
    _check_arguments(
      name, function, signature, (numbers_key, numbers), (names_key, names)
    )
    options[numbers_key] = numbers
    options[names_key] = named[kind] = names
  both = sorted(set(named.get("static", ())) & set(named.get("donate", ())))
  if both:
    raise ValueError(
      f"{name} cannot donate what is static, but both name the arguments {both}."
    )
  return options


def for_method(
  method: Callable, others: Iterable[Callable], options: dict[str, Any]
) -> dict[str, Any]:
  """Remove the names of arguments that only other methods of a module have.

  Args:
    method: the method that gets the options.
    others: methods of the module that are compiled with the same options.
    options: options of the transformation. Names that no method has stay in them, so
      that `with_names` raises.
  """
  signature = signature_of(method)
  if signature is None or _takes(signature, inspect.Parameter.VAR_KEYWORD):
    return options
  signatures = [each for each in map(signature_of, others) if each is not None]
  foreign = {name for each in signatures for name in each.parameters}
  foreign -= set(signature.parameters)
  options = dict(options)
  for key in ("static_argnames", "donate_argnames"):
    names = options.get(key)
    if names is not None:
      names = (names,) if isinstance(names, str) else tuple(names)
      options[key] = tuple(name for name in names if name not in foreign)
  if isinstance(options.get("buckets"), Mapping):
    known = {k: v for k, v in options["buckets"].items() if k not in foreign}
    options["buckets"] = known or None
  return options


def _keys(kind: str) -> tuple[str, str]:
  return f"{kind}_argnums", f"{kind}_argnames"


def _takes(signature: inspect.Signature, kind) -> bool:
  return any(parameter.kind is kind for parameter in signature.parameters.values())


def _numbers_and_names(
  signature: inspect.Signature, numbers: ArgNums, names: ArgNames
) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """Derive the numbers from the names, or the reverse; keep both if both are given."""
  positional = user_code.positional(signature)
  if isinstance(numbers, int):
    numbers = (numbers,)
  if isinstance(names, str):
    names = (names,)
  if numbers is None:
    names = tuple(names or ())
    indices = {p.name: index for index, p in enumerate(positional)}
    return tuple(indices[n] for n in names if n in indices), names
  numbers = tuple(numbers)
  if names is not None:
    return numbers, tuple(names)
  # A negative number counts from the end of a call's arguments, so it has no name.
  parameters = [
    positional[number] for number in numbers if 0 <= number < len(positional)
  ]
  by_name = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
  return numbers, tuple(by_name)


def _check_arguments(
  name: str, function: Callable, signature, by_number, by_name
) -> None:
  numbers_key, numbers = by_number
  names_key, names = by_name
  user = getattr(function, "__name__", type(function).__name__)
  positional = user_code.positional(signature)
  count = len(positional)
  if not _takes(signature, inspect.Parameter.VAR_POSITIONAL):
    wrong = [number for number in numbers if not -count <= number < count]
    if wrong:
      raise ValueError(
        f"{name} was given {numbers_key}={numbers}, but {user}{signature} takes "
        f"{count} positional argument(s)."
      )
  if not _takes(signature, inspect.Parameter.VAR_KEYWORD):
    unknown = [each for each in names if each not in signature.parameters]
    if unknown:
      raise ValueError(
        f"{name} was given {names_key}={names}, but {user}{signature} has no argument "
        f"{unknown[0]!r}."
      )
