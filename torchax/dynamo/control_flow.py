"""`torch.cond` and `torch.while_loop` of a graph as JAX's control flow."""

from collections.abc import Callable

import jax

from torchax.errors import OperatorNotFound
from torchax.ops.names import higher_order, present
from torchax.tensor import Tensor, new_tensor


def run(env, target, args, kwargs, run_graph: Callable):
  """Runs an operation that takes graphs.

  Args:
    env: the environment.
    target: the operation.
    args, kwargs: tensors, numbers, and `GraphModule`s for functions.
    run_graph: `(module, arguments) -> results` runs one of them.
  """
  return _HANDLERS[target](env, run_graph, *args, **kwargs)


def require_known(target) -> None:
  """Raises OperatorNotFound for an operation that `run` does not take."""
  if target not in _HANDLERS:
    known = ", ".join(sorted(str(operation) for operation in _HANDLERS))
    raise OperatorNotFound(
      f'torch.compile(backend="jax") cannot run {target}, which takes graphs; it '
      f"runs {known}."
    )


def _on_arrays(env, run_graph, module, numbers=()):
  """A graph as a function of arrays, for results that are tensors."""

  def function(*arrays):
    given = [new_tensor(array, env) for array in arrays]
    results = run_graph(module, [*_merged(numbers, given)])
    results = results if isinstance(results, list | tuple) else [results]
    return [result.jax() for result in results]

  return function


def _split(operands) -> tuple[list, tuple]:
  """The arrays of tensors; and for each operand a number, or `_TENSOR`."""
  arrays = [value.jax() for value in operands if isinstance(value, Tensor)]
  return arrays, tuple(_TENSOR if isinstance(v, Tensor) else v for v in operands)


_TENSOR = object()


def _merged(numbers, tensors):
  rest = iter(tensors)
  return (next(rest) if number is _TENSOR else number for number in numbers)


def _cond(env, run_graph, predicate, on_true, on_false, operands=()):
  arrays, numbers = _split(operands)
  if isinstance(predicate, Tensor):
    predicate = predicate.jax().reshape(()).astype(bool)
  branches = [_on_arrays(env, run_graph, m, numbers) for m in (on_true, on_false)]
  results = jax.lax.cond(predicate, *branches, *arrays)
  return tuple(new_tensor(result, env) for result in results)


def _while_loop(env, run_graph, condition, body, carried, others=()):
  arrays, numbers = _split([*carried, *others])
  n_carried = sum(isinstance(value, Tensor) for value in carried)
  fixed = arrays[n_carried:]
  test = _on_arrays(env, run_graph, condition, numbers)
  step = _on_arrays(env, run_graph, body, numbers)
  results = jax.lax.while_loop(
    lambda state: test(*state, *fixed)[0].reshape(()),
    lambda state: [
      new.astype(old.dtype) for new, old in zip(step(*state, *fixed), state)
    ],
    arrays[:n_carried],
  )
  return tuple(new_tensor(result, env) for result in results)


def _invoke_subgraph(env, run_graph, module, identifier, *operands):
  return tuple(run_graph(module, list(operands)))


_HANDLERS = present(
  {
    higher_order.cond: _cond,
    higher_order.while_loop: _while_loop,
    higher_order.invoke_subgraph: _invoke_subgraph,
  }
)
