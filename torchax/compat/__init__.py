"""Private API of torch and JAX, and code that depends on their versions.

Start at `private.py`, which looks a name up and records the feature that needs it.
`torch_compat` and `jax_compat.py` use the names; the rest of the package imports these
two. Public API of torch and JAX is used directly, not through this folder.
"""
