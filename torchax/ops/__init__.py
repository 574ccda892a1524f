"""Lowerings of torch's operators to JAX, and what they are written with.

Start at `register.py` (the decorator) and a theme of `jaten/`. `op_base.py`,
`jtorch.py` and other public names of google/torchax are shells that the package does
not use.
"""
