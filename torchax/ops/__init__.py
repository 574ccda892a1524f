"""Lowerings of torch's operators to JAX, with their decorator and shared helpers.

Start at `register.py` (the decorator) and a theme of `jaten/`. `op_base.py`,
`jtorch.py` and the other public names of google/torchax are shells for users; the
package does not use them.
"""
