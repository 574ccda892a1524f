"""Random programs agree in all ways to run them; see `tools/fuzz`."""

import dataclasses

import pytest
import torch

import torchax
from tools.fuzz import comparing, generator, ways
from tools.fuzz.comparing import Verdict, compare
from tools.fuzz.generator import generate
from tools.fuzz.program import Program
from tools.fuzz.shrinking import shrink

# Compiled ways cost the most; `make fuzz` runs any number of programs in each way.
PROGRAMS = {
  "eager": (0, 160),
  "jit": (10_000, 40),
  "compile": (20_000, 20),
  "compile_on_jax": (30_000, 15),
}
PARTS = 5


@pytest.fixture(autouse=True)
def everywhere():
  torchax.enable_globally()
  yield
  torchax.disable_globally()


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", PROGRAMS)
def test_random_programs_agree_with_torch(way, part):
  first, count = PROGRAMS[way]
  for seed in range(first + part, first + count, PARTS):
    program = generate(seed)
    for found in compare(program, [way]):
      message = f"Seed {seed}: {found.detail}\n{program.source}"
      assert found.verdict is not Verdict.DIFFERS, message


PLANTED = Program(
  (
    "v0 = p * 2",
    "v1 = v0[1:]",
    "v1.mul_(3)",
    "with torch.no_grad():\n  v2 = v1.t()\n  v2.add_(1)",
    "v3 = v0.square()",
    "v4 = v3.sum(0)",
  ),
  ("v0", "v4"),
)


def plant(monkeypatch, way, change):
  """Make one way of running change its result."""
  sound = ways.WAYS[way]
  broken = dataclasses.replace(
    sound, wrap=lambda function: lambda *args: change(*function(*args))
  )
  monkeypatch.setitem(ways.WAYS, way, broken)


def test_a_wrong_value_is_found(monkeypatch):
  plant(monkeypatch, "eager", lambda v0, v4: (v0, v4 * 1.001))
  (found,) = compare(PLANTED, ["eager"])
  assert found.verdict is Verdict.DIFFERS
  assert found.detail.startswith("result v4: expected")


def test_a_lost_alias_is_found(monkeypatch):
  aliased = Program(("v0 = p[1:]",), ("v0",))
  plant(monkeypatch, "eager", lambda v0: (v0.clone(),))
  (found,) = compare(aliased, ["eager"])
  assert found.detail.startswith("sees writes to result v0")


def test_a_lost_gradient_is_found(monkeypatch):
  trained = Program(("v0 = x * 2",), ("v0",))
  plant(monkeypatch, "eager", lambda v0: (v0 * 0.5 + v0.detach() * 0.5,))
  (found,) = compare(trained, ["eager"])
  assert found.detail.startswith("gradient of x")


def test_an_additional_draw_is_found(monkeypatch):
  drawn = Program(("v0 = torch.rand_like(p)",), ("v0",))
  plant(monkeypatch, "jit", lambda v0: (v0, torch.rand(1, device="jax"))[:1])
  (found,) = compare(drawn, ["jit"])
  assert found.detail.startswith("next draw")


def test_refusals_with_a_way_out_are_no_differences():
  program = Program(("v0 = p[p > 0.3]",), ("v0",))
  (found,) = compare(program, ["jit"])
  assert found.verdict is Verdict.REFUSED


def test_programs_that_torch_refuses_are_invalid():
  (found,) = compare(Program(("x.add_(1)",), ("x",)), ["eager"])
  assert found.verdict is Verdict.INVALID


def test_difference_within_torch_has_its_own_verdict(monkeypatch):
  for way in ("compile", "aot_eager"):
    plant(monkeypatch, way, lambda v0: (v0 + 1,))
  (found,) = compare(Program(("v0 = p * 2",), ("v0",)), ["compile"])
  assert found.verdict is Verdict.TORCH_DIFFERS


def test_shrinking_leaves_the_lines_that_fail():
  def fails(program):
    outcome = ways.run(program, "cpu")
    return outcome.error is None and "v2.add_(1)" in program.source

  small = shrink(PLANTED, fails)
  assert small.statements == ("v0 = p * 2", "v1 = v0[1:]", "v2 = v1.t()\nv2.add_(1)")
  assert small.results == ("v0",)


def test_a_seed_gives_the_same_program():
  # torch warns only once of a statement that the second generator run tries.
  assert generate(5) == generate(5)
  assert generate(9877) == generate(9877)
  assert len({generate(seed).source for seed in range(20)}) == 20


def test_no_integers_with_gradients_in_programs():
  numbers = torch.arange(3)
  assert generator._is_moderate(numbers)
  numbers.fill_(torch.ones((), requires_grad=True))
  assert numbers.requires_grad and not generator._is_moderate(numbers)


def test_tolerance_is_relative_to_the_largest_number():
  expected = torch.tensor([1000.0, 0.0])
  assert not comparing._differs(expected, expected + 1e-3)
  assert comparing._differs(expected, expected + 1.0)


def test_a_program_prints_as_a_script(capsys):
  way = ways.WAYS["jit"]
  exec(PLANTED.script(way.source, way.device), {})
  torchax.disable_globally()  # the script has enabled it
  assert "device='jax:0'" in capsys.readouterr().out
