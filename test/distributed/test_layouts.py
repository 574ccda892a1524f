"""`torchax.mesh_util` on one device: sharders, rules, refusals."""

import jax
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch import nn

from torchax import mesh_util
from torchax.errors import ShardingError
from torchax.mesh_util import Mesh, ShardingRules, SingleAxisSharder

# Upstream's results for an axis of size 8.
FIRST_MULTIPLES = [
  ((8,), ("x",)),
  ((16, 3), ("x", None)),
  ((3, 16), (None, "x")),
  ((4, 24, 8), (None, "x", None)),
  ((3, 5), (None, None)),
  ((0, 8), ("x", None)),
  ((1,), (None,)),
  ((), ()),
]


@pytest.mark.parametrize(("shape", "parts"), FIRST_MULTIPLES)
def test_the_first_dimension_that_divides_is_divided(shape, parts):
  assert mesh_util._shard_first_multiple_of("x", shape, 8) == P(*parts)
  tensor = torch.empty(shape, device="meta")
  assert SingleAxisSharder("x", 8, True)("w", tensor) == P(*parts)
  if "x" in parts:
    assert SingleAxisSharder("x", 8)("w", tensor) == P(*parts)
    return
  for kind in (AssertionError, ShardingError):
    with pytest.raises(kind, match=r"layers\.w of shape .* no dimension .* 8"):
      SingleAxisSharder("x", 8)("layers.w", tensor)


def test_the_first_rule_that_fits_decides():
  rules = ShardingRules(
    [("layers.[0-1].*", P("a")), ("*.weight", ("b", None))],
    otherwise=lambda name, shapedtype: P(*[None] * len(shapedtype.shape), name),
  )
  tensor = torch.empty(2, 2, device="meta")
  assert rules("layers.1.weight", tensor) == P("a")
  assert rules("layers.2.weight", tensor) == P("b", None)
  assert rules("layers.2.bias", tensor) == P(None, None, "layers.2.bias")
  assert ShardingRules()("w", tensor) == P()


def test_rules_by_module_match_instances_of_class_or_subclass():
  class Own(nn.Linear):
    pass

  model = nn.Sequential(nn.Linear(2, 2), Own(2, 2), nn.LayerNorm(2))
  rules = ShardingRules([("*", P("n"))], {Own: {"weight": P("a")}, model[0]: {}})
  found = {name: rules.of(model)(name, t) for name, t in model.named_parameters()}
  assert found["1.weight"] == P("a")
  assert {spec for name, spec in found.items() if name != "1.weight"} == {P("n")}
  assert rules("1.weight", model[1].weight) == P("n")  # name in no model


@pytest.mark.parametrize("spec", ["x", None, ["x"], 3])
def test_a_spec_of_another_type_is_refused(spec):
  with pytest.raises(ShardingError, match=r"PartitionSpec.*but got.*\('x',\)"):
    ShardingRules([("*", spec)])


def test_a_mesh_of_another_type_is_refused():
  with pytest.raises(TypeError, match=r"jax\.sharding\.Mesh.*but got int"):
    Mesh(8)


def test_an_unknown_axis_is_refused_without_a_shape_too():
  mesh = Mesh(jax.make_mesh((1,), ("x",)))
  assert repr(mesh) == "Mesh('x': 1)"
  assert mesh.sharding(("x", None)).spec == P("x", None)
  with pytest.raises(ShardingError, match=r"no axis 'y': its axes are \{'x': 1\}"):
    mesh.sharding(("y",))


def test_a_mesh_of_one_device_changes_no_numbers():
  mesh = Mesh.fsdp_mesh()
  torch.manual_seed(0)
  made = mesh.initialize_model_sharded(nn.Linear, (3, 2))
  torch.manual_seed(0)
  with torch.device("jax"):
    expected = nn.Linear(3, 2)
  for parameter, other in zip(made.parameters(), expected.parameters(), strict=True):
    assert torch.equal(parameter, other)
