"""Files that hold jax tensors."""
