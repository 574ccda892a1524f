"""Public name of `distributed/layouts.py`: meshes and shardings of models."""

from torchax.distributed.layouts import (
  Mesh,
  ShardingRules,
  SingleAxisSharder,
  UnshardableError,
  _shard_first_multiple_of,
)

__all__ = [
  "Mesh",
  "ShardingRules",
  "SingleAxisSharder",
  "UnshardableError",
  "_shard_first_multiple_of",
]
