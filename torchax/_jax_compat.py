"""The only file that touches private API of JAX; `test_jax_compat.py` guards it.

What is needed: to know which trace is in progress, because a draw from a stream of
another trace would be baked in or repeated (`torchax/rng/scope.py`); and whether JAX
has started, because it does not survive a fork (`torchax/device_module.py`).
"""

import jax
from jax._src import core as _core
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _partial_eval

Tracer = jax.core.Tracer
Trace = _core.Trace
ArrayImpl = jax._src.array.ArrayImpl

# () -> bool: True once JAX has set up a device.
has_started = _xla_bridge.backends_are_initialized

_trace_context = _core.trace_ctx
_EvalTrace = _core.EvalTrace

# Traces that run the function once and leave values that do not depend on the
# differentiated input concrete. By name: the classes live in private modules.
_RUN_ONCE = frozenset({"JVPTrace", "LinearizeTrace"})
_StagingTrace = _partial_eval.DynamicJaxprTrace
_BATCHING = "BatchTrace"


def current_trace() -> Trace:
  """The innermost trace of this thread; an `EvalTrace` outside transformations."""
  return _trace_context.trace


def is_top_level() -> bool:
  """True when no JAX transformation is in progress on this thread."""
  return type(_trace_context.trace) is _EvalTrace


def is_staging() -> bool:
  """True when operations are recorded into a jaxpr instead of being run."""
  return type(_trace_context.trace) is _StagingTrace


def draw_owner() -> Trace | None:
  """The innermost trace that a draw would belong to, None when run for real.

  Differentiation is looked through: it runs a function once, with the random
  numbers as constants of the differentiation.
  """
  trace = _trace_context.trace
  while type(trace).__name__ in _RUN_ONCE:
    trace = trace.parent_trace
  return None if type(trace) is _EvalTrace else trace


def is_batching(trace: Trace) -> bool:
  """True for the trace of `jax.vmap`."""
  return type(trace).__name__ == _BATCHING


def has_abstract_value(array) -> bool:
  """True for a value that is being traced."""
  return isinstance(array, Tracer)
