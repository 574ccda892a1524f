"""The decorator of the library's own lowerings.

With it a lowering takes numbers as operands, says itself where it cannot be compiled,
and is the only one of its operation (`registry/operators.py` has both styles). What
users write, and what is carried over from upstream, takes `op` from
`torchax.ops.jaten`.
"""

import functools

from torchax.ops import register
from torchax.registry.operators import Kind

__all__ = ["Kind", "op"]

op = functools.partial(register.op, is_builtin=True)
