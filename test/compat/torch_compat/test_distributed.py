"""Functions of `torch.distributed`, rerouted, and meshes without communicators."""

import functools
import inspect

import pytest

from torchax.compat import torch_compat


def _decorated(function):
  @functools.wraps(function)
  def around(*args, **kwargs):
    return ("around", function(*args, **kwargs))

  return around


def test_rerouted_function_keeps_its_identity():
  def add(x, y=1, *, z=2):
    """Return the sum of the arguments."""
    return x + y + z

  decorated = _decorated(add)
  signature, calls = inspect.signature(decorated), []

  def instead(original, *args, **kwargs):
    calls.append((args, kwargs))
    return original(*args, **kwargs) if args[0] else "ours"

  for _ in range(2):  # the second time changes nothing
    torch_compat.reroute(decorated, instead)
  assert decorated(1) == ("around", 4) and decorated(1, 2, z=5) == ("around", 8)
  assert decorated(0, z=5) == ("around", "ours")
  assert calls == [((1,), {}), ((1, 2), {"z": 5}), ((0,), {"z": 5})]
  assert (
    inspect.signature(decorated) == signature
    and add.__doc__ == "Return the sum of the arguments."
  )
  with pytest.raises(TypeError):
    decorated(1, unknown=1)


def test_a_rerouted_method_stays_static_or_bound():
  class Counter:
    def bound(self, x):
      return (type(self).__name__, x)

    @staticmethod
    def static(x):
      return x

  for name in ("bound", "static"):
    for _ in range(2):
      torch_compat.reroute_method(
        Counter, name, lambda original, *args: [original(*args)]
      )
  assert Counter().bound(1) == [("Counter", 1)]
  assert Counter().static(1) == Counter.static(1) == [1]


@pytest.mark.parametrize(
  "path",
  [
    "torch.distributed.init_process_group",
    "torch.distributed.tensor.distribute_tensor",
    "torch.distributed.tensor.distribute_module",
    "torch.distributed.tensor._api._dtensor_init_helper",
    "torch.distributed.fsdp.fully_shard",
    "torch.distributed._functional_collectives.permute_tensor",
    "torch.distributed._functional_collectives._maybe_wrap_tensor",
  ],
)
def test_rerouted_functions_have_no_closure(path):
  assert not inspect.unwrap(torch_compat.function_of(path)).__closure__


def test_a_mesh_can_be_made_without_communicators():
  from torch.distributed.device_mesh import DeviceMesh

  original = DeviceMesh.__init__
  original = getattr(original, "_torchax_original", original)
  names = {*torch_compat.options_of_mesh(original, {"mesh_dim_names": ("x",)}, 3)[0]}
  assert {"mesh_dim_names", "_init_backend", "_rank"} == names
  assert torch_compat.current_mesh() is None
  assert torch_compat.group_by_name("no group has this name") is None
