"""Lookup of lowerings by upstream's names, for programs written for google/torchax.

Start at `aliases.py`. Only the public modules `ops/jaten` and `ops/jtorch.py` use it.
"""
