"""Random programs of a dozen lines, run in every way and compared with CPU torch.

usage: python -m tools.fuzz --seed=0 --count=1000
"""
