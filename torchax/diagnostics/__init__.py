"""Reports on an installation, `python -m torchax`, and on what runs for an operation.

Start at `report.py`. Errors are worded where they are raised, tracebacks shortened in
`core/tracebacks.py`.
"""
