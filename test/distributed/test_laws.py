"""Training of a transformer equals one device, on any number of devices.

`training.py` trains it with data, FSDP, tensor and mixed sharding, and
`tools/layout_table.py` with the APIs of torch. Masks are equal bit for bit. Losses are
equal up to the order of sums: XLA adds partial sums of the devices, and one device adds
all terms.
"""

import collections
import json

import pytest
from distributed import worlds
from source_tree import ROOT

from tools import tables
from torchax.processes import Collective

pytestmark = pytest.mark.programs

TRAINING = worlds.HERE / "training.py"
ONE = "data:1"
OF_EIGHT = ("data:8", "fsdp:8", "tensor:8", "mixed:8")
RUNS = ("data:2", "mixed:4", *OF_EIGHT)
STEPS = 4

# Tolerance for sums of 64 terms through a few layers, added in another order: a few
# roundings of float32.
ROUNDINGS = 4e-6


def _read(done, out) -> dict:
  assert done.returncode == 0, done.stdout[-4000:]
  return json.loads(out.read_text())


@pytest.fixture(scope="module")
def of_one(tmp_path_factory) -> dict:
  """Return the losses and masks of one process of eight devices, by run."""
  out = tmp_path_factory.mktemp("laws") / "found.json"
  return _read(worlds.alone(8, TRAINING, out, ONE, *RUNS, "--moved"), out)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict:
  """Return the losses and masks of two processes of four devices, by run."""
  return _of_several(2, 4, tmp_path_factory)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory) -> dict:
  """Return the losses and masks of four processes of two devices, by run."""
  return _of_several(4, 2, tmp_path_factory)


def _of_several(processes: int, devices: int, tmp_path_factory) -> dict:
  out = tmp_path_factory.mktemp("laws") / "found.json"
  return _read(worlds.launch(processes, TRAINING, out, *OF_EIGHT, devices=devices), out)


def _losses(found: dict) -> list[float]:
  assert len(found["losses"]) == STEPS
  return [float.fromhex(loss) for loss in found["losses"]]


def test_masks_differ_from_step_to_step(of_one):
  assert len(set(of_one[ONE]["masks"])) == STEPS


@pytest.mark.parametrize("run", RUNS)
def test_one_process_draws_the_masks_of_one_device(of_one, run):
  assert of_one[run]["masks"] == of_one[ONE]["masks"]


@pytest.mark.parametrize("run", RUNS)
def test_one_process_has_the_losses_of_one_device(of_one, run):
  assert _losses(of_one[run]) == pytest.approx(_losses(of_one[ONE]), rel=ROUNDINGS)


@pytest.mark.parametrize("run", OF_EIGHT)
@pytest.mark.parametrize("world", ["of_two", "of_four"])
def test_several_processes_draw_the_masks_of_one_device(of_one, world, run, request):
  found = request.getfixturevalue(world)
  assert found[run]["masks"] == of_one[ONE]["masks"]


@pytest.mark.parametrize("run", OF_EIGHT)
@pytest.mark.parametrize("world", ["of_two", "of_four"])
def test_several_processes_have_the_losses_of_one_device(of_one, world, run, request):
  found = request.getfixturevalue(world)
  assert _losses(found[run]) == pytest.approx(_losses(of_one[ONE]), rel=ROUNDINGS)


# Each step asks all devices whether an index of the embedding was out of range.
WHETHER_AN_INDEX_IS_WRONG = Collective(
  "all-reduce", 1, "jit(step)/transpose(jvp(words))/reduce_or"
)


def _of_kinds(collectives) -> dict[str, tuple[int, int]]:
  """Return the number of collectives of each kind, and their bytes."""
  found = [Collective(*one) for one in collectives]
  found = [one for one in found if one != WHETHER_AN_INDEX_IS_WRONG]
  counts = collections.Counter(one.kind for one in found)
  return {
    kind: (counts[kind], sum(one.bytes for one in found if one.kind == kind))
    for kind in counts
  }


@pytest.mark.parametrize("run", RUNS)
def test_step_has_the_collectives_of_the_same_step_in_plain_jax(of_one, run):
  ours, plain = _of_kinds(of_one[run]["ours"]), _of_kinds(of_one[run]["plain"])
  assert ours == plain


def test_one_device_sends_nothing(of_one):
  assert of_one[ONE]["ours"] == of_one[ONE]["plain"] == []


def test_a_killed_run_goes_on_bit_for_bit(of_two, tmp_path):
  pytest.importorskip("orbax.checkpoint", reason="the checkpoint extra is missing")
  out, saved = tmp_path / "found.json", f"--checkpoints={tmp_path / 'run'}"
  command = (TRAINING, out, "mixed:8", saved)
  killed = worlds.launch(2, *command, "--die-after=2", devices=4)
  assert "exitcode  : -9" in killed.stdout
  assert killed.returncode == 1 and not out.exists()
  assert (tmp_path / "run" / "1").exists() and not (tmp_path / "run" / "3").exists()
  found = _read(worlds.launch(2, *command, devices=4), out)
  assert found["mixed:8"] == of_two["mixed:8"]


def test_in_a_fixed_order_losses_are_equal_bit_for_bit(tmp_path):
  out = tmp_path / "found.json"
  found = _read(worlds.alone(8, worlds.HERE / "fixed_order.py", out), out)
  assert len(set(found["2"])) == len(found["2"]) == 8
  assert found["2"] == found["4"] == found["8"]


def _rows(page) -> list[list[str]]:
  """Return the cells of the table of layouts, without its header."""
  table = tables.read_table(page.read_text(encoding="utf-8"), "layout_table")
  return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_layouts_of_torch_have_the_losses_of_one_device(tmp_path):
  """Compare the layouts with one another, and their losses with the docs."""
  page = tmp_path / "page.md"
  page.write_text(f"{tables.begin('layout_table')}\n{tables.END}\n")
  done = worlds.alone(8, "-m", "tools.layout_table", page)
  assert done.returncode == 0, done.stdout[-4000:]
  rows, documented = _rows(page), _rows(ROOT / "docs" / "rng-evidence.md")
  assert [row[:2] for row in rows] == [row[:2] for row in documented]
  for (name, _, losses, difference, drawn), (*_, expected, _, _) in zip(
    rows, documented, strict=True
  ):
    assert losses == rows[0][2] and float(difference) < ROUNDINGS, name
    assert drawn == "equal", name
    # Another processor may round the last digit otherwise.
    assert [*map(float, losses.split())] == pytest.approx(
      [*map(float, expected.split())], abs=1.5e-4
    ), "write the table by: python -m tools.layout_table docs/rng-evidence.md"
