"""Decorator of the library's own lowerings.

Numbers are operands of such a lowering. `compiled=False` says that it cannot be
compiled. An operation has only one. Lowerings by users, and those ported from
google/torchax, take `op` from `torchax.ops.jaten`. `registry/operators.py` describes
both.
"""

import functools

from torchax.ops import register
from torchax.registry.operators import Kind

__all__ = ["Kind", "op"]

op = functools.partial(register.op, is_builtin=True)
