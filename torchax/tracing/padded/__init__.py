"""Padded programs: one compiled program for all sizes of a bucket.

A function is traced at its true sizes and at the padded ones. `graphs.py` compares both
traces: numbers that differ are sizes, and become operands. `program.py` runs the padded
trace, and asks a rule for each operation that meets a padded axis. `programs.py`
compiles it, `bucketed.py` calls it in place of `jax.jit`, and `backward.py` serves
torch's autograd.

`rules.py` has rules for values, `positions.py` for operations that move elements,
`indexing.py` for gather and scatter, `windows.py` for convolutions, and `calls.py` for
loops and nested functions.
"""
