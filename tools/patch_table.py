"""Write the table of the attributes of torch that torchax replaces.

usage: python -m tools.patch_table docs/devices.md

The text between the two markers of the page is replaced.
"""

import os
import pathlib
import sys

from tools import tables

_IMPORT, _LATER = "import", "first use"
# A second device, because choosing it makes some of the patches.
_DEVICES = "--xla_force_host_platform_device_count=2"


def rows() -> list[tuple[str, str, str]]:
  """Return (attributes, feature, when) of each feature, in the order of the patches.

  Runs a program to make the patches that the import does not make.
  """
  os.environ["XLA_FLAGS"] = _DEVICES
  import torch

  import torchax
  from torchax.compat.patches import PATCHES
  from torchax.interop import jax_jit

  found: dict[tuple[str, str], list[str]] = {}

  def add(patches, when: str) -> None:
    for patch in patches:
      names = found.setdefault((patch.reason, when), [])
      name = patch.path.removesuffix(".__code__")
      if not name.endswith(("__signature__", "__defaults__", "__kwdefaults__")):
        names += [] if name in names else [name]

  at_import = list(PATCHES)
  add(at_import, _IMPORT)

  def traced(x):
    add([patch for patch in PATCHES if patch not in at_import], _LATER)
    return torch.nn.Linear(2, 2, device="jax")(x)

  torch.distributed.init_device_mesh("jax", (1,))
  for device in ("cpu", "jax"):
    torch.compile(lambda x: x + 1, backend="jax")(torch.ones(2, device=device))
  with torchax.default_env():
    jax_jit(traced)(torch.ones(2, device="jax"))
    torch.jax.set_device(1)
  add([patch for patch in PATCHES if patch not in at_import], _LATER)
  return [
    (", ".join(f"`{name}`" for name in names), reason, when)
    for (reason, when), names in found.items()
  ]


def table() -> str:
  """Return the table in Markdown."""
  return tables.markdown(("attributes", "needed for", "replaced at"), rows())


if __name__ == "__main__":
  page = pathlib.Path(sys.argv[1])
  page.write_text(tables.insert(page.read_text(), "patch_table", table()))
