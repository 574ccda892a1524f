"""Decorator for built-in lowerings of torch functions; see `ops/builtin.py`."""

import functools

from torchax.functions import register

register_function = functools.partial(register.register_function, is_builtin=True)
