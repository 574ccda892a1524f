"""The only file that touches private API of JAX; `test_jax_compat.py` guards it.

What is needed: to know which trace is in progress, because a draw from a stream of
another trace would be baked in or repeated (`rng/ownership.py`); and whether JAX
has started, because it does not survive a fork (`torchax/device_module.py`).
"""

import re

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


class _Nothing:
  """A class that has no instances."""


# Function in pickles of arrays that makes the array; None where it is not known.
rebuilt_array = private.find(
  "jax._src.array._reconstruct_array",
  "loading arrays from files of torch.save",
  instead=None,
)
# `isinstance(array, jax.Array)` tells what `type(array) is ArrayImpl` tells sooner.
ArrayImpl = private.find(
  "jax._src.array.ArrayImpl", "telling arrays from tracers quickly", instead=_Nothing
)

# () -> bool: True once JAX has set up a device.
has_started = private.find(
  "jax._src.xla_bridge.backends_are_initialized",
  "telling a process that was forked from one that uses JAX",
  instead=lambda: False,
)

# A context in which JAX computes with concrete values, also while a function is being
# traced; `jax.ensure_compile_time_eval` does not leave a `shard_map`.
outside_of_traces = private.find(
  "jax._src.core.eval_context",
  "the first draw of a stream inside of a shard_map",
  instead=jax.ensure_compile_time_eval,
)

# What JAX raises where the sharding of a result does not follow from the types.
ShardingTypeError = private.find(
  "jax._src.core.ShardingTypeError",
  "operations on meshes of explicit axes",
  instead=type("ShardingTypeError", (Exception,), {}),
)

# () -> the function, or None; its module is slow to import.
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
  return private.find(path, _TRACES, instead=_Nothing)


_EvalTrace = _trace_class("jax._src.core.EvalTrace")
# Traces that run the function once and leave values that do not depend on the
# differentiated input concrete.
_RUN_ONCE = (
  _trace_class("jax._src.interpreters.ad.JVPTrace"),
  _trace_class("jax._src.interpreters.ad.LinearizeTrace"),
)
_StagingTrace = _trace_class(
  "jax._src.interpreters.partial_eval.DynamicJaxprTrace",
)
_BatchTrace = _trace_class("jax._src.interpreters.batching.BatchTrace")
_KNOWN = (_EvalTrace, *_RUN_ONCE, _StagingTrace, _BatchTrace)
if _EvalTrace is _Nothing:
  # What is in progress while modules are imported.
  _EvalTrace = type(_trace_context.trace)


def _require_known(trace: Trace) -> None:
  """Raises for a trace that may be of a class that was not found.

  Raises:
    PrivateApiError: a class of traces was not found, and this is none of the others.
  """
  if _Nothing in _KNOWN and type(trace) not in _KNOWN:
    private.require(_TRACES)


def is_top_level() -> bool:
  """True when no JAX transformation is in progress on this thread."""
  return type(_trace_context.trace) is _EvalTrace


def is_staging() -> bool:
  """True when operations are recorded into a jaxpr instead of being run."""
  trace = type(_trace_context.trace)
  if trace is not _StagingTrace and trace is not _EvalTrace:
    _require_known(_trace_context.trace)
  return trace is _StagingTrace


def draw_owner() -> Trace | None:
  """The innermost trace that a draw would belong to, None when run for real.

  Differentiation is looked through: it runs a function once, with the random
  numbers as constants of the differentiation.
  """
  trace = _trace_context.trace
  while type(trace) in _RUN_ONCE:
    trace = trace.parent_trace
  if type(trace) is _EvalTrace:
    return None
  _require_known(trace)
  return trace


def is_batching(trace: Trace) -> bool:
  """True for the trace of `jax.vmap`."""
  if type(trace) is not _EvalTrace:
    _require_known(trace)
  return type(trace) is _BatchTrace


def has_abstract_value(array) -> bool:
  """True for a value that is being traced."""
  return isinstance(array, Tracer)


def line_outside(libraries: tuple[str, ...]) -> tuple[str, int] | None:
  """File and line of the innermost running code that is not a library's.

  It is read off the record that JAX keeps with each operation for its own messages.

  Args:
    libraries: what the paths of their files start with.

  Returns:
    None where JAX keeps no such record.
  """
  return line_of(source_info_util.current(), libraries)


def line_of(source_info, libraries: tuple[str, ...]) -> tuple[str, int] | None:
  """The same for the record of an equation of a jaxpr."""
  record = source_info.traceback
  for frame in getattr(record, "frames", ()):
    if not frame.file_name.startswith(libraries):
      return frame.file_name, frame.line_num
  return None


def constants_of_scan(params: dict) -> int:
  """How many operands of a scan are the same in all turns; they come first."""
  if "num_consts" in params:
    return params["num_consts"]
  constants, _, _ = params["ft_in"].unpack()  # from JAX 0.12 on
  return len(constants)


def without_constants(closed: core.ClosedJaxpr) -> core.Jaxpr:
  """The jaxpr of a closed one, which keeps no constant alive.

  From JAX 0.12 on both are of one class.
  """
  jaxpr = closed.jaxpr
  return jaxpr.with_consts([]) if hasattr(jaxpr, "with_consts") else jaxpr


def is_about_devices(error: Exception) -> bool:
  """True for what JAX raises where arrays are committed to different devices."""
  return "incompatible devices" in str(error)


def is_about_deletion(error: BaseException) -> bool:
  """True for what JAX raises where the memory of an array is gone.

  A program that has run before raises a ValueError, or one of XLA's.
  """
  known = isinstance(error, RuntimeError | ValueError)
  return known and "has been deleted" in str(error)


NO_VALUE = (
  jax.errors.ConcretizationTypeError,
  jax.errors.NonConcreteBooleanIndexError,
  jax.errors.TracerArrayConversionError,
  jax.errors.TracerBoolConversionError,
  jax.errors.TracerIntegerConversionError,
)
"""What JAX raises where the values of a traced array are asked for."""


# Of shapes, of slices, and of slices from JAX 0.12 on.
_STATIC = ("concrete values", "static integers", "static start/stop/step")


def is_about_values(error: BaseException) -> bool:
  """True for what JAX raises where a traced array would have to be known.

  Shapes and slices of traced arrays raise plain errors that name the tracer.
  """
  if isinstance(error, NO_VALUE):
    return True
  text = str(error) if type(error) in (TypeError, IndexError) else ""
  return "Tracer(" in text and any(words in text for words in _STATIC)


def is_about_donation(error: BaseException) -> bool:
  """True for what JAX raises where donated memory is used twice in one call."""
  is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
  return is_of_xla and all(part in str(error) for part in ("donate", "same call"))


def refused_argument(error: BaseException) -> tuple[str, str] | None:
  """The class and the place of an argument that `jax.jit` refuses as no array."""
  if type(error) is not TypeError:
    return None
  found = _REFUSED_ARGUMENT.search(str(error))
  return None if found is None else (found[1], found[2])


def is_about_static_arguments(error: BaseException) -> bool:
  """True for what `jax.jit` raises where a static argument has no hash."""
  return type(error) is ValueError and "Non-hashable static arguments" in str(error)


def varying_axes(array) -> frozenset:
  """The mapped axes along which an array may differ, by its type."""
  aval = jax.typeof(array)
  manual = getattr(aval, "manual_axis_type", None)
  return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def varying_alike(*arrays) -> list:
  """The same arrays, of one type as to the mapped axes along which they may differ.

  A loop wants it of what it carries, and a derivative of what it is for.
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
  """True where XLA may divide what is computed here among devices.

  It may not where there is one device, nor where all axes of a mesh are mapped.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.manual_axes:
    return set(mesh.manual_axes) != set(mesh.axis_names)
  return jax.device_count() > 1


def is_committed(array) -> bool:
  """True for an array that JAX keeps where it is; others join those."""
  return getattr(array, "_committed", True)


def uncommitted(array) -> jax.Array:
  """The same array, free to join arrays elsewhere."""
  parts = getattr(array, "_arrays", None)
  if parts is None:
    return array
  return ArrayImpl(array.aval, array.sharding, parts, committed=False)


_FROM_HOST = "moving arrays from the host to a device quickly"
_put = private.find(
  "jax._src.interpreters.pxla.batched_device_put", _FROM_HOST, instead=None
)
_default_device = private.find(
  "jax._src.interpreters.pxla.get_default_device", _FROM_HOST, instead=None
)


def from_host(values: np.ndarray, place: Sharding | None = None) -> jax.Array:
  """`jax.device_put` of an array that nobody else has, in a third of the time.

  Args:
    values: of any shape.
    place: one device; the result is committed to it. None for the default one.
  """
  is_wide = values.dtype.itemsize > 4 and not jax.config.jax_enable_x64
  if _put is None or _default_device is None or is_wide or is_guarded():
    return jax.device_put(values, place)
  device = _default_device() if place is None else next(iter(place.device_set))
  sharding = SingleDeviceSharding(device) if place is None else place
  aval = jax.core.ShapedArray(values.shape, values.dtype)
  return _put(aval, sharding, [values], [device], place is not None)


def is_guarded() -> bool:
  """True while the user has JAX watch what moves between the host and devices."""
  config = jax.config
  guards = (
    config.jax_transfer_guard_host_to_device,
    config.jax_transfer_guard_device_to_host,
  )
  return any(guard not in (None, "allow") for guard in guards)


def is_of_host(array) -> bool:
  """True for a live array in memory of the host, which numpy reads without a copy."""
  platform = getattr(array, "platform", None)
  # Since JAX 0.12 a deleted array does not say where it was.
  return platform is not None and not array.is_deleted() and platform() == "cpu"


_distributed_state = private.find(
  "jax._src.distributed.global_state",
  "comparing programs and values between processes, and barriers",
)


def coordination_client():
  """The client of JAX's coordinator, by which processes exchange short texts.

  Raises:
    PrivateApiError: this version of JAX has it elsewhere.
  """
  return _distributed_state.client


def is_about_missing_cluster(error: ValueError) -> bool:
  """True for what JAX raises where it finds no other processes."""
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
  """Has the CPUs of processes find one another at this address of their host.

  By default JAX's gloo asks what the name of the host resolves to, and listens there.
  It is called after `jax.distributed.initialize` and before JAX sets up a device.
  """
  implementation = getattr(jax.config, "jax_cpu_collectives_implementation", None)
  parts = (_register_client, _make_cpu_client, _make_gloo)
  if implementation != "gloo" or None in parts:
    return

  def make():
    gloo = _make_gloo(distributed_client=coordination_client(), hostname=address)
    return _make_cpu_client(collectives=gloo)

  _register_client("cpu", make, priority=0, fail_quietly=False)


def is_about_name_of_host(error: BaseException) -> bool:
  """True for what JAX raises where gloo does not find the address of this host."""
  return "gloo/transport" in str(error)


def is_about_other_processes(error: BaseException) -> bool:
  """True for what JAX raises where an array's numbers are in other processes."""
  return "non-addressable" in str(error)
