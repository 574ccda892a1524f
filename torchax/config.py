"""Switches of an `Environment`."""

import dataclasses
import difflib
import os

CHECK_VARIABLE = "TORCHAX_CHECK"
EAGER_MODES = ("strict", "fused", "debug")
_VALUES = {
  "attention": ("auto", "flash", "plain", "blockwise"),
  "eager_mode": (None, *EAGER_MODES),
}


@dataclasses.dataclass
class Configuration:
  """Switches of an `Environment`; every field may be changed at any time.

  Attributes:
    debug_print_each_op: log every operation at INFO level.
    debug_accuracy_for_each_op: run every operation on CPU torch too and compare.
    debug_mixed_tensor: log the operands before raising about mixed devices.
    debug_print_each_op_operands: log shapes and dtypes with `debug_print_each_op`.
    use_int32_for_index: return int32 indices (argmax, sort, topk) under x64 too.
    allow_mixed_math_with_scalar_tensor: accept 0-d CPU tensors as operands of jax
      tensors, like torch's accelerators.
    force_materialize_views: compute each view when it is created; it keeps aliasing.
    use_dlpack_for_data_conversion: convert arrays through DLPack where possible.
    treat_cuda_as_jax_device: inside the environment, "cuda" means "jax". Read when the
      environment is turned on; torch functions on the CPU then take 1 to 4 us more.
    internal_respect_torch_return_dtypes: cast results to the dtype that torch
      would have returned (needs x64 for 64-bit types).
    prng_impl: name of the JAX PRNG implementation of the streams.
    rng_addressing: "order" or "site"; read when an environment is created. Later, call
      `torchax.rng.address_by`.
    compilation_cache_size: most compiled programs to keep, over all functions and
      operations; at least 1. Above it, half are evicted: least recently used first,
      then those of the largest cache. Only the default environment's value counts. A
      program takes about 2 MB on a CPU. See `torchax.clear_caches`.
    check_indices: raise for every index, label, length or offset out of range. Eager
      operations then wait for the check; compiled functions are retraced and check at
      run time. `TORCHAX_CHECK=1` in the process environment turns it on. When off,
      an index whose value is not known yet gives NaN or the smallest integer.
    eager_mode: mode of eager operations while the environment is on: "strict", "fused"
      or "debug"; see `torchax.eager_mode`. Read when it is turned on; None keeps the
      mode of the thread.
    attention: implementation of `scaled_dot_product_attention`. "auto": JAX's kernels
      if the device has one for the arguments and the program runs on one device;
      "flash": the same, also in programs that XLA may partition; "plain": all scores
      at once; "blockwise": a block of keys at a time, on any device. See Performance.

  Raises:
    AttributeError: there is no switch of this name.
    ValueError: `compilation_cache_size` is not a positive integer, or `attention` or
      `eager_mode` is none of its values.

  >>> import torchax
  >>> env = torchax.Environment(Configuration(use_int32_for_index=True))
  >>> env.config.check_indices = True
  >>> env.config.attention
  'auto'
  """

  debug_print_each_op: bool = False
  debug_accuracy_for_each_op: bool = False
  debug_mixed_tensor: bool = False
  debug_print_each_op_operands: bool = False
  use_int32_for_index: bool = False
  allow_mixed_math_with_scalar_tensor: bool = True
  force_materialize_views: bool = False
  use_dlpack_for_data_conversion: bool = False
  treat_cuda_as_jax_device: bool = False
  internal_respect_torch_return_dtypes: bool = False
  prng_impl: str = "threefry2x32"
  rng_addressing: str = "order"
  compilation_cache_size: int = 4096
  check_indices: bool = os.environ.get(CHECK_VARIABLE) == "1"
  attention: str = "auto"
  eager_mode: str | None = None

  def __setattr__(self, name: str, value) -> None:
    if name not in type(self).__dataclass_fields__:
      close = difflib.get_close_matches(name, type(self).__dataclass_fields__, 1)
      hint = f"Did you mean {close[0]!r}?" if close else "Look it up in its docstring."
      raise AttributeError(f"Configuration has no switch {name!r}. {hint}")
    if name == "compilation_cache_size" and not (type(value) is int and value > 0):
      raise ValueError(
        "compilation_cache_size expects a number of programs, 1 or more, but got "
        f"{value!r}. `torchax.clear_caches()` drops those there are."
      )
    if value not in _VALUES.get(name, (value,)):
      words = ", ".join(map(repr, _VALUES[name]))
      raise ValueError(f"{name} expects one of {words}, but got {value!r}.")
    super().__setattr__(name, value)
