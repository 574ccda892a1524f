"""Registry of lowerings: torch operation -> operator.

Start at `operators.py`: the record of an operator, and the tables shared by all
environments. `operator_table.py` is the table of one environment. `schema.py` derives
in-place, `out=` and view variants from torch's schemas. `dispatch` runs operators.
"""
