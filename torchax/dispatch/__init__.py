"""The pipeline of one operation: find its plan, unwrap, check, run, wrap.

Start at `dispatcher.py`, which finds a plan, and `plans.py`, which runs one. What runs
for an operator is in `registry`; what is caught above ATen is in `functions`.
"""
