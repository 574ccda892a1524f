"""Interpreters and rewrites of `torch.fx` graphs, for `dynamo` and `export`.

Start at `interpreter.py`, which runs a graph operation by operation.
"""
