"""Process that saves or loads the state of `in_processes.py`.

usage: checkpoints.py save|load DIRECTORY
"""

import sys

import jax
from distributed import in_processes

import torchax

what, path = sys.argv[1:]
if what == "save":
  layout = in_processes.over
  state = in_processes.state_on(lambda spec: layout(4, 2, spec=spec))
  torchax.save_checkpoint(state, path, 0)
else:
  found = torchax.load_checkpoint(path)
  in_processes.require_state(found, is_spread=len(jax.devices()) == 8)
  devices = len(found["model"]["rows"].jax().sharding.device_set)
  assert devices == (8 if len(jax.devices()) == 8 else 1)
