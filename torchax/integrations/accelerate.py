"""accelerate: `use_jax()` makes jax the device of every `Accelerator`.

accelerate reads the name of its device from the variable `ACCELERATE_TORCH_DEVICE`; it
has no other way to select an out-of-tree device.
"""

import os

import torch

from torchax import rng
from torchax.compat import extras
from torchax.environment import default_env

VARIABLE = "ACCELERATE_TORCH_DEVICE"

_accelerate = extras.load("accelerate", "torchax.integrations.accelerate")


def use_jax() -> None:
  """Make jax the device of each `accelerate.Accelerator` created from now on.

  Enables the environment for this thread, as `torchax.enable_globally()` does, and sets
  `ACCELERATE_TORCH_DEVICE`. A second call changes nothing.

  Raises:
    RuntimeError: an `Accelerator` on another device exists already.
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


class RandomState:
  """Random stream of jax tensors as an object with a state dict, for checkpoints.

  Libraries save only the generators of devices that they know. Without this state, a
  run resumed from their checkpoint draws other dropout masks.
  """

  def state_dict(self) -> dict[str, torch.Tensor]:
    """Return the current state as one CPU tensor of bytes."""
    return {"jax": rng.snapshot()}

  def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
    """Restore the state of `state_dict`.

    Args:
      state: result of `state_dict`.

    Raises:
      ValueError: `state` is not such a state. The stream is unchanged.
    """
    if "jax" not in state:
      raise ValueError(
        f"Expected the random state of jax under 'jax', but got {sorted(state)}."
      )
    rng.restore(state["jax"])


__all__ = ["RandomState", "use_jax"]
