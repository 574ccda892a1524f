"""accelerate: `use_jax()` makes jax the device of every `Accelerator`.

accelerate takes the name of its device from the variable `ACCELERATE_TORCH_DEVICE`, and
knows no other way to a device of another package.
"""

import os

from torchax.compat import extras
from torchax.environment import default_env
from torchax.integrations._random_state import RandomState

VARIABLE = "ACCELERATE_TORCH_DEVICE"

_accelerate = extras.load("accelerate", "torchax.integrations.accelerate")


def use_jax() -> None:
  """Makes jax the device of each `accelerate.Accelerator` made from now on.

  Turns the environment on for this thread, as `torchax.enable_globally()` does, and
  sets `ACCELERATE_TORCH_DEVICE`. Calling it again changes nothing.

  Raises:
    RuntimeError: an `Accelerator` exists already, and has another device.
  """
  state = _accelerate.state.PartialState._shared_state
  device = state.get("device")
  if device is not None and device.type != "jax":
    raise RuntimeError(
      "use_jax() must come before the first Accelerator, or TrainingArguments, but "
      f"there is one on {device}."
    )
  os.environ[VARIABLE] = "jax"
  env = default_env()
  if not env.enabled:
    env.enable_torch_modes()


__all__ = ["RandomState", "use_jax"]
