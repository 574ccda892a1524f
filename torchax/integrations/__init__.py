"""Adapters for libraries that choose a device themselves, one module per library.

Other libraries take tensors and modules as they are and need no adapter. Each module
requires its library, which the extra `ecosystem` installs. Start at `accelerate.py`.
"""
