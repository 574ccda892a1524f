"""Lowerings called by upstream's names, with arguments in upstream's order."""

import importlib.util
import inspect
import json
import pathlib
import re

import jax.numpy as jnp
import pytest
import torch
from compare import assert_same

import torchax
from torchax.interop import torch_view
from torchax.ops import jaten, jtorch

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[2]
FACTS = json.loads((ROOT / "test" / "upstream_names.json").read_text())
PLACES = {"lowerings": jaten, "functions": jtorch}

# Arguments that torch passes and arrays lack; here they are keywords or ignored.
OPTIONS = {
  *("dtype", "layout", "device", "pin_memory", "memory_format", "requires_grad"),
  *("generator", "env", "out"),
}

EACH = [
  pytest.param(module, name, parameters, id=name)
  for table, module in PLACES.items()
  for name, parameters in FACTS[table].items()
]


def _upstreams_places(parameters: str) -> tuple[int, int]:
  """Return the least and greatest number of positional arguments upstream."""
  words = parameters.split()
  positional = words[: words.index("*")] if "*" in words else words
  names = [w for w in positional if not w.startswith("*")]
  names = [w for w in names if w.rstrip("=") not in OPTIONS]
  return sum(not w.endswith("=") for w in names), len(names)


def _places(function) -> tuple[int, float]:
  """Return the least and greatest number of positional arguments of a function."""
  parameters = list(inspect.signature(function).parameters.values())
  if hasattr(function, "__wrapped__") and parameters[0].name == "key":
    parameters = parameters[1:]  # a sampler, whose key is drawn for it
  positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
  positional = [p for p in positional if p.name not in OPTIONS]
  needed = sum(p.default is p.empty for p in positional)
  has_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
  return needed, float("inf") if has_any else len(positional)


def _takes_upstreams_places(function, parameters: str) -> bool:
  if parameters.startswith("*args"):
    # Upstream's function takes any arguments, which tells nothing about calls.
    return True
  (needed, most), (theirs, all_of_theirs) = (
    _places(function),
    _upstreams_places(parameters),
  )
  return needed <= theirs and all_of_theirs <= most


def _section(page: str, title: str) -> str:
  """Return the part of a page under a heading, up to the next one."""
  found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", page, re.S | re.M)
  assert found, title
  return found.group(1)


GUIDE = (ROOT / "docs" / "migrating.md").read_text()
NEWS = (ROOT / "CHANGELOG.md").read_text()
BY_NAME = _section(GUIDE, "Lowerings by name")
LEFT_OUT, OTHERWISE = (
  block.split() for block in re.findall(r"```text\n(.*?)```", BY_NAME, re.S)
)


@pytest.mark.parametrize(("module", "name", "parameters"), EACH)
def test_a_lowering_takes_upstreams_positional_arguments(module, name, parameters):
  written = f"jtorch.{name}" if module is jtorch else name
  assert hasattr(module, name) is (written not in LEFT_OUT)
  if written not in LEFT_OUT:
    takes = _takes_upstreams_places(getattr(module, name), parameters)
    assert takes is (written not in OTHERWISE)


def test_omitted_or_changed_names_are_upstreams():
  functions = {f"jtorch.{name}" for name in FACTS["functions"]}
  assert {*LEFT_OUT, *OTHERWISE} <= {*FACTS["lowerings"], *functions}
  assert "docs/migrating.md#lowerings-by-name" in NEWS


def _missing_modules() -> set[str]:
  return {m for m in FACTS["modules"] if importlib.util.find_spec(m) is None}


def test_every_module_of_upstream_is_there():
  assert not _missing_modules()


def _public():
  for module, names in FACTS["modules"].items():
    if module in _missing_modules():
      continue
    for name, fact in names.items():
      yield pytest.param(module, name, fact, id=f"{module}.{name}")


def _takes_upstreams_names(function, parameters: str) -> bool:
  """Return True if upstream's names are parameters here and no other is required."""
  try:
    ours = inspect.signature(function).parameters
  except ValueError:  # torch's own function, in C++
    return True
  theirs = {w.rstrip("=") for w in parameters.split() if not w.startswith("*")}
  if any(p.kind is p.VAR_KEYWORD for p in ours.values()):
    return True
  is_needed = {
    name
    for name, p in ours.items()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  }
  return theirs - {"self", "cls"} <= set(ours) and is_needed - {"self"} <= theirs


@pytest.mark.parametrize(("module", "name", "fact"), list(_public()))
def test_a_public_name_is_upstreams(module, name, fact):
  ours = getattr(importlib.import_module(module), name)
  if isinstance(fact, str):
    assert fact == "data" or _takes_upstreams_names(ours, fact)
    return
  assert set(fact.get("fields", "").split()) <= set(
    getattr(ours, "__dataclass_fields__", ())
  )
  for method, parameters in fact["methods"].items():
    assert _takes_upstreams_names(getattr(ours, method), parameters), method


def test_names_with_other_meaning_are_upstreams_and_in_changelog():
  listed = re.findall(
    r"^- (.*?)(?=^- |\Z)",
    _section(GUIDE, "Different on purpose"),
    re.S | re.M,
  )
  assert len(listed) > 3
  words = set(re.findall(r"\w+", json.dumps(FACTS)))
  for row in listed:
    # The row is about the names that it starts with.
    first = re.match(r"`([^`]+)`", row).group(1)
    assert first in NEWS, f"the changelog does not say {first}"
    assert words & set(re.findall(r"\w+", first)), f"upstream has no {first}"


def test_table_of_running_programs_names_all_tests():
  rows = re.findall(r"^\|.*\|$", _section(GUIDE, "Tested uses"), re.M)[2:]
  named = [set(re.findall(r"`(test_\w+\.py)`", row.split("|")[3])) for row in rows]
  assert all(named)
  assert set().union(*named) == {p.name for p in HERE.glob("test_*.py")}


def test_lowerings_compute_with_arrays():
  x = jnp.arange(16.0).reshape(1, 1, 4, 4)
  weight = jnp.ones((1, 1, 2, 2))
  out = jaten._aten_conv2d(x, weight, None, [1, 1], [0, 0], [1, 1], 1)
  expected = torch.nn.functional.conv2d(
    torch.arange(16.0).reshape(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
  )
  assert_same(torch_view(out), expected)
  assert jaten._aten_flatten(x).shape == (16,)
  assert jaten._aten_movedim(x, 2, 0).shape == (4, 1, 1, 4)


def test_samplers_draw_their_keys_from_the_environment():
  env = torchax.Environment(seed=3)
  first, second = (jaten._aten_randn((64,), env=env) for _ in range(2))
  assert not jnp.array_equal(first, second) and env.rng.state.count == 2
  again = torchax.Environment(seed=3)
  assert jnp.array_equal(first, jaten._aten_randn((64,), env=again))


def test_attention_is_reached_by_upstreams_names():
  q = torch.randn(1, 1, 4, 8)
  expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
  x = q.to("jax")
  for name in ("_sdpa_reference", "scaled_dot_product_attention"):
    out = getattr(jtorch, name)(x, x, x, is_causal=True)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
