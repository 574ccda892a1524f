"""Dependencies of a compiled program: captures, guards, effects and static values.

Start at `trace.py`, which turns a torch function into a pure JAX function. Tensors from
the closure become operands (`captures.py`), Python values that control flow depends on
become guards (`guards.py`), and in-place changes become effects (`effects.py`).
`specialization.py` has the static part of a call; `program_keys.py`
describes it to users.
"""
