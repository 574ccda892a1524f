"""Private API of JAX, used in this file only; `test_jax_compat.py` checks that.

Main uses: the current trace, since a draw from a stream of another trace would become a
constant or repeat (`rng/stream.py`); and whether JAX has started, since JAX does not
survive a fork (`devices/forks.py`). Also here: the meaning of JAX's error messages, and
differences between versions of JAX.
"""

import contextlib
import functools
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.extend import core, source_info_util
from jax.sharding import Sharding, SingleDeviceSharding

from torchax.compat import private

_REFUSED_ARGUMENT = re.compile(
  r"value is of type <class '(.+?)'> and was passed to the function at path (\S+?)\.\n"
)

Tracer = jax.core.Tracer
Trace = jax.core.Trace


# Function that pickles of arrays call to create the array; None if unknown.
rebuilt_array = private.find(
  "jax._src.array._reconstruct_array",
  "loading arrays from files of torch.save",
  instead=None,
)
# `type(array) is ArrayImpl` is faster than `isinstance(array, jax.Array)`.
ArrayImpl = private.find(
  "jax._src.array.ArrayImpl",
  "telling arrays from tracers quickly",
  instead=private.NoInstances,
)

_REFS = "mutable arrays of JAX"
# Random generator with a mutable counter.
StatefulPRNG = private.find(
  "jax.experimental.random.StatefulPRNG", _REFS, instead=private.NoInstances
)
_AbstractRef = private.find(
  "jax._src.state.types.AbstractRef", _REFS, instead=private.NoInstances
)


def is_ref(value) -> bool:
  """Return True for a traced `jax.Ref`."""
  return isinstance(getattr(value, "aval", None), _AbstractRef)


# () -> bool: True once JAX has initialized a device.
has_started = private.find(
  "jax._src.xla_bridge.backends_are_initialized",
  "telling a process that was forked from one that uses JAX",
  instead=lambda: False,
)

# Context in which JAX computes with concrete values, even inside a trace.
# `jax.ensure_compile_time_eval` does not leave a `shard_map`.
outside_of_traces = private.find(
  "jax._src.core.eval_context",
  "the first draw of a stream inside of a shard_map",
  instead=jax.ensure_compile_time_eval,
)

# Context in which a dtype of 64 bits that is asked for is used without x64 mode.
explicit_x64_dtypes = private.find(
  "jax._src.config.explicit_x64_dtypes",
  "64 bits of torch.uint64 while JAX's x64 mode is off",
  instead=lambda _: contextlib.nullcontext(),
)

# (PRNGImpl) -> None: enters an implementation in JAX's table of names.
_register_prng = private.find(
  "jax._src.random.prng.register_prng",
  'Configuration(prng_impl="torch_philox")',
  instead=lambda _: None,
)

# JAX's error for a result whose sharding does not follow from the types.
ShardingTypeError = private.find(
  "jax._src.core.ShardingTypeError",
  "operations on meshes of explicit axes",
  instead=type("ShardingTypeError", (Exception,), {}),
)

# () -> the function, or None. Deferred: its module is slow to import.
flash_attention_of_tpus = private.Later(
  "jax.experimental.pallas.ops.tpu.flash_attention.flash_attention",
  "flash attention on TPUs",
  instead=None,
)

_trace_context = private.essential(
  "jax._src.core.trace_ctx",
  "knowing which transformation a random number belongs to",
)
_TRACES = "drawing random numbers and torch.no_grad inside transformations of JAX"


def _trace_class(path: str) -> type:
  return private.find(path, _TRACES, instead=private.NoInstances)


_EvalTrace = _trace_class("jax._src.core.EvalTrace")
# Traces that run the function once and keep values concrete if they do not depend on
# the differentiated input.
_RUN_ONCE = (
  _trace_class("jax._src.interpreters.ad.JVPTrace"),
  _trace_class("jax._src.interpreters.ad.LinearizeTrace"),
)
_StagingTrace = _trace_class(
  "jax._src.interpreters.partial_eval.DynamicJaxprTrace",
)
_BatchTrace = _trace_class("jax._src.interpreters.batching.BatchTrace")
_KNOWN = (_EvalTrace, *_RUN_ONCE, _StagingTrace, _BatchTrace)
if _EvalTrace is private.NoInstances:
  # At import no transformation is in progress.
  _EvalTrace = type(_trace_context.trace)


def _require_known(trace: Trace) -> None:
  """Raise PrivateApiError if the trace may be of a class that was not found."""
  if private.NoInstances in _KNOWN and type(trace) not in _KNOWN:
    private.require(_TRACES)


def is_top_level() -> bool:
  """Return True if no JAX transformation is in progress on this thread."""
  return type(_trace_context.trace) is _EvalTrace


# () -> a tuple that changes with what traces depend on: precision, default device, x64.
trace_context = private.find(
  "jax._src.config.trace_context",
  "the fused mode of eager operations, and buckets",
)


def is_staging() -> bool:
  """Return True if operations are recorded into a jaxpr instead of being run."""
  trace = type(_trace_context.trace)
  if trace is not _StagingTrace and trace is not _EvalTrace:
    _require_known(_trace_context.trace)
  return trace is _StagingTrace


def draw_owner() -> Trace | None:
  """Return the innermost trace that owns a draw made now; None outside of traces.

  Differentiation is skipped: it runs the function once, and the random numbers are
  constants of it.
  """
  trace = _trace_context.trace
  while type(trace) in _RUN_ONCE:
    trace = trace.parent_trace
  if type(trace) is _EvalTrace:
    return None
  _require_known(trace)
  return trace


def is_batching(trace: Trace) -> bool:
  """Return True for the trace of `jax.vmap`."""
  if type(trace) is not _EvalTrace:
    _require_known(trace)
  return type(trace) is _BatchTrace


_set_current_trace = private.find(
  "jax._src.core.set_current_trace",
  "tracing a function once that closes over tensors",
  instead=None,
)


def current_trace() -> Trace | None:
  """Return the trace in progress if it can have stand-ins, else None."""
  can_have = _set_current_trace is not None and is_staging()
  return _trace_context.trace if can_have else None


def stand_in(value, trace: Trace) -> jax.Array:
  """Return a new tracer of a trace, with the shape and dtype of a value."""
  with _set_current_trace(trace):
    return jax.lax.optimization_barrier(value)


def line_of(source_info, libraries: tuple[str, ...]) -> tuple[str, int] | None:
  """Return file and line of the innermost frame outside of libraries.

  Args:
    source_info: JAX's record of the source of an operation.
    libraries: prefixes of the libraries' file paths.

  Returns:
    (file, line), or None if JAX has no such record.
  """
  record = source_info.traceback
  for frame in getattr(record, "frames", ()):
    if not frame.file_name.startswith(libraries):
      return frame.file_name, frame.line_num
  return None


def constants_of_scan(params: dict) -> int:
  """Return the number of leading operands of a scan that are constant."""
  if "num_consts" in params:
    return params["num_consts"]
  constants, _, _ = params["ft_in"].unpack()  # since JAX 0.12
  return len(constants)


def carry_of_scan(params: dict) -> int:
  """Return the number of operands of a scan that are its carry."""
  if "num_carry" in params:
    return params["num_carry"]
  _, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
  return len(carry)


def without_constants(closed: core.ClosedJaxpr) -> core.Jaxpr:
  """Return the jaxpr of a closed jaxpr, without references to its constants.

  Since JAX 0.12 both have the same class.
  """
  jaxpr = closed.jaxpr
  return jaxpr.with_consts([]) if hasattr(jaxpr, "with_consts") else jaxpr


_add_equation = private.find(
  "jax._src.interpreters.partial_eval.DynamicJaxprTrace.emit_eqn",
  "traces that take less time",
  instead=None,
)
_operand = private.find(
  "jax._src.interpreters.partial_eval.DynamicJaxprTrace.to_jaxpr_tracer",
  "traces that take less time",
  instead=None,
)


def repeat(jaxpr: core.Jaxpr, constants: Sequence) -> list:
  """Add the equations of a jaxpr without operands to the trace in progress.

  The types of their results are known, so they are not computed once more.

  Args:
    jaxpr: has constants, but no operands.
    constants: arrays and tracers, one for each constant.
  """
  # Equations on types of JAX's "hijax" need more than an entry in the trace.
  is_plain = not (jaxpr.effects or jaxpr.is_high)
  if _add_equation is None or _operand is None or not (is_plain and is_staging()):
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))()
  trace, source = _trace_context.trace, source_info_util.current()
  names = source.name_stack
  # Since JAX 0.12 constants without a value are operands.
  tracers = dict(zip([*jaxpr.constvars, *jaxpr.invars], constants))

  def tracer(atom):
    value = atom.val if isinstance(atom, core.Literal) else tracers[atom]
    return _operand(trace, value, source)

  for equation in jaxpr.eqns:
    origin = equation.source_info
    results = _add_equation(
      trace,
      [tracer(atom) for atom in equation.invars],
      [variable.aval for variable in equation.outvars],
      equation.primitive,
      equation.params,
      equation.effects,
      origin.replace(name_stack=names + origin.name_stack),
      equation.ctx,
    )
    tracers.update(zip(equation.outvars, results))
  return [tracer(atom) for atom in jaxpr.outvars]


def is_about_devices(error: Exception) -> bool:
  """Return True for JAX's error about arrays committed to different devices."""
  return "incompatible devices" in str(error)


def is_about_deletion(error: BaseException) -> bool:
  """Return True for JAX's errors about deleted arrays.

  A program that has run before raises ValueError, or an error of XLA.
  """
  is_runtime_error = isinstance(error, RuntimeError | ValueError)
  return is_runtime_error and "has been deleted" in str(error)


NO_VALUE = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerBoolConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""JAX's errors for reading the values of a tracer."""


# Messages about shapes, about slices, and about slices since JAX 0.12.
_STATIC = ("concrete values", "static integers", "static start/stop/step")


def is_about_values(error: BaseException) -> bool:
  """Return True for JAX's errors about tracers used as concrete values.

  Traced values in shapes and slices raise plain errors that name the tracer.
  """
  if isinstance(error, NO_VALUE):
    return True
  text = str(error) if type(error) in (TypeError, IndexError) else ""
  return "Tracer(" in text and any(words in text for words in _STATIC)


def is_about_donation(error: BaseException) -> bool:
  """Return True for JAX's error about memory donated and used in one call."""
  is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
  return is_of_xla and all(part in str(error) for part in ("donate", "same call"))


def refused_argument(error: BaseException) -> tuple[str, str] | None:
  """Return class and path of an argument that `jax.jit` rejects as no array."""
  if type(error) is not TypeError:
    return None
  match = _REFUSED_ARGUMENT.search(str(error))
  return None if match is None else (match[1], match[2])


def is_about_static_arguments(error: BaseException) -> bool:
  """Return True for the error of `jax.jit` about unhashable static arguments."""
  return type(error) is ValueError and "Non-hashable static arguments" in str(error)


def varying_axes(array) -> frozenset:
  """Return the mapped mesh axes over which an array varies, by its type."""
  aval = jax.typeof(array)
  manual = getattr(aval, "manual_axis_type", None)
  return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def match_varying_axes(*arrays) -> list:
  """Cast arrays to one type that varies over the union of their mapped axes.

  Loops require it of their carry, derivatives of primal and cotangent.
  """
  axes = frozenset().union(*map(varying_axes, arrays))
  if not axes:
    return list(arrays)
  missing = [tuple(axes - varying_axes(array)) for array in arrays]
  return [
    jax.lax.pcast(array, names, to="varying") if names else array
    for array, names in zip(arrays, missing)
  ]


def is_divisible() -> bool:
  """Return True if XLA may partition the current computation over devices.

  It may not if there is one device, or if all axes of the mesh are mapped.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.manual_axes:
    return set(mesh.manual_axes) != set(mesh.axis_names)
  return jax.device_count() > 1


def is_committed(array) -> bool:
  """Return True for an array that is committed to its devices."""
  return getattr(array, "_committed", True)


def uncommit(array) -> jax.Array:
  """Return an uncommitted array with the same buffers."""
  shards = getattr(array, "_arrays", None)
  if shards is None:
    return array
  return ArrayImpl(array.aval, array.sharding, shards, committed=False)


_FROM_HOST = "moving arrays from the host to a device quickly"
_put = private.find(
  "jax._src.lib.xla_client.batched_device_put", _FROM_HOST, instead=None
)
_default_device = private.find(
  "jax._src.interpreters.pxla.get_default_device", _FROM_HOST, instead=None
)
_array_type = functools.lru_cache(4096)(jax.core.ShapedArray)
_on_device = functools.lru_cache(64)(SingleDeviceSharding)


def from_host(values: np.ndarray, sharding: Sharding | None = None) -> jax.Array:
  """Put a numpy array on a device in a third of the time of `jax.device_put`.

  Args:
    values: array of any shape that no other code uses.
    sharding: sharding on one device, for a committed array; None for an uncommitted
      array on the default device.
  """
  is_wide = values.dtype.itemsize > 4 and not jax.config.jax_enable_x64
  if _put is None or _default_device is None or is_wide or is_guarded():
    return jax.device_put(with_64_bits(values), sharding)
  is_committed = sharding is not None
  device = next(iter(sharding.device_set)) if is_committed else _default_device()
  layout = sharding if is_committed else _on_device(device)
  aval = _array_type(values.shape, values.dtype)
  return _put(aval, layout, [values], [device], is_committed)


def register_prng(spec) -> None:
  """Name an implementation of `jax.extend.random.define_prng_impl` in JAX's table."""
  _register_prng(spec._impl)


def with_64_bits(values: np.ndarray) -> np.ndarray | jax.Array:
  """Return uint64 values as a JAX array: without x64 mode JAX would cut their bits."""
  if values.dtype != np.uint64 or jax.config.jax_enable_x64:
    return values
  return join_words(jax.numpy.asarray(values[..., np.newaxis].view(np.uint32)))


def join_words(words: jax.Array) -> jax.Array:
  """Return uint64 (…) of pairs of uint32 words (…, 2), the lower one first."""
  with explicit_x64_dtypes("allow"):
    return jax.lax.bitcast_convert_type(words, np.uint64)


_NO_GUARD = (None, "allow")


def is_guarded() -> bool:
  """Return True while a transfer guard of JAX is active."""
  to_device = jax.config.jax_transfer_guard_host_to_device
  to_host = jax.config.jax_transfer_guard_device_to_host
  return not (to_device in _NO_GUARD and to_host in _NO_GUARD)


@functools.lru_cache(64)
def is_one_cpu(sharding: Sharding) -> bool:
  """Return True for a CPU device of this process."""
  is_here = sharding.is_fully_addressable and len(sharding.device_set) == 1
  return is_here and next(iter(sharding.device_set)).platform == "cpu"


def is_in_host_memory(array) -> bool:
  """Return True for a live array in host memory, which numpy reads without a copy."""
  array = getattr(array, "_base_array", array)  # the words of a typed key
  platform = getattr(array, "platform", None)
  # Since JAX 0.12 a deleted array has no platform.
  return platform is not None and not array.is_deleted() and platform() == "cpu"


_distributed_state = private.find(
  "jax._src.distributed.global_state",
  "comparing programs and values between processes, and barriers",
)


def coordination_client():
  """Return the client of JAX's coordinator, through which processes exchange text.

  Raises:
    PrivateApiError: this version of JAX does not have it.
  """
  return _distributed_state.client


def is_about_missing_cluster(error: ValueError) -> bool:
  """Return True for JAX's error about a missing cluster."""
  return any(
    part in str(error)
    for part in ("coordinator_address should", "Number of processes must")
  )


_LOCAL = "processes of one host whose name does not resolve"
_register_client = private.find(
  "jax._src.xla_bridge.register_backend_factory", _LOCAL, instead=None
)
_make_cpu_client = private.find(
  "jax._src.xla_bridge.make_cpu_client", _LOCAL, instead=None
)
_make_gloo = private.find(
  "jax._src.lib._jax.make_gloo_tcp_collectives", _LOCAL, instead=None
)


def join_cpus_at(address: str) -> None:
  """Make JAX's gloo listen at this address instead of the one of the host's name.

  Call it after `jax.distributed.initialize` and before JAX initializes a device.
  """
  implementation = getattr(jax.config, "jax_cpu_collectives_implementation", None)
  functions = (_register_client, _make_cpu_client, _make_gloo)
  if implementation != "gloo" or None in functions:
    return

  def make():
    gloo = _make_gloo(distributed_client=coordination_client(), hostname=address)
    return _make_cpu_client(collectives=gloo)

  _register_client("cpu", make, priority=0, fail_quietly=False)


def is_about_name_of_host(error: BaseException) -> bool:
  """Return True for JAX's error if gloo cannot resolve the name of this host."""
  return "gloo/transport" in str(error)


def is_about_other_processes(error: BaseException) -> bool:
  """Return True for JAX's error about an array with shards on other processes."""
  return "non-addressable" in str(error)
