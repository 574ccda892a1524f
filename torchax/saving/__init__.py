"""How jax tensors are pickled, printed and stored by torch.

Start at `files.py`. Checkpoints of training states are in `checkpoint/`; files of
other libraries are in `integrations`.
"""
