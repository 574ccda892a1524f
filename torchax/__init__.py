"""Torchax runs PyTorch programs on JAX.

Importing it registers the device "jax". `compile` and `interop.jax_jit` compile a
function; `interop.call_jax` and `interop.jax_view` use JAX directly.

>>> import torch, torchax
>>> with torchax.default_env():
...   torch.ones(2, device="jax") + 1
tensor([2., 2.], device='jax:0')
"""

import contextlib
import sys
from collections.abc import Iterator

import jax
import torch

from torchax import (
  amp,
  decompositions,
  device_module,
  distributed,
  environment,
  interop,
  rng,
  subclasses,
  tensor,
  util,
  view,
)
from torchax.checkpoint import load_checkpoint, save_checkpoint
from torchax.compat import torch_compat
from torchax.compat.patches import patch, unpatch
from torchax.config import Configuration
from torchax.core import mappings, program_limit, storage, tracebacks
from torchax.core.deferred import eager_mode
from torchax.devices import forks, generator, placement, streams
from torchax.diagnostics import compile_times
from torchax.diagnostics.explain_operator import explain_operator
from torchax.diagnostics.module_memory import memory_by_module
from torchax.diagnostics.profiles import Profile, profile
from torchax.diagnostics.report import EnvInfo, env_info
from torchax.dispatch import applied_functions, debug, modes, operands, transfer
from torchax.environment import Environment, default_env
from torchax.functions import (
  factories,
  indexing,
  layers,
  reshapes,
  scatters,
  shortcuts,
)
from torchax.graphs import fake_tensors, fx, higher_order
from torchax.integrations import safetensors
from torchax.interop import Explanation, JittableModule, explain, extract_jax, jit
from torchax.interop.compilation import CompileOptions, compile
from torchax.logs import set_logs
from torchax.ops import (
  jaten,
  jc10d,
  jtorch,
  jtorchvision_deform,
  jtorchvision_nms,
  jtorchvision_pool,
  jtorchvision_roi,
)
from torchax.rng import RngState, rng_scope
from torchax.saving import array_protocols, printing, torch_files, untyped_storage
from torchax.tracing import recorded_draws, transform
from torchax.version import VERSION

__version__ = VERSION

unsupported_dtype = [
  torch_dtype
  for torch_dtype in (tensor.torch.quint8, tensor.torch.qint8, tensor.torch.qint32)
  if torch_dtype not in mappings.TORCH_DTYPE_TO_JAX
]


def enable_globally() -> None:
  """Turn the default environment on for the rest of this thread.

  Tensors on jax work without it, too. `treat_cuda_as_jax_device` applies only while the
  environment is on. Calls nest.

  >>> torchax.enable_globally()
  >>> torchax.default_env().enabled
  True
  >>> torchax.disable_globally()
  """
  default_env().enable_torch_modes()


def disable_globally() -> None:
  """Undo one `enable_globally` of this thread.

  Raises:
    RuntimeError: the default environment is not enabled on this thread.

  >>> torchax.enable_globally()
  >>> torchax.disable_globally()
  """
  default_env().disable_torch_modes()


@contextlib.contextmanager
def disable_temporarily() -> Iterator[None]:
  """Run plain torch inside the block; restore the environment after it.

  >>> with torchax.default_env(), torchax.disable_temporarily():
  ...   torchax.default_env().enabled
  False
  """
  with default_env().disabled():
    yield


def enable_accuracy_mode() -> None:
  """Enable 64-bit types, the highest matmul precision and torch's result dtypes.

  Changes JAX's configuration and the default environment, for the whole process. Call
  it before the first tensor is created.

  >>> torchax.enable_accuracy_mode()
  >>> torch.ones(1, device="jax", dtype=torch.float64).jax().dtype
  dtype('float64')
  >>> torchax.enable_performance_mode()
  """
  jax.config.update("jax_enable_x64", True)
  jax.config.update("jax_default_matmul_precision", "highest")
  default_env().config.internal_respect_torch_return_dtypes = True


def enable_performance_mode() -> None:
  """Select 32-bit types and the device's default (fastest) matmul precision.

  Undoes `enable_accuracy_mode`, for the whole process.

  >>> torchax.enable_performance_mode()
  >>> jax.config.jax_enable_x64
  False
  """
  jax.config.update("jax_enable_x64", False)
  jax.config.update("jax_default_matmul_precision", "default")
  default_env().config.internal_respect_torch_return_dtypes = False


def clear_caches() -> None:
  """Drop all compiled programs and free their memory.

  Includes the programs of eager operations, of compiled functions and of JAX
  (`jax.clear_caches`). Later calls compile again. Tensors stay, and so do the values
  saved for backward passes.

  >>> torchax.clear_caches()
  """
  program_limit.clear()


def _means_jax(location: str) -> bool:
  """Return True for devices that mean jax: "jax:0", and "cuda" in the environment."""
  return environment.env_on()._should_use_torchax_tensor(location)


# Names that upstream defines in `torchax.tensor`, by the module that defines them here.
_OF_TENSOR = {
  environment: (
    *("Environment", "RuntimeProperty", "XLADispatchMode", "XLAFunctionMode"),
    *("_PropertyHolder", "_None", "TENSOR_CONSTRUCTORS", "default_env"),
  ),
  debug: ("_make_debug_msg", "_name_of_func", "debug_accuracy", "log_nested"),
}


# All calls into JAX. They raise in a process that was forked after JAX had started.
_WAYS_TO_JAX = (
  (Environment, "dispatch"),
  (Environment, "shapes"),
  (Environment, "copy_to_jax"),
  (operands.Flattener, "flatten"),
  (mappings, "t2j"),
  (mappings, "j2t"),
  (mappings, "numpy_copy"),
  (placement, "target_of"),
  (rng.RngStream, "peek"),
  (rng.RngStream, "rebase"),
  (streams, "live_arrays"),
  (tensor.Tensor, "jax"),
  (tensor.Tensor, "tolist"),
  (tensor.Tensor, "__deepcopy__"),
  (untyped_storage.UntypedStorage, "host"),
  (jit.Jitted, "call"),
  (transform.Transformed, "__call__"),
)


def _compose() -> None:
  """Connect the layers; the modules below do not import this one."""
  program_limit.limit(lambda: default_env().config.compilation_cache_size)
  program_limit.before_first(compile_times.listen)
  for module in (factories, shortcuts, indexing, reshapes, scatters, higher_order):
    environment.on_creation(module.register_functions)
  forks.watch(_WAYS_TO_JAX)
  # `rng.explain` and `rng.replay` run functions, which only layers above `rng` can.
  rng.ledger.Explainer.trace = recorded_draws.dry_run
  rng.ledger.Explainer.redraw = recorded_draws.redraw
  for module, names in _OF_TENSOR.items():
    for name in names:
      setattr(tensor, name, getattr(module, name))
  tensor.connect(
    fake_tensors.Fake, transfer.shard_gradient_like, subclasses.as_subclass
  )
  view.View._from_fake = fake_tensors.FakeView
  torch_compat.register_backend(device_module)
  torch_compat.support_foreach(tensor.Tensor, view.View)
  torch_compat.record_in_make_fx(tensor.Tensor, view.View)
  torch_compat.watch_swaps(tensor.Tensor, storage.Rebindings.count_one)
  torch_compat.subclass_by(
    subclasses.make_subclass, tensor.Tensor, subclasses.class_of_user
  )
  torch_compat.move_parameters_in_place(
    tensor.Tensor, torch_files.OWN, subclasses.keep_class
  )
  torch_compat.move_by_data(tensor.Tensor, subclasses.move_to_data)
  torch_compat.place_new_placeholders()
  torch_compat.hold_jagged_parts(tensor.Tensor)
  torch_compat.zero_padded_positions(tensor.Tensor)
  torch_files.register(tensor.Tensor, _means_jax)
  untyped_storage.register()
  safetensors.register(_means_jax)
  torch_compat.answer_for_accelerator(device_module.ANSWERS)
  torch_compat.leave_data_parallel_alone()
  torch_compat.fork_one_stream()
  torch_compat.keep_overrides_in_backward()
  torch_compat.label_jax_traces()
  torch_compat.replace_inductor(
    fx.is_on_jax, generator.Generator, subclasses.class_of_user
  )
  torch_compat.accept_jax_in_flex_attention()
  patch(torch, "Generator", device_module.Generator, 'torch.Generator(device="jax")')
  torch_compat.compile_as_generator(device_module.Generator)
  generator.register(lambda kind: kind == "cuda" and _means_jax(kind))
  factories.register_kernels()
  higher_order.register_kernels()
  layers.register_kernels()
  distributed.register()
  applied_functions.register()
  torch_compat.keep_from_dynamo(
    *(tensor, array_protocols, view, environment, modes, factories),
    *(device_module, device_module.Generator),
    *(placement, printing, streams, subclasses, tracebacks),
    *(torch_files, untyped_storage),
    *interop.MODULES,
  )
  # Libraries such as wandb and autoray know torch's tensors by the name of their class.
  fakes: tuple[type, ...] = (fake_tensors.Fake, fake_tensors.FakeView)
  for cls in (tensor.Tensor, view.View, *fakes):
    cls.__module__ = "torch.jax"
    setattr(device_module, cls.__name__, cls)
  # These wrap functions of torch that call code of a user, which Dynamo may compile.
  own = [m for name, m in sys.modules.items() if name.startswith(torch_compat.__name__)]
  own.remove(torch_compat.encoders)  # Dynamo compiles their `forward`
  torch_compat.keep_from_dynamo(*own, with_calls=False)


_compose()

__all__ = [
  "CompileOptions",
  "Configuration",
  "EnvInfo",
  "Environment",
  "Explanation",
  "JittableModule",
  "Profile",
  "RngState",
  "VERSION",
  "__version__",
  "amp",
  "clear_caches",
  "compile",
  "decompositions",
  "default_env",
  "disable_globally",
  "disable_temporarily",
  "distributed",
  "enable_accuracy_mode",
  "enable_globally",
  "enable_performance_mode",
  "env_info",
  "explain",
  "explain_operator",
  "extract_jax",
  "interop",
  "jaten",
  "jc10d",
  "jtorch",
  "jtorchvision_deform",
  "jtorchvision_nms",
  "jtorchvision_pool",
  "jtorchvision_roi",
  "load_checkpoint",
  "eager_mode",
  "memory_by_module",
  "profile",
  "rng",
  "rng_scope",
  "save_checkpoint",
  "set_logs",
  "unpatch",
  "unsupported_dtype",
  "util",
]


def __dir__() -> list[str]:
  return list(__all__)
