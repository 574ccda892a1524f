"""A JAX device as torch sees one."""
