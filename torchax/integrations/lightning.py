"""Lightning: `Trainer(accelerator="jax", strategy="jax")`, once this is imported.

The accelerator tells what devices there are; the strategy moves model and batches, and
turns the environment on while the Trainer works.
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
  """JAX's devices, as Lightning asks about them."""

  def setup_device(self, device: torch.device) -> None:
    """Checks that the strategy works on jax.

    Raises:
      MisconfigurationException: it works on another device.
    """
    if device.type != "jax":
      raise MisconfigurationException(
        f"JaxAccelerator expects a strategy on jax, but got one on {device}. Write "
        '`Trainer(accelerator="jax", strategy="jax")`.'
      )

  def teardown(self) -> None:
    """Nothing to do: arrays are freed with their tensors."""

  def get_device_stats(self, device: Any) -> dict[str, Any]:
    """JAX's figures about memory; none on the CPU."""
    found = placement.jax_device(placement.index_in(device) or 0)
    return dict(found.memory_stats() or {})

  @staticmethod
  def parse_devices(devices: Any) -> int:
    """The number of devices, which is 1.

    Raises:
      MisconfigurationException: another number. One process drives all of JAX's
        devices, by sharded arrays.
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
    """The devices of the processes: one."""
    return [torch.device("jax", 0)]

  @staticmethod
  def auto_device_count() -> int:
    """1."""
    return 1

  @staticmethod
  def is_available() -> bool:
    """True: JAX has a CPU at least."""
    return True

  @staticmethod
  def name() -> str:
    """The name for `Trainer(accelerator=…)`."""
    return "jax"


class JaxStrategy(_strategies.SingleDeviceStrategy):
  """One process whose tensors are on jax.

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
    """How numbers are cast."""
    return super().precision_plugin

  @precision_plugin.setter
  def precision_plugin(self, plugin) -> None:
    # Lightning makes it for "cuda" wherever it does not know the device.
    if isinstance(plugin, _plugins.MixedPrecision):
      plugin.device = "jax"
      if plugin.scaler is not None:
        raise MisconfigurationException(
          "JaxStrategy has no scaler of losses for float16; write "
          '`Trainer(precision="bf16-mixed")`, which needs none.'
        )
    self._precision_plugin = plugin

  def setup_environment(self) -> None:
    """Turns the environment on, for the thread that the Trainer runs on."""
    if not self._is_on:
      default_env().enable_torch_modes()
      self._is_on = True
    super().setup_environment()

  def teardown(self) -> None:
    """Brings the model back to the CPU, and turns the environment off."""
    super().teardown()
    if self._is_on:
      default_env().disable_torch_modes()
      self._is_on = False


class RandomStateCallback(_pytorch.Callback):
  """Keeps the random state of jax in Lightning's checkpoints.

  A run that is resumed then draws what the uninterrupted run draws.
  """

  def __init__(self):
    self._pending: torch.Tensor | None = None

  def state_dict(self) -> dict[str, torch.Tensor]:
    """The state now."""
    return {"jax": rng.snapshot()}

  def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
    """Keeps the state until the training begins."""
    self._pending = state_dict["jax"]

  def on_train_batch_start(self, *args: Any) -> None:
    """Restores it after everything that draws on the way to the first batch."""
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


def _refusing(message: str) -> type:
  """A class that is registered as "jax" where jax is not supported."""

  class Refused:
    """Raises where it is asked for anything."""

    def __init__(self, *args, **kwargs):
      raise MisconfigurationException(message)

    @staticmethod
    def is_available() -> bool:
      """True, so that what is asked next raises, and nothing falls back to the CPU."""
      return True

    parse_devices = auto_device_count = get_parallel_devices = classmethod(__init__)

  return Refused


def _refuse(package: str, accelerators: str, strategies: str, message: str) -> None:
  """Has the names "jax" of a package's registries raise, if it is imported."""
  for module, registry in (("accelerators", accelerators), ("strategies", strategies)):
    found = getattr(sys.modules.get(f"{package}.{module}"), registry, None)
    if found is not None and "jax" not in found:
      found.register("jax", _refusing(message), description="not supported")


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
