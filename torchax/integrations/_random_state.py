"""The random state of jax as an object that checkpoints can hold."""

import torch

from torchax import rng


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
