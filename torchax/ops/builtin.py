"""Decorator of the library's own lowerings.

Such a lowering takes numbers as operands, declares itself where it cannot be compiled,
and is the only one of its operation. `registry/operators.py` describes both styles.
Lowerings by users, and those ported from google/torchax, take `op` from
`torchax.ops.jaten`.
"""

import functools

from torchax.ops import register
from torchax.registry.operators import Kind

__all__ = ["Kind", "op"]

op = functools.partial(register.op, is_builtin=True)
