"""Which lowering runs for an operator of torch.

Start at `operators.py`: it has the record of an operator and the tables of all;
`operator_table.py` the ones of an environment. `schema.py` derives in-place, `out=` and
view forms from torch's schemas. How an operator is run is in `dispatch`.
"""
