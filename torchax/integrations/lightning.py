"""Lightning adapter: its import enables `Trainer(accelerator="jax", strategy="jax")`.

The accelerator reports the devices. The strategy moves model and batches to jax, and
enables the environment while the Trainer runs.
"""

import sys
from typing import Any

import torch

from torchax import rng
from torchax.compat import extras
from torchax.devices import placement
from torchax.environment import default_env

_USER = "torchax.integrations.lightning"
_pytorch = extras.load("lightning.pytorch", _USER)
_accelerators = extras.load("lightning.pytorch.accelerators", _USER)
_strategies = extras.load("lightning.pytorch.strategies", _USER)
_plugins = extras.load("lightning.pytorch.plugins", _USER)
_exceptions = extras.load("lightning.pytorch.utilities.exceptions", _USER)
MisconfigurationException = _exceptions.MisconfigurationException


class JaxAccelerator(_accelerators.Accelerator):
  """Lightning's interface to JAX's devices."""

  def setup_device(self, device: torch.device) -> None:
    """Check that the strategy runs on jax.

    Raises:
      MisconfigurationException: it runs on another device.
    """
    if device.type != "jax":
      raise MisconfigurationException(
        f"JaxAccelerator expects a strategy on jax, but got one on {device}. Write "
        '`Trainer(accelerator="jax", strategy="jax")`.'
      )

  def teardown(self) -> None:
    """Do nothing: arrays are freed with their tensors."""

  def get_device_stats(self, device: Any) -> dict[str, Any]:
    """Return JAX's memory statistics; empty on the CPU."""
    jax_device = placement.jax_device(placement.index_in(device) or 0)
    return dict(jax_device.memory_stats() or {})

  @staticmethod
  def parse_devices(devices: Any) -> int:
    """Return the number of devices, always 1: one process drives all JAX devices.

    Raises:
      MisconfigurationException: any other number was requested.
    """
    if devices in (1, "1", -1, "-1", "auto"):
      return 1
    raise MisconfigurationException(
      f"JaxAccelerator expects devices=1, but got {devices!r}: one process drives all "
      "of JAX's devices. Shard the batch inside the training step instead, or choose "
      "another device than the first by "
      '`Trainer(strategy=JaxStrategy("jax:1"))`.'
    )

  @staticmethod
  def get_parallel_devices(devices: int) -> list[torch.device]:
    """Return the one device of the process."""
    return [torch.device("jax", 0)]

  @staticmethod
  def auto_device_count() -> int:
    return 1

  @staticmethod
  def is_available() -> bool:
    """Return True: JAX has at least a CPU."""
    return True

  @staticmethod
  def name() -> str:
    """Return the name for `Trainer(accelerator=…)`."""
    return "jax"


class JaxStrategy(_strategies.SingleDeviceStrategy):
  """Strategy of one process whose tensors are on jax.

  Args:
    device: a jax device, such as "jax" or "jax:0".
    accelerator, checkpoint_io, precision_plugin: as in `SingleDeviceStrategy`.
  """

  strategy_name = "jax"

  def __init__(
    self,
    device: str | torch.device = "jax:0",
    accelerator=None,
    checkpoint_io=None,
    precision_plugin=None,
  ):
    self._is_on = False
    super().__init__(
      device=device,
      accelerator=accelerator or JaxAccelerator(),
      checkpoint_io=checkpoint_io,
      precision_plugin=precision_plugin,
    )

  @property
  def precision_plugin(self):
    return super().precision_plugin

  @precision_plugin.setter
  def precision_plugin(self, plugin) -> None:
    # Lightning creates the plugin for "cuda" if it does not know the device.
    if isinstance(plugin, _plugins.MixedPrecision):
      plugin.device = "jax"
      if plugin.scaler is not None:
        raise MisconfigurationException(
          "JaxStrategy has no scaler of losses for float16; write "
          '`Trainer(precision="bf16-mixed")`, which needs none.'
        )
    self._precision_plugin = plugin

  def setup_environment(self) -> None:
    """Enable the environment for the thread of the Trainer."""
    if not self._is_on:
      default_env().enable_torch_modes()
      self._is_on = True
    super().setup_environment()

  def teardown(self) -> None:
    """Move the model back to the CPU and disable the environment."""
    super().teardown()
    if self._is_on:
      default_env().disable_torch_modes()
      self._is_on = False


class RandomStateCallback(_pytorch.Callback):
  """Callback that keeps the random state of jax in Lightning's checkpoints.

  A resumed run then draws the same numbers as the uninterrupted run.
  """

  def __init__(self):
    self._pending: torch.Tensor | None = None

  def state_dict(self) -> dict[str, torch.Tensor]:
    """Return the current state."""
    return {"jax": rng.snapshot()}

  def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
    """Keep the state until training begins."""
    self._pending = state_dict["jax"]

  def on_train_batch_start(self, *args: Any) -> None:
    """Restore the state once all draws before the first batch have been made."""
    if self._pending is not None:
      rng.restore(self._pending)
      self._pending = None


_FABRIC = (
  'Fabric does not know jax. Write the loop with torch alone: `model.to("jax")`, and '
  '`batch.to("jax")`; or use `lightning.pytorch.Trainer`.'
)
_OTHER_PACKAGE = (
  "torchax tells the package `lightning` about jax, of which `pytorch_lightning` is "
  "another copy. Write `import lightning.pytorch as pl` in place of "
  "`import pytorch_lightning as pl`."
)


def _raising_class(message: str) -> type:
  """Return a class to register as "jax" where jax is not supported; it raises."""

  class Refused:
    def __init__(self, *args, **kwargs):
      raise MisconfigurationException(message)

    @staticmethod
    def is_available() -> bool:
      """Return True: the next call raises, rather than a silent fallback to the CPU."""
      return True

    parse_devices = auto_device_count = get_parallel_devices = classmethod(__init__)

  return Refused


def _refuse(package: str, accelerators: str, strategies: str, message: str) -> None:
  """Register classes that raise as "jax" in a package's registries, if imported."""
  for module, registry in (("accelerators", accelerators), ("strategies", strategies)):
    entries = getattr(sys.modules.get(f"{package}.{module}"), registry, None)
    if entries is not None and "jax" not in entries:
      entries.register("jax", _raising_class(message), description="not supported")


def _register() -> None:
  if "jax" not in _accelerators.AcceleratorRegistry:
    _accelerators.AcceleratorRegistry.register(
      "jax", JaxAccelerator, description="JAX's devices"
    )
  if "jax" not in _strategies.StrategyRegistry:
    _strategies.StrategyRegistry.register(
      "jax", JaxStrategy, description="one process whose tensors are on jax"
    )
  for fabric in ("lightning.fabric", "lightning_fabric"):
    _refuse(fabric, "ACCELERATOR_REGISTRY", "STRATEGY_REGISTRY", _FABRIC)
  names = "AcceleratorRegistry", "StrategyRegistry"
  _refuse("pytorch_lightning", *names, _OTHER_PACKAGE)


_register()

__all__ = ["JaxAccelerator", "JaxStrategy", "RandomStateCallback"]
