"""XLA's options for programs of one operation: time to compile and time to run.

Each function is compiled with the options of eager operations
(`core.program_limit.quick_options`) and with those of `jax.jit`. Both programs must
give the same numbers up to rounding. Draws use `Effort.SAME_BITS`, which keeps bits.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.timing import Row, compare
from torchax.core import program_limit

ROUNDS = 5
_SHAPE = (16, 128, 64)
_DRAWS = ("normal numbers",)


def _layer_norm(x, w):
  centred = x - x.mean(-1, keepdims=True)
  return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w


def _attention(q):
  scores = jnp.einsum("bld,bmd->blm", q, q) / 8
  return jnp.einsum("blm,bmd->bld", jax.nn.softmax(scores, -1), q)


def _conv(x, w):
  return lax.conv_general_dilated(x[:, None], w, (1, 1), "SAME")


def _squares(function: Callable) -> Callable:
  return jax.grad(lambda *args: (function(*args) ** 2).sum(), (0, 1))


def _functions() -> dict[str, tuple]:
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal(_SHAPE, np.float32))
  w = jnp.asarray(rng.standard_normal(_SHAPE[-1:], np.float32))
  kernel = jnp.asarray(rng.standard_normal((8, 1, 3, 3), np.float32))
  key = jax.random.key(0)
  return {
    "add": (lambda x: x + 1, x),
    "gelu": (jax.nn.gelu, x),
    "softmax": (lambda x: jax.nn.softmax(x, -1), x),
    "layer norm": (_layer_norm, x, w),
    "layer norm, gradient": (_squares(_layer_norm), x, w),
    "layer norm of 8 rows, gradient": (_squares(_layer_norm), x[0, :8], w),
    "attention": (_attention, x),
    "convolution, gradient": (_squares(_conv), x, kernel),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), x),
    "scatter": (lambda x: jnp.zeros_like(x).at[:, ::3].add(x[:, ::3]), x),
    "normal numbers": (lambda key: jax.random.normal(key, _SHAPE), key),
    "bfloat16 gelu": (jax.nn.gelu, x.astype(jnp.bfloat16)),
  }


def _compiled(function: Callable, args, options):
  """Compile a function; return the executable and the CPU time in microseconds."""
  jax.clear_caches()  # else JAX returns the executable of the last round
  lowered = jax.jit(function, compiler_options=options).lower(*args)
  start = time.process_time()
  executable = lowered.compile()
  return executable, (time.process_time() - start) * 1e6


def _rows_of(name: str, function: Callable, *args) -> list[Row]:
  quick, default = [], []
  draws = name in _DRAWS
  effort = program_limit.Effort.SAME_BITS if draws else program_limit.Effort.LEAST
  options = program_limit.quick_options(effort)
  for _ in range(ROUNDS):
    quick.append(_compiled(function, args, options))
    default.append(_compiled(function, args, None))
  ours, plain = quick[0][0], default[0][0]
  for mine, theirs in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(plain(*args))):
    mine, theirs = (np.asarray(each, np.float32) for each in (mine, theirs))
    if not np.allclose(mine, theirs, rtol=1e-5, atol=1e-6):
      raise RuntimeError(f"{name}: the options change the numbers.")
  mine, theirs = (statistics.median(t for _, t in of) for of in (quick, default))
  return [
    Row(f"compile {name}", "jax.jit", mine, theirs, 0.8),
    compare(f"run {name}", lambda: ours(*args), lambda: plain(*args), 1.2, "jax.jit"),
  ]


def rows() -> list[Row]:
  """Return two rows for each function."""
  return [row for name, given in _functions().items() for row in _rows_of(name, *given)]
