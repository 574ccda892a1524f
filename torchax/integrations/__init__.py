"""Libraries that choose a device themselves, told about jax: one module each.

Other libraries take tensors and modules as they are, and need nothing from here. Each
module needs its library, which the extra `ecosystem` installs. Start at
`accelerate.py`.
"""
