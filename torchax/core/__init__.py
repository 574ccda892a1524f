"""What a tensor is made of: memory, views, dtypes, programs, gradient mode.

Start at `storage.py` (the array that tensors share) and `chains.py` (how a view
reads and writes it). Nothing here knows `Tensor`, an operator or an environment.
"""
