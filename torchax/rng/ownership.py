"""Owner trace of a stream, and the errors of a draw in any other trace.

`stream.py` calls `require` before each draw inside a trace.
"""

import weakref

from torchax.compat import jax_compat
from torchax.errors import ClosedScopeError, TracedDrawError

_WAYS_OUT = (
  "Carry the key as an operand instead: (1) use the wrapper in torchax.interop "
  "(jax_jit, gradient_checkpoint, scan, cond, …) in place of the raw JAX "
  "transformation; (2) pass the key: "
  "`jax_view(f)(..., rng=key)`, with `key` an argument of the transformed function; "
  "or (3) draw inside `with env.rng_scope(key):`."
)


def owner_here() -> weakref.ref | None:
  """Return a weak reference to the current trace; None on the host."""
  trace = jax_compat.draw_owner()
  return None if trace is None else weakref.ref(trace)


def require(owner: weakref.ref | None, is_closed: bool, name: str) -> None:
  """Raise unless operation `name` may use a stream of `owner` in the current trace.

  Raises:
    ClosedScopeError: the scope has ended, or a traced stream is used on the host.
    TracedDrawError: the current trace is not the owner.
  """
  if is_closed:
    raise ClosedScopeError(
      f"{name} used a random stream after its scope had closed. Draw inside the "
      "`with env.rng_scope(...)` block, or take `env.rng` anew for the current "
      "stream."
    )
  trace = jax_compat.draw_owner()
  if trace is (None if owner is None else owner()):
    return
  if trace is None:
    raise ClosedScopeError(
      f"{name} used the stream of a compiled function outside of that function."
    )
  if jax_compat.is_batching(trace):
    raise TracedDrawError(
      f"{name} inside a raw `jax.vmap` would give every row the same numbers. Say "
      'what rows draw: `torchax.interop.jax_vmap(f, randomness="different")` or '
      '"same"; or give each row its key: `jax.vmap(lambda key, x: jax_view(f)(x, '
      "rng=key))(keys, x)`, with `keys = jax.random.split(key, rows)`."
    )
  raise TracedDrawError(
    f"{name} inside a raw JAX transformation ({type(trace).__name__}) would bake its "
    "key into the traced function and repeat the same numbers. " + _WAYS_OUT
  )
