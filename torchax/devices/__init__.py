"""JAX devices in torch's terms: placement, generators, streams, memory.

Start at `placement.py`. The module `torch.jax` is in `device_module.py`; meshes and
several processes are in `distributed`.
"""
