"""What a compiled program depends on: captures, guards, effects and static values.

`functionalize.py` makes a pure JAX function of a torch function. What the function
closes over become operands (captures), what it decides by are guards, and what it
changes are effects. `specialization.py` is what a program is compiled for besides
shapes and dtypes; `forms.py` and `history.py` say it in words.
"""
