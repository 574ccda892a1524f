"""transformers: `use_jax()` makes jax the device of every `Trainer`.

Models, generation and pipelines take `device="jax"` and need no adapter. The `Trainer`
takes its device from accelerate, checks a list of known devices for bfloat16, and saves
the random states of known devices only.
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
  """Callback that keeps jax's random state in checkpoints (`trainer_state.json`).

  A resumed run then draws the same numbers as the uninterrupted run.
  """

  def __init__(self):
    self._pending: torch.Tensor | None = None

  def state(self) -> dict:
    """Return the entry for the checkpoint: the bytes of the random state."""
    return {"args": {}, "attributes": {"jax": rng.snapshot().tolist()}}

  @classmethod
  def from_state(cls, state: dict) -> "RandomStateCallback":
    """Return a new callback; `on_train_begin` reads the state."""
    return cls()

  def on_train_begin(self, args, state, control, **kwargs) -> None:
    """Read the state from the resumed checkpoint; older checkpoints have none."""
    saved = state.stateful_callbacks.get(type(self).__name__)
    if saved and state.global_step > 0:
      words = saved["attributes"]["jax"]
      self._pending = torch.tensor(words, dtype=torch.uint8, device="cpu")
    # The Trainer expects an entry for each callback that has a state.
    state.stateful_callbacks[type(self).__name__] = self.state()

  def on_step_begin(self, args, state, control, **kwargs) -> None:
    """Restore the state after skipped batches, as the Trainer does elsewhere."""
    if self._pending is not None:
      rng.restore(self._pending)
      self._pending = None


def use_jax() -> None:
  """Make jax the device of each `transformers.Trainer` created from now on.

  Calls `torchax.integrations.accelerate.use_jax`, allows `TrainingArguments(bf16=True)`
  and adds a `RandomStateCallback` to each Trainer.

  Raises:
    RuntimeError: an `Accelerator` on another device exists already.
  """
  accelerate.use_jax()
  # transformers checks a fixed list of devices without jax. All devices of JAX can
  # compute in bfloat16.
  _arguments.is_torch_bf16_gpu_available = lambda: True
  if RandomStateCallback not in _trainer.DEFAULT_CALLBACKS:
    _trainer.DEFAULT_CALLBACKS.append(RandomStateCallback)


__all__ = ["RandomStateCallback", "use_jax"]
