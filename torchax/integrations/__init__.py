"""Adapters for libraries that choose a device themselves, one module per library.

Other libraries take tensors and modules as they are and need no adapter. Modules
require their library, which the extra `ecosystem` or JAX installs. Start at
`accelerate.py`.
"""
