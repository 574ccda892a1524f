"""Parts of `tools/port_upstream.py`, which carries changes of upstream over."""
