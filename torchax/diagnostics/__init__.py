"""Reports: the installation (`python -m torchax`), operators, profiles, compile times.

Start at `report.py`. Error messages are written where they are raised; tracebacks are
shortened in `core/tracebacks.py`.
"""
