"""Checks that `devices/test_placement.py` runs in a process with eight devices.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 python eight_devices.py out.json

Each function of `CASES` is a check; it runs outside of the environment and inside. The
output file has "" or a traceback for each.
"""

import contextlib
import copy
import io
from collections.abc import Callable
from concurrent import futures

import jax
import many_devices
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils.checkpoint import checkpoint

import torchax
from torchax.errors import MixedDeviceError, NoSuchDeviceError
from torchax.interop import jax_jit
from torchax.tensor import new_tensor

CASES: dict[str, Callable] = {}


def case(function: Callable) -> Callable:
  """Add a check to `CASES`."""
  CASES[function.__name__] = function
  return function


def on(index: int) -> torch.device:
  return torch.device("jax", index)


def x() -> torch.Tensor:
  return torch.tensor([1.0, 2.0], device="cpu").to("jax:3")


def sharded() -> torch.Tensor:
  mesh = Mesh(np.array(jax.devices()), ("x",))
  rows = NamedSharding(mesh, PartitionSpec("x"))
  array = jax.device_put(np.arange(8, dtype=np.float32), rows)
  return new_tensor(array, torchax.default_env())


def is_sharded(tensor: torch.Tensor) -> bool:
  return tensor.jax().sharding.spec == PartitionSpec("x")


@case
def an_index_is_that_of_the_local_devices():
  assert torch.jax.device_count() == torch.accelerator.device_count() == 8
  for index, device in enumerate(jax.local_devices()):
    assert torch.zeros(1).to(f"jax:{index}").jax_device == device


@case
def a_tensor_says_where_it_lies():
  assert x().device == on(3) and x().get_device() == 3 and x().is_jax
  assert repr(x()) == "tensor([1., 2.], device='jax:3')"
  array = jax.device_put(np.ones(2, np.float32), jax.local_devices()[5])
  assert torchax.default_env().j2t_iso(array).device == on(5)


FACTORIES = {
  "ones": lambda **kw: torch.ones(2, **kw),
  "zeros": lambda **kw: torch.zeros(2, **kw),
  "empty": lambda **kw: torch.empty(2, **kw),
  "full": lambda **kw: torch.full((2,), 1.0, **kw),
  "arange": lambda **kw: torch.arange(2, **kw),
  "eye": lambda **kw: torch.eye(2, **kw),
  "linspace": lambda **kw: torch.linspace(0, 1, 3, **kw),
  "rand": lambda **kw: torch.rand(2, **kw),
  "randint": lambda **kw: torch.randint(0, 3, (2,), **kw),
  "randperm": lambda **kw: torch.randperm(3, **kw),
  "empty_strided": lambda **kw: torch.empty_strided((2,), (1,), **kw),
}


@case
def every_factory_makes_its_result_where_it_is_asked_for():
  for name, make in FACTORIES.items():
    assert make(device="jax:3").device == on(3), name
    assert make(device=torch.device("jax:0")).device == on(0), name
    with torch.device("jax:1"):
      assert make().device == on(1), name
    with torch.jax.device(2):
      assert make(device="jax").device == on(2), name
      assert make(device="jax:0").device == on(0), name
    assert make(device="jax").device == on(0), name


@case
def what_is_made_like_a_tensor_is_beside_it():
  for make in (torch.zeros_like, torch.empty_like, torch.rand_like, torch.ones_like):
    assert make(x()).device == on(3)
    assert make(x(), device="jax:2").device == on(2)
    assert make(x(), device="jax:0").device == on(0)
  assert x().new_zeros(2).device == x().new_tensor([1.0]).device == on(3)
  assert x().new_ones(2, device="jax:1").device == on(1)


@case
def the_current_device_is_obeyed_by_every_way_to_jax():
  ways = (torch.jax.device, torch.accelerator.device_index)
  for index, way in enumerate(ways, 4):
    with way(index):
      assert torch.jax.current_device() == index
      assert torch.accelerator.current_device_index() == index
      assert torch.accelerator.current_stream().device == on(index)
      assert torch.zeros(2).to("jax").device == on(index)
      assert torch.zeros(2).to("jax:0").device == on(0)
      assert torch.zeros(2).jax().device == on(index)
      assert torch.nn.Linear(2, 2).to("jax").weight.device == on(index)
    assert torch.jax.current_device() == 0
  for choose in (torch.jax.set_device, torch.accelerator.set_device_index):
    choose(5)
    assert torch.ones(2, device="jax").device == on(5)
    choose(0)
    assert torch.ones(2, device="jax").device == on(0)
  with torch.jax.device_of(x()):
    assert torch.jax.current_device() == 3


@case
def a_stream_is_of_its_device():
  for made in (
    torch.jax.Stream("jax:3"),
    torch.jax.Stream(3),
    torch.jax.Event("jax:3"),
  ):
    assert made.device == on(3)
  with torch.jax.Stream("jax:3"):
    assert torch.ones(2, device="jax").device == on(3)
  assert torch.jax.current_device() == 0


@case
def the_default_device_is_obeyed():
  torch.set_default_device("jax:1")
  try:
    assert torch.ones(2).device == torch.get_default_device() == on(1)
    assert torch.nn.Linear(2, 2).weight.device == on(1)
  finally:
    torch.set_default_device(None)


@case
def jax_s_own_default_device_is_the_current_one_until_torch_chooses():
  def work():
    with jax.default_device(jax.local_devices()[2]):
      assert torch.jax.current_device() == 2
      assert torch.ones(2, device="jax").device == on(2)
      assert torch.ones(2, device="jax:0").device == on(0)
      with torch.jax.device(3):
        assert torch.ones(2, device="jax").device == on(3)
    assert torch.jax.current_device() == 0

  with futures.ThreadPoolExecutor() as threads:  # on a thread of its own
    threads.submit(work).result()


@case
def a_device_that_does_not_exist_raises_and_changes_nothing():
  moved = x()
  for use in (
    lambda: torch.ones(2, device="jax:9"),
    lambda: torch.ones(2).to("jax:9"),
    lambda: moved.to("jax:9"),
    lambda: torch.jax.set_device(9),
    lambda: torch.accelerator.set_device_index(9),
    lambda: torch.jax.device(9).__enter__(),
    lambda: torch.Generator("jax:9"),
    lambda: torch.jax.get_rng_state("jax:9"),
    lambda: torch.jax.Stream(9),
    lambda: torch.jax.memory_stats(9),
  ):
    with pytest.raises(NoSuchDeviceError, match="jax:9 does not exist.*jax:0 to jax:7"):
      use()
  assert torch.jax.current_device() == 0 and moved.device == on(3)


@case
def arrays_of_the_default_device_are_free_to_join_sharded_ones():
  free = (
    torch.ones(8, device="jax"),
    torch.ones(8, device="jax:0"),
    torch.ones(8, device=sharded().device),
    torch.ones(8).to("jax:0"),
    torch.ones(8, device="jax:3").to("jax:0"),
  )
  for tensor in free:
    assert tensor.device == on(0) and is_sharded(sharded() + tensor)


@case
def results_lie_where_their_tensors_lie():
  classes = torch.zeros(1, dtype=torch.int32, device="jax:3")
  operations = {
    "add": lambda t: t + t,
    "number": lambda t: 2 * t + 1,
    "a scalar of the CPU": lambda t: t + torch.tensor(1.0, device="cpu"),
    "view": lambda t: t[1:],
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "mask": lambda t: t[t > 1],
    "sort": lambda t: torch.sort(t).indices,
    "sampler": lambda t: torch.multinomial(t, 1),
    "dropout": F.dropout,
    "histc": torch.histc,
    "where": lambda t: torch.where(t > 1, t, -t),
    "layer_norm": lambda t: F.layer_norm(t, (2,)),
    "einsum": lambda t: torch.einsum("i,i->", t, t),
    "repeat_interleave": lambda t: t.repeat_interleave(2),
    "cross_entropy": lambda t: F.cross_entropy(t[None], classes),
  }
  for name, operation in operations.items():
    assert operation(x()).device == on(3), name


@case
def what_is_changed_in_place_stays_where_it_is():
  changes = ("zero_", "normal_", "uniform_", "random_", "relu_", "exponential_")
  for name in changes:
    assert getattr(x(), name)().device == on(3), name
    assert is_sharded(getattr(sharded(), name)()), name
  assert x().fill_(2).device == on(3) and is_sharded(sharded().fill_(2))
  of_one, of_many = x(), sharded()
  torch._foreach_zero_([of_one])
  torch._foreach_zero_([of_many])
  assert of_one.device == on(3) and is_sharded(of_many)
  changed = x()
  changed[0] = 5
  assert changed.tolist() == [5, 2] and changed.device == on(3)


@case
def tensors_of_two_devices_do_not_mix():
  for other in ("jax:0", "jax:1"):
    y = torch.ones(2, device=other)
    for mix in (lambda a, b: a + b, torch.dot, lambda a, b: torch.stack([a, b])):
      with pytest.raises(MixedDeviceError, match="same device.*jax:3"):
        mix(x(), y)
    with pytest.raises(MixedDeviceError):
      x().add_(y)
  with pytest.raises(MixedDeviceError, match="same device"):
    jax_jit(lambda a, b: a + b)(x(), torch.ones(2, device="jax:1"))


@case
def to_leaves_a_tensor_where_it_is_unless_told_otherwise():
  for tensor in (x(), sharded()):
    assert tensor.to("jax") is tensor and tensor.to(tensor.device) is tensor
    assert tensor.to(torch.float32) is tensor
    assert tensor.to(torch.int32).device == tensor.device
  assert is_sharded(sharded().to("jax:0", torch.int32))
  moved = sharded().to("jax:2")
  assert moved.device == on(2) and len(moved.jax().sharding.device_set) == 1
  assert moved.tolist() == list(range(8))
  assert torch.ones(2, device="jax").type_as(x()).device == on(3)


@case
def a_sharded_tensor_shows_its_sharding():
  text = ", device='jax:0', sharding=PartitionSpec('x',) over Mesh('x': 8))"
  assert repr(sharded()).endswith(text)
  assert sharded().device == on(0) and sharded().get_device() == 0
  half = Mesh(np.array(jax.devices()[4:]), ("x",))
  array = jax.device_put(np.ones(4), NamedSharding(half, PartitionSpec()))
  assert torchax.default_env().j2t_iso(array).device == on(4)


@case
def a_copy_stays_where_its_target_is():
  for source in (torch.ones(8), torch.ones(8, device="jax:3"), sharded(), x()[:1]):
    target = torch.zeros(8, device="jax:1")
    target.copy_(source)
    assert target.device == on(1) and torch.equal(target.cpu(), source.cpu().expand(8))
    target = sharded()
    target.copy_(source)
    assert is_sharded(target) and torch.equal(target.cpu(), source.cpu().expand(8))
  target = torch.zeros(2, 2, device="jax:4")
  target[0].copy_(x())
  assert target.device == on(4) and target[0].tolist() == [1, 2]


@case
def gradients_go_back_to_where_their_tensor_lies():
  for start, end in (("jax:1", "jax:0"), ("jax:0", "jax:3"), ("jax:2", "cpu")):
    leaf = torch.ones(2, device=start, requires_grad=True)
    ((leaf * 2).to(end) * 3).sum().backward()
    assert leaf.grad.device == leaf.device and leaf.grad.tolist() == [6, 6]
  leaf = sharded().requires_grad_()
  (leaf.to("jax:3") * 2).sum().backward()
  assert is_sharded(leaf.grad)


@case
def a_model_trains_where_it_is_put():
  model = torch.nn.Linear(2, 2).to("jax:3")
  optimizer = torch.optim.AdamW(model.parameters())
  model(x()).pow(2).sum().backward()
  optimizer.step()
  states = optimizer.state[model.weight]
  assert states["exp_avg"].device == model.weight.grad.device == on(3)
  assert all(p.device == on(3) for p in copy.deepcopy(model).parameters())
  optimizer.zero_grad(set_to_none=False)
  assert model.weight.grad.device == on(3)
  assert model.jax(2).weight.device == on(2)
  stored = io.BytesIO()
  torch.save(model.state_dict(), stored)
  stored.seek(0)
  loaded = torch.load(stored, map_location="jax:5", weights_only=True)
  assert loaded["weight"].device == on(5)
  model.load_state_dict(loaded)
  assert model.weight.device == on(2)


class TwoStages(torch.nn.Module):
  """Model with one half on each of two devices."""

  def __init__(self):
    super().__init__()
    self.first = torch.nn.LSTM(4, 4).to("jax:1")
    self.second = torch.nn.TransformerEncoderLayer(4, 2, 8).to("jax:2")

  def forward(self, batch):
    hidden, _ = self.first(batch.to("jax:1"))
    return self.second(hidden.to("jax:2")).sum()


@case
def a_model_on_two_devices_trains():
  model = TwoStages()
  optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
  loss = model(torch.ones(3, 2, 4))
  loss.backward()
  before = [p.detach().cpu() for p in model.parameters()]
  torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  optimizer.step()
  after = [p.detach().cpu() for p in model.parameters()]
  assert loss.device == on(2)
  assert all(p.grad.device == on(1) for p in model.first.parameters())
  assert all(p.device == on(2) for p in model.second.parameters())
  assert not all(map(torch.equal, before, after))


@case
def a_checkpoint_recomputes_where_its_tensors_lie():
  for reentrant in (True, False):
    leaf = torch.ones(64, device="jax:3", requires_grad=True)
    out = checkpoint(lambda t: F.dropout(t) * t, leaf, use_reentrant=reentrant)
    out.sum().backward()
    assert leaf.grad.device == on(3) and torch.equal(leaf.grad != 0, out != 0)


@case
def compiled_functions_run_where_their_tensors_lie():
  compiled = jax_jit(lambda t: (t * 2, torch.zeros(2, device=t.device)))
  assert [out.device for out in compiled(x())] == [on(3), on(3)]
  changed = x()
  jax_jit(lambda t: t.add_(1))(changed)
  assert changed.device == on(3) and changed.tolist() == [2, 3]
  assert jax_jit(lambda t: t.to("jax:1") + t)(x()).device == on(3)
  compiled = torch.compile(
    lambda t: t.exp() + torch.ones(2, device=t.device), backend="jax", fullgraph=True
  )
  with torchax.default_env():
    assert compiled(x()).device == on(3)


@case
def one_random_stream_is_shared_by_all_devices():
  torch.manual_seed(0)
  first = [torch.rand(2, device=f"jax:{index}").tolist() for index in (0, 3)]
  torch.jax.manual_seed_all(0)
  again = [torch.rand(2, device=f"jax:{index}").tolist() for index in (5, 0)]
  assert first == again
  states = torch.jax.get_rng_state_all()
  assert len(states) == 8
  expected = torch.rand(2, device="jax")
  torch.jax.set_rng_state_all(states)
  assert torch.equal(torch.rand(2, device="jax"), expected)
  torch.jax.set_rng_state(torch.jax.get_rng_state("jax:3"), "jax:1")
  with torch.random.fork_rng(range(8), device_type="jax"):
    inside = torch.rand(2, device="jax:3")
  assert torch.rand(2, device="jax").tolist() == inside.tolist()
  for wrong in (states[:1], [*states[:7], torch.jax.get_rng_state()]):
    with pytest.raises(ValueError, match="set_rng_state_all expects"):
      torch.jax.set_rng_state_all(wrong)


@case
def a_generator_draws_the_same_on_every_device():
  drawn = []
  for index in (0, 3):
    generator = torch.Generator(f"jax:{index}").manual_seed(4)
    assert generator.device == on(index)
    drawn.append(torch.rand(2, device=f"jax:{index}", generator=generator).tolist())
  assert drawn[0] == drawn[1]
  assert torch.Generator(device=x().device).device == on(3)


@case
def a_traced_tensor_is_on_the_current_device():
  seen = []
  with torch.jax.device(2):
    jax_jit(lambda t: seen.append((t.device, repr(t))) or t * 2)(x())
  assert seen[0][0] == on(2) and "device='jax:2'" in seen[0][1]


@case
def cuda_means_the_same_index_of_jax():
  with torchax.Environment(torchax.Configuration(treat_cuda_as_jax_device=True)):
    assert torch.ones(2, device="cuda:4").device == on(4)
    assert torch.ones(2).cuda(5).device == x().cuda(5).device == on(5)
    assert torch.ones(2).to("cuda:1").device == on(1)
    assert torch.Generator("cuda:1").device == on(1)


if __name__ == "__main__":
  many_devices.main(
    CASES, {"outside": contextlib.nullcontext, "inside": torchax.default_env}
  )
