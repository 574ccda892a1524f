"""Pickling, `torch.save` and printing of jax tensors.

Start at `torch_files.py`. Checkpoints of training states are in `checkpoint/`; files of
other libraries are in `integrations`.
"""
