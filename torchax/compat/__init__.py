"""All private API of torch and JAX, and all that depends on their versions.

`private.py` looks a name up and says which feature is lost without it. `torch_compat`
and `jax_compat.py` use the names; nothing else in the package does. Start at
`private.py`. Public API of torch and JAX is used where it is needed, not here.
"""
