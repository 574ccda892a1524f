"""The decorator of the library's own torch functions; see `ops/builtin.py`."""

import functools

from torchax.ops.jtorch import _register

register_function = functools.partial(_register.register_function, is_builtin=True)
