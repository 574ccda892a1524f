"""`torchax.profile`: its files, the time of each module, and its errors."""

import gzip
import json

import jax
import pytest
import torch

import torchax
from torchax.interop import jax_jit


def trained_model():
  model = torch.nn.Sequential(
    torch.nn.Linear(4, 64), torch.nn.Sequential(torch.nn.Linear(64, 512))
  )
  return model.to("jax")


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
  """Return the profile of two training steps."""
  model = trained_model()
  optimizer = torch.optim.SGD(model.parameters(), 0.1)

  def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

  x = torch.ones(256, 4, device="jax")
  jitted = jax_jit(step)
  jitted(x)
  label = torch.profiler.record_function("two steps")
  with torchax.profile(tmp_path_factory.mktemp("trace")) as found, label:
    jitted(x)
    jitted(x)
  return found


def events(profile) -> list[dict]:
  with gzip.open(profile.path, "rt") as file:
    return json.load(file)["traceEvents"]


def test_trace_has_the_path_of_each_module(profile):
  names = {event.get("args", {}).get("op_name", "") for event in events(profile)}
  assert any(name.startswith("jit(step)/0/") for name in names)
  assert any(name.startswith("jit(step)/transpose(jvp(1))/0/") for name in names)


def test_trace_has_labels_of_torch_profiler(profile):
  assert any(event.get("name") == "two steps" for event in events(profile))


def test_tensorboard_finds_the_trace(profile):
  (run,) = profile.directory.glob("plugins/profile/*")
  assert list(run.glob("*.xplane.pb"))


def test_largest_module_takes_longest(profile):
  modules = profile.by_module()
  assert next(iter(modules)) == "1.0"
  assert modules["1.0"].forward > 0 and modules["1.0"].backward > 0
  assert "Optimizer.step#SGD.step" in modules


def test_depth_adds_up_inner_modules(profile):
  modules, outer = profile.by_module(), profile.by_module(depth=1)
  assert outer["1"] == modules["1.0"]
  assert sum(map(sum, outer.values())) == pytest.approx(sum(map(sum, modules.values())))


def test_table_lists_the_longest_module_first(profile):
  title, first, *_ = str(profile).splitlines()
  assert title.split() == ["module", "forward", "backward", "share"]
  assert first.startswith("1.0 ")


def test_file_is_refused_as_a_directory(tmp_path):
  file = tmp_path / "file"
  file.touch()
  refused = pytest.raises(NotADirectoryError, match="but got the file")
  with refused, torchax.profile(file):
    pass


def test_second_trace_at_a_time_is_refused(tmp_path):
  refused = pytest.raises(RuntimeError, match=r"profile could not start: .* Only one")
  with jax.profiler.trace(tmp_path), refused, torchax.profile(tmp_path):
    pass


def test_trace_ends_after_an_exception(tmp_path):
  with pytest.raises(KeyError), torchax.profile(tmp_path) as found:
    raise KeyError("no")
  assert found.path.exists()
  with torchax.profile(tmp_path):
    pass


def test_running_trace_has_no_times(tmp_path):
  refused = pytest.raises(RuntimeError, match="trace that has ended")
  with torchax.profile(tmp_path) as found, refused:
    found.by_module()
