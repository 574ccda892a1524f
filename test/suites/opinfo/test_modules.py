"""Modules of `torch.nn` against CPU torch, in every mode, eager and compiled."""

import pytest
import torch
from opinfo import module_groups as groups
from opinfo.agreement import assert_agree, widened
from opinfo.module_calls import Group, Use, tensors_of
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Classes without a row, each with the reason.
WITHOUT = {
  "AdaptiveLogSoftmaxWithLoss": "its subclass has a row",
  "Container": "deprecated base class",
  "CrossMapLRN2d": "deprecated",
  "DataParallel": "for several CUDA devices",
  "Module": "base class",
  "ModuleDict": "a container without a forward pass",
  "ModuleList": "a container without a forward pass",
  "NLLLoss2d": "deprecated",
  "ParameterDict": "a container without a forward pass",
  "ParameterList": "a container without a forward pass",
  "RNNBase": "base class",
  "RNNCellBase": "base class",
  "SyncBatchNorm": "for several processes",
  "LinearCrossEntropyLoss": "see test_linear_cross_entropy.py",
}


def _exact(uses: list[Use], call: str, training: bool, dtype):
  """Return a function that computes the results in double precision on the CPU."""

  def compute():
    group = Group(uses, "cpu", training, dtype)
    group._module.to(torch.float64)
    leaves, spec = pytree.tree_flatten(group._inputs)
    wide = [
      new.requires_grad_(old.requires_grad) if isinstance(old, torch.Tensor) else new
      for old, new in zip(leaves, widened(leaves))
    ]
    group._inputs = pytree.tree_unflatten(wide, spec)
    return getattr(group, call)()

  return compute


def _agree(uses, actual, call, training=True, dtype=None):
  group = Group(uses, "cpu", training, dtype)
  expected = getattr(group, call)()
  exact = _exact(uses, call, training, dtype)
  names = group.names + ["buffers and gradients"] * (len(expected) - len(uses))
  for index, (have, want, name) in enumerate(zip(actual, expected, names, strict=True)):
    try:
      assert_agree([have], [want], lambda index=index: [exact()[index]])
    except AssertionError as error:
      raise AssertionError(f"{name} ({index}): {error}") from error


@pytest.mark.parametrize("name", groups.GROUPS)
def test_results_and_gradients_agree_with_cpu_torch(name):
  uses = groups.GROUPS[name]
  _agree(uses, Group(uses, "jax").gradients(), "gradients")
  _agree(uses, Group(uses, "jax").jitted("gradients"), "gradients")


@pytest.mark.parametrize("name", groups.GROUPS)
def test_evaluation_without_gradients_agrees_with_cpu_torch(name):
  uses = groups.GROUPS[name]
  with torch.inference_mode():
    _agree(uses, Group(uses, "jax", False).values(), "values", False)
  with torch.no_grad():
    _agree(uses, Group(uses, "jax", False).jitted("values"), "values", False)


def _has_kernel(each: Use, dtype: torch.dtype) -> bool:
  """Return False if CPU torch does not implement the dtype."""
  try:
    Group([each], "cpu", True, dtype).values()
  except NotImplementedError:
    return False
  return True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", groups.GROUPS)
def test_half_precision_agrees_with_cpu_torch(name, dtype):
  uses = [each for each in groups.GROUPS[name] if _has_kernel(each, dtype)]
  with torch.no_grad():
    _agree(
      uses, Group(uses, "jax", True, dtype).jitted("values"), "values", True, dtype
    )


@pytest.mark.parametrize("training", [True, False])
def test_random_modules_draw_the_same_eagerly_and_compiled(training):
  uses = groups.RANDOM
  eager = Group(uses, "jax", training)
  torch.manual_seed(0)
  expected = eager.gradients()
  compiled = Group(uses, "jax", training).jitted("gradients")
  on_cpu = Group(uses, "cpu", training).gradients()
  for have, same, like in zip(compiled, expected, on_cpu, strict=True):
    assert_agree(have, pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, same))
    shapes = [
      [(t.shape, t.is_floating_point()) for t in tensors_of(tree)]
      for tree in (have, like)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("each", groups.LAZY, ids=lambda each: each.build.func.__name__)
def test_lazy_modules_get_shapes_on_jax(each):
  on_jax, on_cpu = Group([each], "jax"), Group([each], "cpu")
  for group in (on_jax, on_cpu):
    with torch.no_grad():
      group.values()
  states = [dict(group._module.state_dict()) for group in (on_jax, on_cpu)]
  assert [*states[0]] == [*states[1]]
  for name, value in states[0].items():
    assert value.device.type == "jax" and value.shape == states[1][name].shape


def test_every_class_has_a_row():
  found = {torch.nn.Module}
  for uses in (*groups.GROUPS.values(), groups.RANDOM, groups.LAZY):
    found |= {base for cls in Group(uses, "cpu").classes for base in cls.__mro__}
    found |= {getattr(each.build, "func", None) for each in uses}
  classes = {
    name: value
    for name, value in vars(torch.nn).items()
    if isinstance(value, type) and issubclass(value, torch.nn.Module)
  }
  missing = {name for name, value in classes.items() if value not in found}
  assert missing <= WITHOUT.keys()
