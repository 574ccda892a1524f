"""`torchax.env_info`: versions, devices and private API, for bug reports."""

import dataclasses
import importlib.metadata
import platform

import jax

from torchax import rng
from torchax.compat import private, versions
from torchax.version import VERSION

_LIBRARIES = (
  *("torch", "jax", "jaxlib", "numpy", "ml_dtypes"),
  *("flax", "optax", "orbax-checkpoint", "transformers", "accelerate", "diffusers"),
  *("peft", "lightning", "torchmetrics", "torchao", "torchvision", "safetensors"),
)


@dataclasses.dataclass(frozen=True)
class EnvInfo:
  """Result of `torchax.env_info`; `str()` gives the text for a bug report.

  Attributes:
    torchax: version of torchax.
    python: version of Python.
    platform: operating system and processor.
    libraries: name -> version of the installed libraries.
    untested: names among Python, torch and JAX whose release series is not tested.
    devices: JAX's devices, the default one first.
    x64: True if JAX keeps 64-bit types.
    random_state: generator, key and count of this thread's stream.
    private_api: dotted name -> True if this torch or JAX has that private API.
    lost: one sentence for each feature lost to a missing private API.

  >>> "torch" in torchax.env_info().libraries
  True
  """

  torchax: str
  python: str
  platform: str
  libraries: dict[str, str]
  untested: tuple[str, ...]
  devices: tuple[str, ...]
  x64: bool
  random_state: str
  private_api: dict[str, bool]
  lost: tuple[str, ...]

  def __str__(self) -> str:
    found = sum(self.private_api.values())
    lines = [
      f"torchax       {self.torchax}",
      f"python        {self.python}",
      f"platform      {self.platform}",
      *(f"{name:<13} {version}" for name, version in self.libraries.items()),
      f"devices       {', '.join(self.devices)}",
      f"64-bit types  {'on' if self.x64 else 'off'}",
      f"random state  {self.random_state}",
      f"private API   {found} of {len(self.private_api)} pieces found",
      *(f"  {sentence}" for sentence in self.lost),
    ]
    if self.untested:
      ranges = ", ".join(
        f"{name} {versions.tested_range(name)}" for name in versions.TESTED
      )
      lines.append(
        f"Not a tested version: {', '.join(self.untested)} (tested are {ranges})."
      )
    return "\n".join(lines)


def env_info() -> EnvInfo:
  """Return versions, devices, random state and private API, for a bug report.

  Initializes JAX's devices, as the first tensor would.

  >>> import torchax
  >>> torchax.env_info().torchax == torchax.VERSION
  True
  """
  libraries = _libraries()
  running = {"python": platform.python_version(), **libraries}
  pieces = private.look_up_all()
  return EnvInfo(
    torchax=VERSION,
    python=platform.python_version(),
    platform=platform.platform(),
    libraries=libraries,
    untested=tuple(
      name
      for name in versions.TESTED
      if name in running and not versions.is_tested(name, running[name])
    ),
    devices=tuple(f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()),
    x64=jax.config.jax_enable_x64,
    random_state=str(rng.current().state),
    private_api={piece.path: bool(piece.is_found) for piece in pieces},
    lost=tuple(piece.message() for piece in pieces if piece.is_missing),
  )


def _libraries() -> dict[str, str]:
  version_by_name = {}
  for name in _LIBRARIES:
    try:
      version_by_name[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  return version_by_name
