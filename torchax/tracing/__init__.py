"""Dependencies of a compiled program: captures, guards, effects and static values.

Start at `trace.py`, which makes a pure JAX function of a torch function. The tensors
that the function closes over become operands (`captures.py`), the values that it
decides by are guards (`guards.py`), and its changes in place are effects
(`effects.py`). `specialization.py` is the static part of a call; `program_keys.py` and
`history.py` describe it.
"""
