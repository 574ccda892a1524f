"""Programs that report on an installation: `python -m torchax`.

Start at `report.py`. Errors are worded where they are raised, tracebacks shortened in
`core/tracebacks.py`.
"""
