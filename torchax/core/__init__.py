"""Parts that tensors are built from: storage, views, dtypes, programs, gradient mode.

Start at `storage.py` (the array that tensors share) and `chains.py` (how a view
reads and writes it). No module here imports `Tensor`, an operator or an environment.
"""
