"""Carries changes of upstream over; `tools/port_upstream.py` is what people run."""
