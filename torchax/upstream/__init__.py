"""Names and helpers that are kept for programs written for google/torchax.

Nothing else in the package uses them, except the public modules that show them
(`ops/jaten`, `ops/jtorch.py`, `ops/op_base.py`).
"""
