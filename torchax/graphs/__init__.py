"""Running and rewriting graphs of `torch.fx`, for `dynamo` and `export`.

Start at `interpreter.py`, which runs a graph operation by operation.
"""
