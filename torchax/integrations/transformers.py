"""transformers: `use_jax()` makes jax the device of every `Trainer`.

Models, generation and pipelines take `device="jax"` and need nothing from here. The
`Trainer` chooses its device by accelerate, asks a list of devices for bfloat16, and
saves the random states of those that it knows.
"""

import torch

from torchax import rng
from torchax.compat import extras
from torchax.integrations import accelerate

_USER = "torchax.integrations.transformers"
_trainer = extras.load("transformers.trainer", _USER)
_callbacks = extras.load("transformers.trainer_callback", _USER)
_arguments = extras.load("transformers.training_args", _USER)


class RandomStateCallback(_callbacks.TrainerCallback, _callbacks.ExportableState):
  """Keeps the random state of jax in a Trainer's checkpoints (`trainer_state.json`).

  A run that is resumed then draws what the uninterrupted run draws.
  """

  def __init__(self):
    self._pending: torch.Tensor | None = None

  def state(self) -> dict:
    """What the checkpoint holds: the bytes of the state."""
    return {"args": {}, "attributes": {"jax": rng.snapshot().tolist()}}

  @classmethod
  def from_state(cls, state: dict) -> "RandomStateCallback":
    """A new callback: the state is restored when the training begins."""
    return cls()

  def on_train_begin(self, args, state, control, **kwargs) -> None:
    """Finds the state of the checkpoint that is resumed; an older one has none."""
    saved = state.stateful_callbacks.get(type(self).__name__)
    if saved and state.global_step > 0:
      words = saved["attributes"]["jax"]
      self._pending = torch.tensor(words, dtype=torch.uint8, device="cpu")
    # The Trainer expects an entry for each callback that has a state.
    state.stateful_callbacks[type(self).__name__] = self.state()

  def on_step_begin(self, args, state, control, **kwargs) -> None:
    """Restores it where the Trainer restores the others: after skipping batches."""
    if self._pending is not None:
      rng.restore(self._pending)
      self._pending = None


def use_jax() -> None:
  """Makes jax the device of each `transformers.Trainer` made from now on.

  Does what `torchax.integrations.accelerate.use_jax` does; admits
  `TrainingArguments(bf16=True)`; and gives each Trainer a `RandomStateCallback`.

  Raises:
    RuntimeError: an `Accelerator` exists already, and has another device.
  """
  accelerate.use_jax()
  # transformers asks the devices that it knows by name, and jax is none of them. JAX
  # computes in bfloat16 on each of its devices.
  _arguments.is_torch_bf16_gpu_available = lambda: True
  if RandomStateCallback not in _trainer.DEFAULT_CALLBACKS:
    _trainer.DEFAULT_CALLBACKS.append(RandomStateCallback)


__all__ = ["RandomStateCallback", "use_jax"]
