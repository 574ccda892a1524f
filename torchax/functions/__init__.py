"""What torch programs call above ATen: functions, factories, indexing, refusals.

A file a theme. Start at `register.py`, which has the decorator for functions that are
better caught whole (`F.dropout`, `F.linear`): where the environment is suspended,
torch's composite forms run and draw the same numbers. The handlers of factories, `x[i]`
and the like are added to each environment by their `register_functions`. Lowerings of
ATen operators are in `ops/jaten`; the pipeline that runs both is in `dispatch`.
"""
