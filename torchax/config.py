"""Switches of an `Environment`."""

import dataclasses
import os

CHECK_VARIABLE = "TORCHAX_CHECK"
ATTENTION = ("auto", "flash", "plain", "blockwise")


@dataclasses.dataclass
class Configuration:
  """Behaviour of an `Environment`; every field can be changed while it is in use.

  Attributes:
    debug_print_each_op: log every operation at INFO level.
    debug_accuracy_for_each_op: run every operation on CPU torch too and compare.
    debug_mixed_tensor: log the operands when devices are mixed, before raising.
    debug_print_each_op_operands: with `debug_print_each_op`, also shapes and dtypes.
    use_int32_for_index: return int32 indices (argmax, sort, topk) under x64 too.
    allow_mixed_math_with_scalar_tensor: accept 0-d CPU tensors beside jax tensors,
      as torch does for its accelerators.
    force_materialize_views: compute a view when it is made. Aliasing is kept.
    use_dlpack_for_data_conversion: hand arrays over by DLPack where possible.
    treat_cuda_as_jax_device: inside the environment "cuda" means "jax". Read when the
      environment is turned on; torch functions on the CPU take 1 to 4 us more then.
    internal_respect_torch_return_dtypes: cast results to the dtype that torch
      would have returned (needs x64 for 64-bit types).
    prng_impl: name of the JAX PRNG implementation of the streams.
    rng_addressing: "order" or "site"; read when an environment is made. Later, call
      `torchax.rng.address_by`.
    compilation_cache_size: how many compiled programs are kept, those of all functions
      and operations together; at least 1. Over it, half of them go: those not used
      lately, then those of what has most. The default environment's counts. A program
      takes about 2 MB on a CPU. See `torchax.clear_caches`.
    check_indices: an index, label, length or offset out of range raises everywhere:
      eager operations wait for it, and compiled functions are traced anew and look
      at it as they run. `TORCHAX_CHECK=1` in the environment of the process turns it
      on. Otherwise what is not known yet gives NaN, or the least integer.
    attention: which form `scaled_dot_product_attention` takes. "auto": the kernels that
      come with JAX where a device has one for the arguments, and the program is for one
      device; "flash": in programs that XLA may divide too; "plain": all scores at once;
      "blockwise": a block of keys at a time, on any device. See Performance.

  Raises:
    ValueError: a size of the cache that is no positive integer, or another word.
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

  def __setattr__(self, name: str, value) -> None:
    if name == "compilation_cache_size" and not (type(value) is int and value > 0):
      raise ValueError(
        "compilation_cache_size is a number of programs, 1 or more, but got "
        f"{value!r}. `torchax.clear_caches()` drops those there are."
      )
    if name == "attention" and value not in ATTENTION:
      words = ", ".join(map(repr, ATTENTION))
      raise ValueError(f"attention is one of {words}, but got {value!r}.")
    super().__setattr__(name, value)
