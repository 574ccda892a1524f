"""Side-by-side measurements of torchax and plain JAX; `make bench` runs them all."""
