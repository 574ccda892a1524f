"""JAX's named scopes of modules, for the names of operations in programs and profiles.

While JAX traces, each module runs in a scope with its path inside the calling module:
"layers.0", and in it "linear1". A backward pass of torch enters the scope of the module
that has recorded the node. torch numbers the nodes of a thread, and the log of a trace
has the number of the first node in each scope.
"""

import bisect
import contextlib
import contextvars
import operator
from collections.abc import Iterator, Sequence

import jax

from torchax.compat import private

_NAMES = "names of modules in compiled backward passes"
_next_node = private.find("torch.autograd._get_sequence_nr", _NAMES, instead=lambda: 0)
_node_number = private.find(
  "torch.autograd.graph.Node._sequence_nr", _NAMES, instead=None
)

# (number of the next node, scope) at each change of the scope; None outside of traces.
_log: contextvars.ContextVar[list[tuple[int, str]] | None] = contextvars.ContextVar(
  "scopes", default=None
)


def is_recording() -> bool:
  """Return True while a function is traced."""
  return _log.get() is not None


@contextlib.contextmanager
def recording() -> Iterator[None]:
  """Name the operations of the block, a function that is being traced."""
  outer = _log.get()
  _log.set([(_next_node(), "")])
  try:
    yield
  finally:
    _log.set(outer)


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
  """Name the operations of the block below the current scope; "" changes nothing."""
  if not name:
    yield
    return
  log = [(0, "")] if (found := _log.get()) is None else found
  _, outer = log[-1]
  log.append((_next_node(), f"{outer}/{name}" if outer else name))
  try:
    with jax.named_scope(name):
      yield
  finally:
    log.append((_next_node(), outer))


def of_backward(outputs: Sequence) -> contextlib.AbstractContextManager[None]:
  """Return a context for torch's backward pass of tensors or gradient edges.

  Its operations have JAX's names for gradients: "transpose(jvp(layers.0))/linear1".
  """
  if _node_number is None or not is_recording():
    return contextlib.nullcontext()
  return _named_nodes(outputs)


@contextlib.contextmanager
def _named_nodes(outputs: Sequence) -> Iterator[None]:
  log, handles = list(_log.get() or ()), []
  _, outer = log[-1]
  with contextlib.ExitStack() as scope:
    for node in _nodes(outputs):
      index = bisect.bisect_right(log, node._sequence_nr(), key=operator.itemgetter(0))
      name = _gradient_name(log[index - 1][1] if index else "", outer)

      def enter(_, name=name):
        scope.close()
        scope.enter_context(entered(name))

      handles.append(node.register_prehook(enter))
    try:
      yield
    finally:
      for handle in handles:
        handle.remove()


def _gradient_name(scope: str, outer: str) -> str:
  """Return the name of the gradient of a scope, below the current scope `outer`.

  In a nested backward pass, `outer` is the scope that recorded its nodes.
  """
  if outer and f"{scope}/".startswith(f"{outer}/"):
    inner = scope.removeprefix(outer).removeprefix("/")
    return transposed(inner) if inner else ""
  return transposed(scope)


def _nodes(outputs: Sequence) -> Iterator:
  """Yield the nodes of a graph, without those that accumulate into leaves."""
  found = [getattr(o, "node", None) or getattr(o, "grad_fn", None) for o in outputs]
  seen = set()
  while found:
    node = found.pop()
    if node is None or node in seen:
      continue
    seen.add(node)
    found += [following for following, _ in node.next_functions]
    if not hasattr(node, "variable"):
      yield node


def transposed(path: str) -> str:
  """Return the name that JAX gives to the gradient of a scope.

  >>> transposed("layers.0/linear1")
  'transpose(jvp(layers.0))/linear1'
  """
  outermost, *inner = path.split("/")
  return "/".join([f"transpose(jvp({outermost}))", *inner])
