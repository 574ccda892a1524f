"""Attributes of torch that torchax replaces: the list is complete and can be undone."""

import types

import pytest
import source_tree
from faults.programs import run

from tools import tables
from torchax.compat import patches

# Patches that torch makes itself: for a device's name, and on loading placements.
BY_TORCH = {
  "DeviceType.JAX",
  "DeviceType.__repr__",
  "DeviceType.__str__",
  "DeviceType.name",
  "Module.jax",
  "PackedSequence.is_jax",
  "PackedSequence.jax",
  "Placement.__eq__",
  "Placement.__fx_repr__",
  "Placement.__hash__",
  "ProfilerActivity.JAX",
  "ProfilerActivity.__repr__",
  "ProfilerActivity.__str__",
  "ProfilerActivity.name",
  "Tensor.is_jax",
  "Tensor.jax",
  "backend_registration._privateuse1_backend_name",
}
CHANGES = """
import sys, types, torch, torch.utils.data, torch.optim, torch.distributed, jax, numpy

def attributes():
  found = {}
  for name, module in list(sys.modules.items()):
    library = name.partition(".")[0]
    if library not in ("torch", "jax", "jaxlib") or not hasattr(module, "__dict__"):
      continue
    for key, value in list(vars(module).items()):
      if getattr(value, "__module__", None) == name and isinstance(value, type):
        for k, v in list(vars(value).items()):
          if k not in ("__dict__", "__weakref__"):
            found[id(value), f"{key}.{k}"] = v
      if isinstance(value, types.FunctionType) and value.__module__ == name:
        found[id(value), f"{key}.__code__"] = value.__code__
      found[name, f"{name.rpartition('.')[2]}.{key}"] = value
  return found

before = attributes()
known = {module for module, name in before}  # and classes, by their id
import torchax
if UNDO:
  if UNDO == "after a mesh":
    torch.distributed.init_device_mesh("jax", (1,))
  torchax.unpatch()
code = types.CodeType, property, classmethod, staticmethod, list, tuple
for (module, name), value in attributes().items():
  old = before.get((module, name))
  # Numbers, strings and modules that were loaded are no code of torch's.
  is_code = any(callable(v) or isinstance(v, code) for v in (old, value))
  if module in known and old is not value and is_code:
    print(name)
print(*{name for _, name in before} - {name for _, name in attributes()})
"""


def _changed(undo: str) -> set[str]:
  return set(run(f"UNDO = {undo!r}\n{CHANGES}").split()) - BY_TORCH


@pytest.mark.programs
@pytest.mark.parametrize("undo", ["at once", "after a mesh"])
def test_unpatch_restores_every_object_of_torch_and_jax(undo):
  assert not _changed(undo)


@pytest.mark.programs
def test_import_replaces_only_listed_objects():
  listed = {patch.name for patch in patches.PATCHES}
  changed = _changed("")
  assert "utils.swap_tensors" in changed
  assert not {name for name in changed if name.partition(".")[2] not in listed}
  assert not {name for name in changed if name.endswith("__code__")}


@pytest.mark.programs
def test_page_has_the_list():
  page = (source_tree.ROOT / "docs" / "devices.md").read_text()
  made = run("from tools import patch_table; print(patch_table.table())")
  assert tables.read_table(page, "patch_table") == made.strip(), (
    "write it by: python -m tools.patch_table docs/devices.md"
  )


def _function(x, y=1):
  return x + y


OWNERS = {
  "module": (types.ModuleType("module"), "new", 2),
  "class": (type("Class", (), {"old": staticmethod(len)}), "old", staticmethod(max)),
  "function": (_function, "__code__", (lambda x, y: x - y).__code__),
}


@pytest.mark.parametrize(("owner", "name", "value"), OWNERS.values(), ids=OWNERS)
def test_undo_restores_the_stored_object(owner, name, value):
  before = dict(vars(owner)), getattr(owner, "__code__", None)
  made = patches.patch(owner, name, value, "a test")
  assert patches.PATCHES[-1] is made
  assert (vars(owner).get(name) or getattr(owner, name)) is value
  made.undo()
  assert made not in patches.PATCHES
  assert (dict(vars(owner)), getattr(owner, "__code__", None)) == before
