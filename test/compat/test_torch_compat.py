"""The files of `compat/torch_compat`: their names are one namespace."""

import collections
import importlib
import pkgutil

from torchax.compat import torch_compat


def test_no_two_themes_define_one_name():
  owners = collections.defaultdict(set)
  for info in pkgutil.iter_modules(torch_compat.__path__, f"{torch_compat.__name__}."):
    if info.name.endswith((".active_functions", ".named_scopes")):
      continue  # used by their own names
    module = importlib.import_module(info.name)
    for name, value in vars(module).items():
      if getattr(value, "__module__", None) == info.name:
        owners[name].add(info.name)
        assert name.startswith("_") or getattr(torch_compat, name) is value
  public = {name: files for name, files in owners.items() if not name.startswith("_")}
  assert public and not {name: f for name, f in public.items() if len(f) > 1}
