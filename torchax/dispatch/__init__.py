"""Pipeline of one operation: find its plan, unwrap, check, run, wrap.

Start at `dispatcher.py`, which chooses a plan, and `plans.py`, which runs one. The
lowerings of operators are in `ops/jaten`, their records in `registry`; functions caught
above ATen are in `functions`.
"""
