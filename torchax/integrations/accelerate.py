"""accelerate: `use_jax()` makes jax the device of every `Accelerator`.

accelerate takes the name of its device from the variable `ACCELERATE_TORCH_DEVICE`, and
knows no other way to a device of another package.
"""

import os

import torch

from torchax import rng
from torchax.compat import extras
from torchax.environment import default_env

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


class RandomState:
  """The stream that jax tensors draw from, with the two methods of a saved object.

  Libraries save the generators of the devices they know, and so not this one; a run
  that goes on from their checkpoint would draw other dropout masks.
  """

  def state_dict(self) -> dict[str, torch.Tensor]:
    """The state now: one CPU tensor of bytes."""
    return {"jax": rng.snapshot()}

  def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
    """Goes on where `state_dict` was called.

    Raises:
      ValueError: not such a state. The stream stays as it was.
    """
    if "jax" not in state:
      raise ValueError(
        f"Expected the random state of jax under 'jax', but got {sorted(state)}."
      )
    rng.restore(state["jax"])


__all__ = ["RandomState", "use_jax"]
