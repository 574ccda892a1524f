"""The `op` decorator, which registers a lowering.

A lowering is a pure JAX function with the ATen signature:

  @op(aten.roll)
  def _aten_roll(self, shifts, dims=()):
    return jnp.roll(self, shifts, axis=dims or None)

Tensors arrive as arrays, lists of integers as tuples, dtypes as torch dtypes, numbers
as Python numbers unless `dynamic` names the argument. (In the library's own lowerings,
which take `op` from `builtin.py`, those in Tensor, Scalar and float places arrive as
weakly typed scalars that may be traced, unless `static` names the argument.) The
arguments `device`, `layout`, `pin_memory`, `memory_format` and `non_blocking` never
arrive. The in-place form (`aten.relu_`) and the `out=` form follow from the functional
one by torch's schema.
"""

from collections.abc import Callable

from torchax.registry.operators import Kind, Operator, register


def op(
  *aten,
  kind: Kind | None = None,
  static: tuple[str, ...] = (),
  dynamic: tuple[str, ...] = (),
  compiled: bool | Callable[[tuple, dict], bool] | None = None,
  check: Callable | None = None,
  rules: Callable | None = None,
  prepare: Callable[[dict], None] | None = None,
  fits: Callable | None = None,
  is_jax_function: bool = True,
  needs_env: bool = False,
  is_view_op: bool = False,
  is_user_defined: bool = False,
  index_results: tuple[int, ...] = (),
  takes_cpu: bool = False,
  distribution: str = "",
  adds_up: bool = False,
  is_exact: bool = False,
  words: Callable[..., int] | None = None,
  on_host: Callable | None = None,
  overwrites: bool = False,
  is_builtin: bool = False,
) -> Callable:
  """Registers the decorated function as the lowering of one or more operations.

  It replaces a lowering that exists.

  Args:
    *aten: overloads, or packets for all functional overloads of a name.
    kind: what the function consumes; by default follows from the three flags,
      which are those of upstream.
    static: names of float or Scalar arguments that a built-in lowering needs as Python
      values.
    dynamic: names of numbers that may change without recompiling; in eager calls they
      arrive as traced scalars.
    compiled: False where the result's shape depends on data, or a function of
      (args, kwargs) that tells. By default it is tried: calls with arguments for which
      the function fails compiled run without, after one warning in the log.
    check: called with torch's arguments before anything is drawn or computed; raises
      where they are wrong.
    rules: called with the arguments, tensors or arrays; gives the rules for the numbers
      of its indices (`registry/index_rules.py`).
    prepare: for `static` numbers that may change after all: the first ones are compiled
      for, all others are operands, once this function was called on the host with
      torch's arguments by name, which it may change: for numbers that are computed in
      Python's precision, and for those that have code of their own, which it makes a
      `StaticValue`.
    fits: called with the arguments, whose arrays have shapes only, where numbers are
      operands by `prepare`: raises for those that the shapes do not allow. Of others
      the function sees the numbers. It is called once for each number and shape.
    is_jax_function: it takes arrays (default) instead of tensors.
    needs_env: it takes the environment as `env=`.
    is_view_op: it sees views as such.
    is_user_defined: it is meant to replace what exists, which is then no warning.
    index_results: places of the results that are indices.
    takes_cpu: it takes CPU tensors beside jax tensors.
    distribution: what it draws, for ledgers, where its name does not say it.
    adds_up: a sampler that adds floats up; eagerly it is compiled as functions of users
      are, so that it adds them in the order in which these do.
    is_exact: a sampler of integers, comparisons and at most one rounding; its bits are
      the same whatever compiles it, so it is compiled quickly.
    words: of an exact sampler that draws by `threefry.two_words` once: called with its
      arguments, whose arrays have shapes only, gives the number of elements drawn. It
      may get the words in place of its key.
    on_host: the same for numpy arrays, with the same bits, of an operation that only
      moves elements or rounds each once; None for arguments that it leaves to the
      lowering. It runs while shapes are new.
    overwrites: its in-place form uses nothing of its target but shape and dtype.
    is_builtin: it is one of the library's own; see `ops_registry.py`.

  Raises:
    ValueError: it is built in, and so is a lowering that the operation already has.

  Warns:
    UserWarning: it replaces a lowering, and comes from code outside of the library.
  """

  def register_all(func):
    for torch_op in aten:
      register(
        Operator(
          torch_op,
          func,
          is_jax_function=is_jax_function,
          needs_env=needs_env,
          is_view_op=is_view_op,
          is_user_defined=is_user_defined,
          kind=kind,
          static=static,
          dynamic=dynamic,
          compiled=compiled,
          check=check,
          rules=rules,
          prepare=prepare,
          fits=fits,
          index_results=index_results,
          takes_cpu=takes_cpu,
          distribution=distribution,
          adds_up=adds_up,
          is_exact=is_exact,
          words=words,
          on_host=on_host,
          overwrites=overwrites,
          is_builtin=is_builtin,
        )
      )
    return func

  return register_all
