"""What a compiled program depends on: captures, guards, effects and static values.

`trace.py` makes a pure JAX function of a torch function. What the function closes over
become operands (`captures.py`), what it decides by are guards (`guards.py`), and what
it changes are effects (`effects.py`). `specialization.py` is what a program is compiled
for besides shapes and dtypes; `program_keys.py` and `history.py` describe it.
"""
