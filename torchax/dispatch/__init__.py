"""How an operation of torch becomes a JAX function."""
