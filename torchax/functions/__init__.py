"""Lowerings of torch functions caught above ATen: layers, factories, indexing.

Start at `register.py`, which has the decorator for functions that are better lowered
whole, such as `F.dropout`. While the environment is suspended, torch's composite
kernels run instead and draw the same numbers. Each `register_functions` adds the
handlers of a file, as of `x[i]`, to an environment. Lowerings of ATen operators are in
`ops/jaten`; `dispatch` runs both.
"""
